"""Broken GGUF files: one diagnostic that names file and tensor, and no store left behind."""

from __future__ import annotations

import contextlib
import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pi2.arrays import F32
from pi2.diagnostics import UserError
from pi2.importing.checkpoint import open_checkpoint
from pi2.importing.convert import convert_checkpoint
from pi2.importing.gguf_decoders import Metadata
from pi2.importing.gguf_file import read_gguf
from pi2.importing.gguf_tokenizer import make_tokenizer, read_chat_files
from pi2.importing.new_model import describe_checkpoint
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.gguf_files import write_gguf
from tests.helpers.gguf_tensors import translate
from tests.helpers.models import draw_weights, make_model

GATE = "blk.1.ffn_gate.weight"


@dataclass
class Job:
    """A GGUF file that a test spoils before it is converted."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, F32]
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        return self.folder / "tiny.gguf"

    @property
    def tokenizer(self) -> Path:
        return self.folder / "checkpoint/tokenizer.json"

    def save(self) -> None:
        self.file.unlink(missing_ok=True)
        write_gguf(self.file, self.config, self.tensors, changes=self.changes)

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
    checkpoint = write_checkpoint(tmp_path / "checkpoint", model, weights)
    config = json.loads((checkpoint / "config.json").read_text()) | {"max_position_embeddings": 64}
    job = Job(tmp_path, config, translate(weights, config))
    job.save()
    return job


def patch(file: Path, offset: int, content: bytes) -> None:
    with file.open("r+b") as stream:
        stream.seek(offset)
        stream.write(content)


def find_entry(file: Path, name: str) -> int:
    """Byte of the number of dimensions in the entry of tensor ``name``."""
    label = struct.pack("<Q", len(name)) + name.encode()
    content = file.read_bytes()
    assert content.count(label) == 1
    return content.index(label) + len(label)


def test_the_unspoilt_file_converts(job: Job) -> None:
    job.convert()
    assert (job.folder / "store/manifest.json").is_file()


def test_missing_file(job: Job) -> None:
    job.file.unlink()
    job.expect("P530", "tiny.gguf")


@pytest.mark.parametrize(
    "content",
    [b"", b"GGUF", b"<html><body>not found</body></html>", b"version https://git-lfs.github.com"],
)
def test_something_else(job: Job, content: bytes) -> None:
    job.file.write_bytes(content)
    job.expect("P532", "tiny.gguf", "GGUF file")


@pytest.mark.parametrize(
    ("version", "words"), [(1, "version is 1"), (99, "version is 99"), (0x03000000, "big-endian")]
)
def test_another_version(job: Job, version: int, words: str) -> None:
    patch(job.file, 4, struct.pack("<I", version))
    job.expect("P532", words)


@pytest.mark.parametrize("offset", [8, 16])
def test_absurd_counts(job: Job, offset: int) -> None:
    patch(job.file, offset, struct.pack("<Q", 2**60))
    job.expect("P532", "tiny.gguf")


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


def test_tensors_that_overlap(job: Job) -> None:
    patch(job.file, find_entry(job.file, GATE) + 4 + 16 + 4, struct.pack("<Q", 0))
    job.expect("P532", GATE, "overlap")


def test_a_tensor_beyond_the_end(job: Job) -> None:
    patch(job.file, find_entry(job.file, GATE) + 4 + 16 + 4, struct.pack("<Q", 2**62))
    job.expect("P532", GATE, "cut")


def test_a_tensor_that_is_not_aligned(job: Job) -> None:
    patch(job.file, find_entry(job.file, GATE) + 4 + 16 + 4, struct.pack("<Q", 8))
    job.expect("P532", GATE, "multiple of 32")


def test_an_unknown_type(job: Job) -> None:
    patch(job.file, find_entry(job.file, GATE) + 4 + 16, struct.pack("<I", 77))
    job.expect("P535", GATE, "77", "tiny.gguf")


def test_a_type_that_is_no_float(job: Job) -> None:
    patch(job.file, find_entry(job.file, GATE) + 4 + 16, struct.pack("<I", 26))
    job.expect("P535", GATE, "I32")


@pytest.mark.parametrize("count", [0, 5, 2**31])
def test_dimensions(job: Job, count: int) -> None:
    patch(job.file, find_entry(job.file, GATE), struct.pack("<I", count))
    job.expect("P532", GATE, "dimensions")


def test_a_row_that_is_no_whole_blocks(job: Job) -> None:
    entry = find_entry(job.file, GATE)
    patch(job.file, entry + 4, struct.pack("<Q", 63))
    patch(job.file, entry + 4 + 16, struct.pack("<I", 2))
    job.expect("P532", GATE, "Q4_0", "blocks of 32")


def test_a_tensor_twice(job: Job) -> None:
    other = GATE.replace("blk.1", "blk.0")
    patch(job.file, find_entry(job.file, GATE) - len(GATE), other.encode())
    job.expect("P536", other, "twice")


def test_a_missing_tensor(job: Job) -> None:
    del job.tensors[GATE]
    job.save()
    job.expect("P533", GATE, "tiny.gguf")


def test_no_embedding(job: Job) -> None:
    del job.tensors["token_embd.weight"]
    job.save()
    job.expect("P533", "token_embd.weight")


def test_a_wrong_shape(job: Job) -> None:
    job.tensors[GATE] = job.tensors[GATE][:-32]
    job.save()
    job.expect("P534", GATE, "[64, 64]", "[96, 64]", "its metadata says")


def test_a_weight_that_cannot_be_stored(job: Job) -> None:
    job.tensors[GATE] = np.full_like(job.tensors[GATE], np.nan)
    job.save()
    job.expect("P539", GATE, "tiny.gguf")


def test_a_family_that_is_unknown(job: Job) -> None:
    job.config["model_type"] = "mamba2"
    job.save()
    job.expect("P544", "mamba2", "llama", "qwen3")


def test_metadata_that_is_missing(job: Job) -> None:
    content = job.file.read_bytes()
    job.file.write_bytes(content.replace(b"llama.block_count", b"llama.block_kount"))
    job.expect("P532", "llama.block_count", "tiny.gguf")


def test_metadata_of_another_type(job: Job) -> None:
    job.changes = {"llama.attention.sliding_window": "wide"}
    job.save()
    job.expect("P532", "sliding_window", "'wide'")


def test_an_absurd_number_of_layers(job: Job) -> None:
    job.config["num_hidden_layers"] = 2**31
    job.save()
    job.expect("P544", "2147483648", "1024")


def test_layers_that_differ(job: Job) -> None:
    job.changes = {"llama.expert_count": [0, 8]}
    job.save()
    job.expect("P532", "llama.expert_count differs between layers")


def test_positions_scaled_in_an_unknown_way(job: Job) -> None:
    job.tensors["rope_freqs.weight"] = np.linspace(1, 3, 8, dtype=np.float32)
    job.save()
    job.expect("P544", "rope_freqs.weight")


def test_a_part_of_a_split_under_another_name(job: Job) -> None:
    job.changes = {"split.count": 3, "split.no": 1}
    job.save()
    job.expect("P532", "split.count is 3")


def test_metadata_that_is_a_list_where_a_number_belongs(job: Job) -> None:
    job.changes = {"split.count": [3, 4]}
    job.save()
    job.expect("P532", "split.count")


def test_a_folder_of_files_that_do_not_belong_together(job: Job) -> None:
    job.file.with_name("other.gguf").write_bytes(b"")
    with pytest.raises(UserError, match=r"P531.*2 GGUF files"):
        open_checkpoint(job.folder)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(place=st.integers(0, 1200), content=st.binary(min_size=1, max_size=8), cut=st.booleans())
def test_damaged_headers_are_read_or_refused(
    job: Job, place: int, content: bytes, cut: bool
) -> None:
    """Whatever the bytes, nothing but a `UserError` comes out."""
    whole = job.file.read_bytes()
    damaged = whole[:place] + content + (b"" if cut else whole[place + len(content) :])
    file = job.folder / "damaged.gguf"
    file.write_bytes(damaged)
    with contextlib.suppress(UserError):
        describe_checkpoint(file)


def test_a_file_may_have_any_name(job: Job) -> None:
    renamed = job.file.rename(job.folder / "model.bin")
    assert open_checkpoint(renamed).files == (renamed,)


@pytest.mark.parametrize(
    "key",
    [
        "llama.attention.key_length",
        "llama.attention.head_count_kv",
        "llama.attention.sliding_window",
        "llama.rope.dimension_count",
    ],
)
def test_a_size_of_nothing(job: Job, key: str) -> None:
    job.changes = {key: 0}
    job.save()
    if key == "llama.attention.sliding_window":
        job.convert()
        return
    with pytest.raises(UserError) as caught:
        job.convert()
    assert {item.code for item in caught.value.diagnostics} <= {"P532", "P544"}


@pytest.mark.parametrize("factor", [0.0, -1.0, np.nan, np.inf])
@pytest.mark.filterwarnings("error")
def test_divisors_of_frequencies_that_are_none(job: Job, factor: float) -> None:
    job.tensors["rope_freqs.weight"] = np.full(8, factor, np.float32)
    job.save()
    job.expect("P544", "rope_freqs.weight")


def test_a_token_of_a_whole_book(job: Job) -> None:
    tokens = ["<unk>", "a", "b" * 5000]
    job.changes = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
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


@pytest.mark.filterwarnings("error")
def test_a_weight_that_is_a_signalling_nan(job: Job) -> None:
    weights = job.tensors[GATE].copy()
    weights.view(np.uint32)[0, 0] = 0x7F800001
    job.tensors[GATE] = weights
    job.save()
    job.expect("P539", GATE)


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
    "value", [["many"] * 3, [], [4, 4], [4, 0, 4], [4.5] * 3, np.zeros((3, 3), np.int32)]
)
def test_numbers_of_layers_that_are_none_are_refused(value: Any) -> None:
    metadata = Metadata(Path("tiny.gguf"), {"general.architecture": "llama", "llama.ffn": value})
    with pytest.raises(UserError, match=r"P532.*ffn"):
        metadata.read_counts("{arch}.ffn", 3)


@pytest.mark.parametrize("value", [["yes"] * 3, [], [True], [0.5] * 3])
def test_flags_of_layers_that_are_none_are_refused(value: Any) -> None:
    metadata = Metadata(Path("tiny.gguf"), {"general.architecture": "llama", "llama.narrow": value})
    with pytest.raises(UserError, match=r"P532.*narrow"):
        metadata.read_flags("{arch}.narrow", 3)
