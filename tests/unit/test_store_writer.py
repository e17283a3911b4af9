"""`StoreWriter`: a store appears whole or not at all."""

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pi2.arrays import U8
from pi2.diagnostics import UserError
from pi2.model.tensor import DenseTensor
from pi2.plan.documents.model import Model
from pi2.store.files import FilePlan, Piece, PlacedFile, check_pieces, hash_file
from pi2.store.manifest import name_layer_file, read_manifest
from pi2.store.reader import NeuronStore
from pi2.store.verification import HashCheck, verify_store
from pi2.store.writer import StoreWriter, TensorPieces
from tests.helpers.bundles import pack_bundles
from tests.helpers.models import make_model, make_tiny

ROOT = Path(__file__).resolve().parents[2]
CHANGES = {"predictor": None, "shape": {"layers": 4}}


def open_writer(path: Path, model: Model, **options: object) -> StoreWriter:
    return StoreWriter(path, model, ranks=None, order="index", **options)  # type: ignore[arg-type]


def zeros(tensor: DenseTensor) -> TensorPieces:
    if tensor.precision == "fp32":
        return [(np.zeros((1, tensor.length), np.float32), None)]
    weights = np.zeros((tensor.rows, tensor.row_weight_bytes), np.uint8)
    return [(weights, np.zeros((tensor.rows, tensor.length // 32), np.float16))]


def make_bundles(writer: StoreWriter, layer: int) -> U8:
    shape = writer.model.shape
    rows = np.full((shape.ffn, shape.hidden), layer + 1, np.float32)
    return pack_bundles(rows, rows, rows, writer.bundle)


def write_layer(writer: StoreWriter, layer: int) -> None:
    order = np.arange(writer.model.shape.ffn, dtype=np.int32)
    writer.write_layer(layer, order, [make_bundles(writer, layer)])


def write_all(writer: StoreWriter) -> None:
    for layer in range(writer.model.shape.layers):
        write_layer(writer, layer)
    writer.write_dense(zeros)
    writer.finish()


def write_store(path: Path, model: Model, **options: object) -> None:
    with open_writer(path, model, **options) as writer:
        write_all(writer)


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def model() -> Model:
    return make_model(CHANGES)


def test_a_finished_store_stands_alone_and_verifies(tmp_path: Path, model: Model) -> None:
    write_store(tmp_path / "store", model)
    assert list_names(tmp_path) == ["store"]
    assert list_names(tmp_path / "store") == ["dense.arrow", "layers", "manifest.json"]
    assert verify_store(tmp_path / "store") == []


def test_layers_may_come_in_any_order_and_in_any_pieces(tmp_path: Path, model: Model) -> None:
    write_store(tmp_path / "whole", model)
    with open_writer(tmp_path / "pieces", model) as writer:
        writer.write_dense(zeros)
        order = np.arange(model.shape.ffn, dtype=np.int32)
        for layer in reversed(range(model.shape.layers)):
            bundles = make_bundles(writer, layer)
            writer.write_layer(layer, order, [bundles[:1], bundles[1:40], bundles[40:]])
        writer.finish()
    for name in ("manifest.json", "layers/ffn-003.arrow"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "pieces" / name).read_bytes()


def test_a_wider_stride_is_kept(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path, stride=4096)
    with NeuronStore.open(tiny.store, model=tiny.model) as store:
        assert store.bundle.stride == 4096
        assert (store.layers[0].bundles[:, store.bundle.used_bytes :] == 0).all()


# Failure
def fail_after(
    path: Path, model: Model, layers: int, error: BaseException, *, job: str = "",
    replace: bool = False,
) -> None:  # fmt: skip
    with open_writer(path, model, job=job, replace=replace) as writer:
        for layer in range(layers):
            write_layer(writer, layer)
        raise error


def test_an_error_leaves_what_was_there(tmp_path: Path, model: Model) -> None:
    path = tmp_path / "store"
    with open_writer(path, model) as writer:
        write_layer(writer, 0)
        assert list_names(tmp_path) == [".store.partial"]
        with pytest.raises(UserError, match="P501"):
            NeuronStore.open(path)
    with pytest.raises(ZeroDivisionError):
        fail_after(path, model, 2, ZeroDivisionError())
    assert list_names(tmp_path) == []
    write_store(path, model)
    with pytest.raises(ZeroDivisionError):
        fail_after(path, model, 1, ZeroDivisionError(), replace=True)
    assert list_names(tmp_path) == ["store"] and verify_store(path) == []


def test_an_existing_store_is_not_overwritten_unless_told(tmp_path: Path, model: Model) -> None:
    write_store(tmp_path / "store", model)
    before = (tmp_path / "store/manifest.json").stat().st_ino
    with pytest.raises(UserError, match="P521"):
        open_writer(tmp_path / "store", model)
    assert (tmp_path / "store/manifest.json").stat().st_ino == before
    write_store(tmp_path / "store", model, replace=True)
    assert (tmp_path / "store/manifest.json").stat().st_ino != before
    assert list_names(tmp_path) == ["store"]


@pytest.mark.parametrize("crash", ["before the new store", "after the new store"])
def test_a_replacement_cut_in_two_by_a_crash_is_repaired(
    tmp_path: Path, model: Model, crash: str
) -> None:
    write_store(tmp_path / ".store.old", model)
    if crash == "after the new store":
        with open_writer(tmp_path / "other", model) as writer:
            write_all(writer)
        os.rename(tmp_path / "other", tmp_path / "store")
    with pytest.raises(UserError, match="P521"):
        open_writer(tmp_path / "store", model)
    if crash == "before the new store":
        assert verify_store(tmp_path / "store") == []
    write_store(tmp_path / "store", model, replace=True)
    assert list_names(tmp_path) == ["store"]


@pytest.mark.parametrize("exchange", [True, False])
def test_a_crash_while_a_store_is_replaced_leaves_one_of_the_two(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr("pi2.store.files.exchange_names", lambda first, second: False)
    write_store(tmp_path / "store", model)
    before = (tmp_path / "store/manifest.json").stat().st_ino
    rename = os.rename

    def crash(source: Path, target: Path) -> None:
        rename(source, target) if not exchange else None
        raise SystemExit(9)

    with monkeypatch.context() as broken:
        broken.setattr("pi2.store.files.os.rename", crash)
        with (
            pytest.raises(SystemExit),
            open_writer(tmp_path / "store", model, replace=True) as writer,
        ):
            write_all(writer)
    if exchange:
        # Where names are exchanged there is a store at every moment: here, the new one.
        assert verify_store(tmp_path / "store") == []
        assert (tmp_path / "store/manifest.json").stat().st_ino != before
    write_store(tmp_path / "store", model, replace=True)
    assert verify_store(tmp_path / "store") == []
    assert list_names(tmp_path) == ["store"]


@pytest.mark.parametrize("replace", [False, True])
def test_a_folder_that_is_no_store_is_never_replaced(
    tmp_path: Path, model: Model, replace: bool
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/letter.txt").write_text("dear")
    with pytest.raises(UserError, match=r"P521.*not a neuron store"):
        open_writer(tmp_path / "home", model, replace=replace)
    assert list_names(tmp_path / "home") == ["letter.txt"]


def test_two_writers_of_one_store_do_not_meet(tmp_path: Path, model: Model) -> None:
    with open_writer(tmp_path / "store", model) as writer:
        with pytest.raises(UserError, match="P522"):
            open_writer(tmp_path / "store", model)
        write_all(writer)
    assert verify_store(tmp_path / "store") == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, model: Model) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"P523.*cannot write"):
        open_writer(tmp_path / "file/store", model)


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path, model: Model) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # one file is larger
    try:
        with (
            pytest.raises(UserError, match="P523"),
            open_writer(tmp_path / "store", model) as writer,
        ):
            write_all(writer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list_names(tmp_path) == []


# Going on after an interruption
def interrupt_after(path: Path, model: Model, layers: int, job: str = "job") -> None:
    with pytest.raises(KeyboardInterrupt):
        fail_after(path, model, layers, KeyboardInterrupt(), job=job)


def test_the_same_job_keeps_what_was_finished(tmp_path: Path, model: Model) -> None:
    interrupt_after(tmp_path / "store", model, 2)
    kept = (tmp_path / ".store.partial/layers/ffn-001.arrow").stat().st_ino

    asked: list[int] = []

    def give() -> Iterator[U8]:
        asked.append(0)
        yield from []

    with open_writer(tmp_path / "store", model, job="job") as writer:
        found = [writer.has_file(name_layer_file(layer)) for layer in range(3)]
        assert found == [True, True, False]
        writer.write_layer(0, np.arange(model.shape.ffn, dtype=np.int32), give())
        write_all(writer)
    assert asked == []
    assert (tmp_path / "store/layers/ffn-001.arrow").stat().st_ino == kept
    assert verify_store(tmp_path / "store") == []
    assert list_names(tmp_path) == ["store"]


def test_a_resumed_store_equals_one_made_at_once(tmp_path: Path, model: Model) -> None:
    interrupt_after(tmp_path / "resumed", model, 3)
    for name in ("resumed", "whole"):
        write_store(tmp_path / name, model, job="job")
    texts = {(tmp_path / name / "manifest.json").read_bytes() for name in ("resumed", "whole")}
    assert len(texts) == 1


@pytest.mark.parametrize("job", ["other", ""])
def test_another_job_begins_anew(tmp_path: Path, model: Model, job: str) -> None:
    interrupt_after(tmp_path / "store", model, 2)
    with open_writer(tmp_path / "store", model, job=job) as writer:
        assert not writer.has_file(name_layer_file(0))
        write_all(writer)


def test_a_leftover_that_was_damaged_is_written_again(tmp_path: Path, model: Model) -> None:
    interrupt_after(tmp_path / "store", model, 3)
    leftover = tmp_path / ".store.partial/layers"
    content = bytearray((leftover / "ffn-000.arrow").read_bytes())
    content[5000] ^= 1
    (leftover / "ffn-000.arrow").write_bytes(content)
    (leftover / "ffn-001.arrow").write_bytes(b"cut")
    with open_writer(tmp_path / "store", model, job="job") as writer:
        found = [writer.has_file(name_layer_file(layer)) for layer in range(3)]
        assert found == [False, False, True]
        write_all(writer)
    assert verify_store(tmp_path / "store") == []


@pytest.mark.parametrize("line", ['{"path": "layers/f', '{"path": 3}', "[]", '"', "\x00"])
def test_a_journal_that_a_crash_cut_is_used_as_far_as_it_goes(
    tmp_path: Path, model: Model, line: str
) -> None:
    interrupt_after(tmp_path / "store", model, 2)
    with (tmp_path / ".store.partial/journal.jsonl").open("a") as journal:
        journal.write(line)
    with open_writer(tmp_path / "store", model, job="job") as writer:
        assert writer.has_file(name_layer_file(1))
        write_all(writer)
    assert verify_store(tmp_path / "store") == []


def test_a_journal_cannot_name_files_elsewhere(tmp_path: Path, model: Model) -> None:
    interrupt_after(tmp_path / "store", model, 1)
    (tmp_path / "outside").write_bytes(b"")
    entry = {
        "path": "../outside",
        "bytes": 0,
        "sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    }
    with (tmp_path / ".store.partial/journal.jsonl").open("a") as journal:
        journal.write(json.dumps(entry) + "\n")
    with open_writer(tmp_path / "store", model, job="job") as writer:
        assert not writer.has_file("../outside")
        write_all(writer)


WRITE_SLOWLY = """
import sys, time
from pathlib import Path
from tests.unit.test_store_writer import CHANGES, open_writer, write_layer, zeros
from tests.helpers.models import make_model
with open_writer(
    Path(sys.argv[1]), make_model(CHANGES), job="slow", scales=sys.argv[2]
) as writer:
    print("ready", flush=True)
    for layer in range(4):
        write_layer(writer, layer)
        time.sleep(0.01)
    writer.write_dense(zeros)
    writer.finish()
print("done", flush=True)
"""


def start_writing(path: Path, scales: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITE_SLOWLY, str(path), scales],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(
    ("delay_ms", "scales"), [(0, "inline"), (15, "resident"), (30, "inline"), (45, "resident")]
)
def test_kill_at_any_moment_leaves_no_half_store_and_the_next_run_succeeds(
    tmp_path: Path, delay_ms: int, scales: str
) -> None:
    store = tmp_path / "store"
    process = start_writing(store, scales)
    time.sleep(delay_ms / 1000)
    process.send_signal(signal.SIGKILL)
    process.wait()
    if store.exists():
        # The kill came after the last moment: then the store is whole.
        assert verify_store(store) == []
        return
    with pytest.raises(UserError, match="P501"):
        NeuronStore.open(store)
    with start_writing(store, scales) as again:
        assert again.wait() == 0
    assert verify_store(store) == []
    assert list_names(tmp_path) == ["store"]


def test_files_that_are_read_as_a_whole_have_a_check_for_every_mib(tmp_path: Path) -> None:
    content = bytes(range(256)) * 4096 * 2 + b"the rest"
    checks: list[int] = []
    plan = FilePlan(pieces=(Piece(1, content[1:7]),), size=len(content))
    with PlacedFile(tmp_path / "x", plan) as file:
        for first, end in ((2**20 + 9, None), (7, 2**20 + 9), (0, 1)):
            file.write(first, content[first:end])
        file.finish()
    assert hash_file(tmp_path / "x", checks=checks) == hashlib.sha256(content).hexdigest()
    pieces = [content[start : start + 2**20] for start in range(0, len(content), 2**20)]
    assert list(checks) == [zlib.crc32(piece) for piece in pieces]
    assert check_pieces(tmp_path / "x", checks)
    for place in (0, 2**20, len(content) - 1):
        changed = bytearray(content)
        changed[place] ^= 1
        (tmp_path / "x").write_bytes(changed)
        assert not check_pieces(tmp_path / "x", checks)


def test_a_file_goes_on_from_what_was_settled_unless_it_is_another_file(tmp_path: Path) -> None:
    def begin(head: bytes) -> list[bool]:
        plan = FilePlan(pieces=(Piece(0, head),), size=12)
        with PlacedFile(tmp_path / "x", plan, keeps=True) as file:
            there = [file.has(number) for number in (0, 1)]
            file.mark(1)
            file.settle()
            file.mark(0)
        return there

    found = [begin(head) for head in (b"head", b"head", b"heap")]
    assert found == [[False, False], [False, True], [False, False]]
    assert not (tmp_path / "x").exists()


def test_a_store_without_checks_of_files_is_checked_by_their_hashes(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path)
    file = tiny.store / "manifest.json"
    fields = json.loads(file.read_text())
    assert [entry["path"] for entry in fields["files"] if entry["checks"]] == [
        "dense.arrow",
        "tokenizer.json",
    ]
    for entry in fields["files"]:
        del entry["checks"]
    file.write_text(json.dumps(fields))
    HashCheck(tiny.store, read_manifest(tiny.store)).finish()
    with (tiny.store / "dense.arrow").open("r+b") as stream:
        stream.seek(5000)
        stream.write(b"\xff\xfe\xfd")
    with pytest.raises(UserError, match=r"P507.*SHA-256"):
        HashCheck(tiny.store, read_manifest(tiny.store)).finish()


def test_a_check_for_too_few_pieces_makes_no_manifest(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path)
    file = tiny.store / "manifest.json"
    fields = json.loads(file.read_text())
    fields["files"][0]["checks"] = []
    file.write_text(json.dumps(fields))
    with pytest.raises(UserError, match=r"P503.*has 0 checks, not 1"):
        read_manifest(tiny.store)
