"""Broken GGUF files: one diagnostic that names file and tensor, and no store left behind."""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pi2.arrays import F32
from pi2.diagnostics import UserError
from pi2.importing.checkpoint import open_checkpoint
from pi2.importing.convert import convert_checkpoint
from pi2.importing.gguf_file import read_gguf
from pi2.importing.gguf_metadata import Metadata
from pi2.importing.gguf_tokenizer import make_tokenizer
from pi2.importing.gguf_tokens import read_chat_files
from pi2.importing.new_model import describe_checkpoint
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.gguf_files import write_gguf
from tests.helpers.gguf_tensors import list_settings, translate
from tests.helpers.models import draw_weights, make_model
from tests.helpers.tables import in_table

GATE = "blk.1.ffn_gate.weight"


@dataclass
class Job:
    folder: Path
    settings: dict[str, Any]
    tensors: dict[str, F32]
    architecture: str = "llama"

    @property
    def file(self) -> Path:
        return self.folder / "tiny.gguf"

    @property
    def tokenizer(self) -> Path:
        return self.folder / "checkpoint/tokenizer.json"

    def save(self) -> None:
        self.file.unlink(missing_ok=True)
        write_gguf(self.file, self.architecture, self.settings, self.tensors)

    def convert(self) -> None:
        model = describe_checkpoint(self.file).model
        convert_checkpoint(self.file, model, self.folder / "store", tokenizer=self.tokenizer)

    def expect(self, code: str, *words: str) -> None:
        """Description or conversion fails with ``code``, says ``words``, leaves nothing behind."""
        with pytest.raises(UserError) as caught:
            self.convert()
        assert [item.code for item in caught.value.diagnostics] == [code], str(caught.value)
        text = str(caught.value)
        assert all(word in text for word in words), text
        left = {path.name for path in self.folder.iterdir()}
        assert not left & {"store", ".store.partial", ".store.old"}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    model = make_model({"predictor": None, "shape": {"layers": 2}})
    weights = draw_weights(model)
    write_checkpoint(tmp_path / "checkpoint", model, weights)
    job = Job(tmp_path, list_settings(model), translate(model, weights))
    job.save()
    return job


def patch(file: Path, offset: int, content: bytes) -> None:
    with file.open("r+b") as stream:
        stream.seek(offset)
        stream.write(content)


def find_entry(file: Path, name: str) -> int:
    label = struct.pack("<Q", len(name)) + name.encode()
    content = file.read_bytes()
    assert content.count(label) == 1
    return content.index(label) + len(label)


OTHER, FREQUENCIES = GATE.replace("blk.1", "blk.0"), "rope_freqs.weight"
SIGNALLING = np.array([0x7F800001], np.uint32).view(np.float32)[0]
KIND, PLACE = 4 + 16, 4 + 16 + 4
"""Bytes from the number of dimensions to a tensor's type and to its offset."""


def patch_entry(place: int, form: str, *values: int | bytes) -> Callable[[Job], object]:
    return lambda job: patch(
        job.file, find_entry(job.file, GATE) + place, struct.pack(form, *values)
    )


def patch_file(place: int, form: str, value: int) -> Callable[[Job], object]:
    return lambda job: patch(job.file, place, struct.pack(form, value))


def narrow_row(job: Job) -> None:
    patch_entry(4, "<Q", 63)(job)
    patch_entry(KIND, "<I", 2)(job)


def rename(job: Job) -> None:
    patch(job.file, find_entry(job.file, GATE) - len(GATE), OTHER.encode())


def forget_layers(job: Job) -> None:
    content = job.file.read_bytes()
    job.file.write_bytes(content.replace(b"llama.block_count", b"llama.block_kount"))


def save(change: Callable[[Job], object]) -> Callable[[Job], object]:
    def spoil(job: Job) -> None:
        change(job)
        job.save()

    return spoil


def state(key: str, value: object) -> Callable[[Job], object]:
    return save(lambda job: job.settings.update({key: value}))


def put(name: str, change: Callable[[Any], F32]) -> Callable[[Job], object]:
    return save(lambda job: job.tensors.update({name: change(job.tensors.get(name))}))


def call(architecture: str) -> Callable[[Job], object]:
    return save(lambda job: setattr(job, "architecture", architecture))


def divide_frequencies(factor: float) -> Callable[[Job], object]:
    return put(FREQUENCIES, lambda _: np.full(8, factor, np.float32))


