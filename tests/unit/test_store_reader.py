"""`NeuronStore`: what an open store gives, and what it says of a broken one."""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tvm_ffi

from pi2.diagnostics import UserError
from pi2.store.reader import NeuronStore
from tests.helpers.models import TinyModel, make_model


def expect_error(path: Path, code: str, *words: str, **options: Any) -> None:
    with pytest.raises(UserError) as caught:
        NeuronStore.open(path, **options)
    assert [item.code for item in caught.value.diagnostics] == [code]
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert caught.value.exit_code == 2


def change_manifest(store: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = store / "manifest.json"
    fields = json.loads(file.read_text())
    change(fields)
    file.write_text(json.dumps(fields))


# What an open store gives
def test_arrays_are_not_copied_and_kernels_accept_them(tiny: TinyModel) -> None:
    with NeuronStore.open(tiny.store) as store:
        arrays = [store.layers[0].bundles, *(item.weights for item in store.tensors.values())]
        for array in arrays:
            assert not array.flags.owndata
            tvm_ffi.from_dlpack(array)  # refuses read-only arrays


def test_writing_to_an_array_leaves_the_store_as_it_is(tiny: TinyModel) -> None:
    before = (tiny.store / "layers/ffn-000.arrow").read_bytes()
    with NeuronStore.open(tiny.store) as store:
        store.layers[0].bundles[:] = 0
    assert (tiny.store / "layers/ffn-000.arrow").read_bytes() == before


def test_opening_reads_no_weights_and_loads_no_arrow(tiny: TinyModel) -> None:
    for file in [tiny.store / "dense.arrow", *tiny.store.glob("layers/*")]:
        size = file.stat().st_size
        file.write_bytes(b"")
        with file.open("r+b") as stream:
            stream.truncate(size)  # garbage of the right size
    code = (
        "import sys\nfrom pi2.store.reader import NeuronStore\n"
        f"store = NeuronStore.open({str(tiny.store)!r})\nstore.tensors, store.layers[0].bundles\n"
        "assert 'pyarrow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_tokenizer_is_the_file_that_the_model_names(tiny: TinyModel) -> None:
    with NeuronStore.open(tiny.store, model=tiny.model) as store:
        assert store.tokenizer_path == tiny.store / "tokenizer.json"
        assert store.tokenizer_path.is_file()
    other = make_model({"tokenizer": {"file": "words.json"}})
    with NeuronStore.open(tiny.store, model=other) as store:
        assert store.tokenizer_path == tiny.store / "words.json"


# Broken stores
def test_no_finished_store(tiny: TinyModel, tmp_path: Path) -> None:
    expect_error(tmp_path / "nowhere", "P501", "nowhere", "pi2 convert")
    (tmp_path / "file").write_text("x")
    expect_error(tmp_path / "file", "P501", "not a folder")
    (tiny.store / "layers/ffn-002.arrow").unlink()
    expect_error(tiny.store, "P506", "ffn-002.arrow", "missing")
    (tiny.store / "manifest.json").unlink()
    expect_error(tiny.store, "P502", "not a finished one")


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"\xff\xfe\x00", b"[]", b"null", b'{"format": "other"}', b"[" * 100_000,
        b'{"format": "pi2-store", "format_version": 1}',
    ],
)  # fmt: skip
def test_garbage_instead_of_a_manifest(tiny: TinyModel, content: bytes) -> None:
    (tiny.store / "manifest.json").write_bytes(content)
    with pytest.raises(UserError) as caught:
        NeuronStore.open(tiny.store)
    assert {item.code for item in caught.value.diagnostics} == {"P503"}


def test_a_newer_format_asks_for_a_newer_pi2(tiny: TinyModel) -> None:
    change_manifest(tiny.store, lambda fields: fields.update(format_version=2, new_key=[]))
    expect_error(tiny.store, "P504", "format version 2", "newer pi2")


def test_another_model_is_named_with_the_values_that_differ(tiny: TinyModel) -> None:
    expect_error(
        tiny.store,
        "P505",
        "shape.ffn is 96 in the store, 128 in the model document",
        'ffn.activation is "drelu" in the store, "relu" in the model document',
        "'other'",
        model=make_model({"id": "other", "shape": {"ffn": 128}, "ffn": {"activation": "relu"}}),
    )
    absent = "predictor.rank is 32 in the store, absent in the model document"
    expect_error(tiny.store, "P505", absent, model=make_model({"predictor": None}))


def test_what_does_not_decide_weights_does_not_matter(tiny: TinyModel) -> None:
    renamed = make_model({"id": "renamed", "name": "Renamed", "tokenizer": {"eos": [1, 2]}})
    NeuronStore.open(tiny.store, model=renamed).close()