SPOILT: dict[str, tuple[Callable[[Job], object], str, tuple[str, ...]]] = {
    "no file": (lambda job: job.file.unlink(), "P530", ("tiny.gguf",)),
    "version 1": (patch_file(4, "<I", 1), "P532", ("version is 1",)),
    "version 99": (patch_file(4, "<I", 99), "P532", ("version is 99",)),
    "another order of bytes": (patch_file(4, "<I", 0x03000000), "P532", ("big-endian",)),
    "too many tensors": (patch_file(8, "<Q", 2**60), "P532", ("tiny.gguf",)),
    "too much metadata": (patch_file(16, "<Q", 2**60), "P532", ("tiny.gguf",)),
    "tensors that overlap": (patch_entry(PLACE, "<Q", 0), "P532", (GATE, "overlap")),
    "a tensor beyond the end": (patch_entry(PLACE, "<Q", 2**62), "P532", (GATE, "cut")),
    "not aligned": (patch_entry(PLACE, "<Q", 8), "P532", (GATE, "multiple of 32")),
    "an unknown type": (patch_entry(KIND, "<I", 77), "P535", (GATE, "77", "tiny.gguf")),
    "a type that is no float": (patch_entry(KIND, "<I", 26), "P535", (GATE, "I32")),
    "no dimensions": (patch_entry(0, "<I", 0), "P532", (GATE, "dimensions")),
    "five dimensions": (patch_entry(0, "<I", 5), "P532", (GATE, "dimensions")),
    "2^31 dimensions": (patch_entry(0, "<I", 2**31), "P532", (GATE, "dimensions")),
    "a row that is no whole blocks": (narrow_row, "P532", (GATE, "Q4_0", "blocks of 32")),
    "a tensor twice": (rename, "P536", (OTHER, "twice")),
    "a missing tensor": (save(lambda job: job.tensors.pop(GATE)), "P533", (GATE, "tiny.gguf")),
    "no embedding": (
        save(lambda job: job.tensors.pop("token_embd.weight")),
        *("P533", ("token_embd.weight",)),
    ),
    "a wrong shape": (
        put(GATE, lambda gate: gate[:-32]),
        *("P534", (GATE, "[64, 64]", "[96, 64]", "its metadata says")),
    ),
    "no number": (put(GATE, lambda gate: np.full_like(gate, np.nan)), "P539", (GATE, "tiny.gguf")),
    "a signalling NaN": (put(GATE, lambda gate: np.full_like(gate, SIGNALLING)), "P539", (GATE,)),
    "an unknown family": (call("qwen9"), "P544", ("'qwen9'", "qwen2", "qwen3")),
    "no operator": (call("minimax-01"), "P544", ("minimax-01", "lightning")),
    "2^31 layers": (state(".block_count", 2**31), "P544", ("2147483648", "1024")),
    "metadata that is missing": (forget_layers, "P532", ("llama.block_count", "tiny.gguf")),
    "metadata of another type": (
        state(".attention.sliding_window", "wide"),
        *("P532", ("sliding_window", "'wide'")),
    ),
    "layers that differ": (
        state(".expert_count", [0, 8]),
        *("P532", ("llama.expert_count differs between layers",)),
    ),
    "a part of a split under another name": (
        save(lambda job: job.settings.update({"split.count": 3, "split.no": 1})),
        *("P532", ("split.count is 3",)),
    ),
    "a list where a number belongs": (state("split.count", [3, 4]), "P532", ("split.count",)),
    "positions scaled in an unknown way": (
        put(FREQUENCIES, lambda _: np.linspace(1, 3, 8, dtype=np.float32)),
        *("P544", (FREQUENCIES,)),
    ),
    **{
        f"frequencies divided by {factor}": (divide_frequencies(factor), *("P544", (FREQUENCIES,)))
        for factor in (0.0, -1.0, np.nan, np.inf)
    },
}


@pytest.mark.parametrize("name", SPOILT)
@pytest.mark.filterwarnings("error")
def test_a_spoilt_file_is_one_finding(job: Job, name: str) -> None:
    spoil, code, words = SPOILT[name]
    spoil(job)
    job.expect(code, *words)


@pytest.mark.parametrize(
    "content",
    [b"", b"GGUF", b"<html><body>not found</body></html>", b"version https://git-lfs.github.com"],
)
def test_something_else(job: Job, content: bytes) -> None:
    job.file.write_bytes(content)
    job.expect("P532", "tiny.gguf", "GGUF file")