@pytest.mark.parametrize("file", ["dense.arrow", "layers/ffn-001.arrow", "tokenizer.json"])
def test_a_truncated_file_is_named_with_both_sizes(tiny: TinyModel, file: str) -> None:
    path = tiny.store / file
    size = path.stat().st_size
    with path.open("r+b") as stream:
        stream.truncate(size - 1)
    expect_error(tiny.store, "P506", file, str(size), str(size - 1))


def test_a_file_that_shrinks_after_opening_is_noticed_when_it_is_mapped(tiny: TinyModel) -> None:
    with NeuronStore.open(tiny.store) as store:
        store.layers[0].path.write_bytes(b"short")
        with pytest.raises(UserError, match="P506"):
            _ = store.layers[0].bundles


def set_first_layer(**values: object) -> Callable[[dict[str, Any]], None]:
    def change(fields: dict[str, Any]) -> None:
        entry = next(item for item in fields["files"] if item["path"] == "layers/ffn-000.arrow")
        entry.update(values)

    return change


def set_tensor(**values: object) -> Callable[[dict[str, Any]], None]:
    return lambda fields: fields["tensors"][1].update(values)


CONTRADICTIONS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a path that leads out": set_first_layer(path="../ffn-000.arrow"),
    "an absolute path": set_first_layer(path="/etc/passwd"),
    "a path through the parent": set_first_layer(path="layers/../../ffn-000.arrow"),
    "a path with a backslash": set_first_layer(path="layers\\ffn-000.arrow"),
    "the manifest itself": set_first_layer(path="manifest.json"),
    "bundles at an odd byte": set_first_layer(bundles_offset=512),
    "bundles beyond the file": set_first_layer(bundles_offset=4096 * 1000),
    "a negative offset": set_first_layer(neurons_offset=-4),
    "indices beyond the file": set_first_layer(neurons_offset=2**62),
    "too many neurons": set_first_layer(rows=10**9),
    "fewer neurons than the model": set_first_layer(rows=95),
    "no offsets": set_first_layer(bundles_offset=None),
    "a hash that is none": set_first_layer(sha256="beef"),
    "a size as text": set_first_layer(bytes="many"),
    "a tensor beyond the file": set_tensor(weights_offset=2**40),
    "a tensor that is not aligned": set_tensor(weights_offset=65),
    "a tensor of other size": set_tensor(rows=7),
    "a tensor of unknown type": set_tensor(precision="int3"),
    "a tensor with another's name": set_tensor(name="embedding"),
    "a missing tensor": lambda fields: fields["tensors"].pop(),
    "a missing layer": lambda fields: fields["files"].pop(1),
    "a file listed twice": lambda fields: fields["files"].append(fields["files"][0]),
    "a wrong stride": lambda fields: fields["bundle"].update(stride=64),
    "a stride that is not aligned": lambda fields: fields["bundle"].update(stride=513),
    "a larger stride": lambda fields: fields["bundle"].update(stride=1024),
    "other bytes in a bundle": lambda fields: fields["bundle"].update(used_bytes=9),
    "another hidden size": lambda fields: fields["bundle"].update(hidden=96),
    "misplaced parts": lambda fields: fields["bundle"]["parts"].reverse(),
    "a digest of something else": lambda fields: fields["model"].update(digest="0" * 64),
    "changed model parts": lambda fields: fields["model"]["parts"]["shape"].update(ffn=64),
    "model parts that are no model": lambda fields: fields["model"].update(parts={"a": 1}),
    "too few ranks": lambda fields: fields["predictor"].update(rank=[32]),
    "an unknown key": lambda fields: fields.update(surprise=1),
    "not a number": lambda fields: fields["model"]["parts"].update(norm=float("nan")),
    "a number as version": lambda fields: fields.update(format_version="1"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_manifest_that_contradicts_itself_is_refused(tiny: TinyModel, name: str) -> None:
    change_manifest(tiny.store, CONTRADICTIONS[name])
    with pytest.raises(UserError) as caught:
        NeuronStore.open(tiny.store)
    assert {item.code for item in caught.value.diagnostics} == {"P503"}
    assert "make the store again" in str(caught.value)


def test_a_manifest_with_a_fitting_digest_is_still_held_against_the_files(tiny: TinyModel) -> None:
    def change(fields: dict[str, Any]) -> None:
        parts = fields["model"]["parts"]
        parts["shape"]["hidden"] = 96
        text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
        fields["model"]["digest"] = hashlib.sha256(text.encode()).hexdigest()

    change_manifest(tiny.store, change)
    expect_error(tiny.store, "P503", "the bundles do not fit the model")


def test_a_store_reached_through_links_opens(tiny: TinyModel, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    shutil.copytree(tiny.store, linked)
    (linked / "dense.arrow").unlink()
    (linked / "dense.arrow").symlink_to(tiny.store / "dense.arrow")
    (tmp_path / "alias").symlink_to(linked)
    with NeuronStore.open(tmp_path / "alias") as store:
        assert store.tensors["embedding"].rows == 288