def test_a_cut_file_names_the_tensor_that_is_gone(job: Job) -> None:
    last = max(read_gguf(job.file).entries.values(), key=lambda entry: entry.offset)
    with job.file.open("r+b") as stream:
        stream.truncate(last.offset + last.size_bytes - 1)
    job.expect("P532", "tiny.gguf", "cut", last.name)


@pytest.mark.parametrize("size", [30, 200, 700])
def test_a_cut_header(job: Job, size: int) -> None:
    with job.file.open("r+b") as stream:
        stream.truncate(size)
    job.expect("P532", "ends inside")


def test_a_file_that_is_cut_while_it_is_read(job: Job) -> None:
    def cut(label: str, share: float) -> None:
        if share > 0:
            with job.file.open("r+b") as stream:
                stream.truncate(9000)

    model = describe_checkpoint(job.file).model
    with pytest.raises(UserError, match=r"P532.*tiny\.gguf ends inside tensor 'blk\."):
        convert_checkpoint(
            job.file, model, job.folder / "store", tokenizer=job.tokenizer, progress=cut
        )
    assert not (job.folder / "store").exists()


def test_a_folder_of_files_that_do_not_belong_together(job: Job) -> None:
    job.file.with_name("other.gguf").write_bytes(b"")
    with pytest.raises(UserError, match=r"P531.*2 GGUF files"):
        open_checkpoint(job.folder)


def test_a_file_may_have_any_name(job: Job) -> None:
    renamed = job.file.rename(job.folder / "model.bin")
    assert open_checkpoint(renamed).files == (renamed,)


@in_table
def test_a_size_of_nothing(job: Job, key: str) -> None:
    state(key, 0)(job)
    if key == ".attention.sliding_window":
        job.convert()
        return
    with pytest.raises(UserError) as caught:
        job.convert()
    assert {item.code for item in caught.value.diagnostics} <= {"P532", "P544"}


def test_a_token_of_a_whole_book(job: Job) -> None:
    job.settings |= {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "a", "b" * 5000],
        "tokenizer.ggml.scores": [0.0, -1.0, -2.0],
    }
    job.save()
    with pytest.raises(UserError, match=r"P543.*a token has 5000 characters"):
        convert_checkpoint(job.file, describe_checkpoint(job.file).model, job.folder / "store")


def test_numbers_beyond_those_of_32_bits(job: Job) -> None:
    content = job.file.read_bytes()
    # float64 1e300 where the file has a float32.
    old = b"llama.attention.layer_norm_rms_epsilon" + struct.pack("<I", 6)
    assert content.count(old) == 1
    place = content.index(old) + len(old)
    new = old[:-4] + struct.pack("<I", 12) + struct.pack("<d", 1e300)
    job.file.write_bytes(content[: place - len(old)] + new + content[place + 4 :])
    job.expect("P532", "layer_norm_rms_epsilon is 1e+300")


def test_kinds_of_tokens_that_are_no_numbers(job: Job) -> None:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "a"],
        "tokenizer.ggml.token_type": np.array([np.inf, 1.0], np.float32),
    }
    with pytest.raises(UserError, match="P543"):
        make_tokenizer(job.file, metadata)


def test_tokens_that_are_lists(job: Job) -> None:
    metadata = {
        "tokenizer.chat_template": "{{ messages }}",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [np.zeros(2, np.uint8), "a"],
        "tokenizer.ggml.bos_token_id": 0,
    }
    assert read_chat_files(metadata)["tokenizer_config.json"] == b"{}"
    with pytest.raises(UserError, match="P543"):
        make_tokenizer(job.file, metadata)


@pytest.mark.parametrize(
    ("value", "kinds"),
    [
        *((own, "biu") for own in (["yes"] * 3, [], [True], [0.5] * 3)),
        *((own, "iu") for own in ([4, 4], [True] * 3, np.zeros((3, 3), np.int32))),
    ],
)
def test_values_of_layers_that_are_none_are_refused(value: Any, kinds: str) -> None:
    metadata = Metadata(Path("tiny.gguf"), {"general.architecture": "llama", "llama.narrow": value})
    with pytest.raises(UserError, match=r"P532.*narrow"):
        metadata.read_list("{arch}.narrow", 3, kinds)
