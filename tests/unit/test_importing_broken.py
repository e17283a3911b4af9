"""Broken checkpoints: one diagnostic that names file and tensor, and no store left behind."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pi2.diagnostics import UserError
from pi2.importing.convert import convert_checkpoint
from pi2.importing.safetensors_file import list_safetensors
from pi2.plan.model import Model
from tests.helpers.checkpoints import write_checkpoint, write_counts, write_safetensors
from tests.helpers.models import MIXTURE, draw_weights, make_model, make_tokenizer

GATE = "model.layers.1.mlp.gate_proj.weight"
OUTER = "model.layers.1.mlp.predictor.fc2.weight"
Weights = dict[str, npt.NDArray[np.float32]]


@dataclass
class Job:
    """A conversion that a test spoils before it runs."""

    folder: Path
    model: Model
    weights: Weights
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def file(self) -> Path:
        return self.checkpoint / "model.safetensors"

    def save(self) -> None:
        write_safetensors(self.file, self.weights)

    def convert(self) -> None:
        convert_checkpoint(self.checkpoint, self.model, self.folder / "store", **self.options)

    def expect(self, code: str, *words: str, count: int = 1) -> None:
        """The conversion fails with ``code``, says ``words``, and leaves nothing behind."""
        with pytest.raises(UserError) as caught:
            self.convert()
        codes = [item.code for item in caught.value.diagnostics]
        assert codes == [code] * count, str(caught.value)
        text = str(caught.value)
        assert all(word in text for word in words), text
        assert caught.value.exit_code == 2
        left = {path.name for path in self.folder.iterdir()}
        assert not left & {"store", ".store.partial", ".store.old"}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    model = make_model()
    weights = draw_weights(model)
    write_checkpoint(tmp_path / "checkpoint", model, weights)
    return Job(tmp_path, model, weights)


def test_the_unspoilt_checkpoint_converts(job: Job) -> None:
    job.convert()
    assert (job.folder / "store/manifest.json").is_file()


# Tensors


def test_missing_tensor(job: Job) -> None:
    del job.weights[GATE]
    job.save()
    job.expect("P533", GATE, str(job.checkpoint), "tensors.gate")


def test_a_missing_tensor_names_the_file_or_the_folder_of_shards(job: Job) -> None:
    del job.weights[GATE]
    job.save()
    job.expect("P533", GATE, f"{job.file} has no tensor")
    shard(job)
    job.expect("P533", GATE, f"{job.checkpoint} has no tensor")


def test_wrong_shape(job: Job) -> None:
    job.weights[GATE] = job.weights[GATE][:-1]
    job.save()
    job.expect("P534", GATE, "model.safetensors", "[95, 64]", "[96, 64]")


def test_transposed_tensor(job: Job) -> None:
    job.weights[GATE] = np.ascontiguousarray(job.weights[GATE].T)
    job.save()
    job.expect("P534", GATE, "[64, 96]", "[96, 64]")


def test_what_is_wrong_with_many_tensors_is_said_once(job: Job) -> None:
    job.weights = {f"wrong.{name}": values for name, values in job.weights.items()}
    job.save()
    job.expect("P533", "model.embed_tokens.weight", "; 28 other tensors are like it")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e38])
@pytest.mark.parametrize(
    "name",
    [
        GATE,
        "model.layers.1.mlp.down_proj.weight",
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.k_proj.weight",
        OUTER,
    ],
)
def test_a_weight_that_cannot_be_stored(job: Job, name: str, value: float) -> None:
    job.weights[name][3, 5] = value
    job.save()
    job.expect("P539", name, "model.safetensors")


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.2.mlp.predictor.bias"])
def test_a_vector_with_nan(job: Job, name: str) -> None:
    job.weights[name][5] = np.nan
    job.save()
    job.expect("P539", name, "not a finite number")


def test_wrong_type(job: Job) -> None:
    retype(job.file, GATE, "F8_E4M3")
    job.expect("P535", GATE, "F8_E4M3", "model.safetensors", "BF16")


def test_tensors_that_overlap(job: Job) -> None:
    up = list_safetensors(job.file)[GATE.replace("gate", "up")]
    start = min(tensor.offset for tensor in list_safetensors(job.file).values())
    span = [up.offset - start, up.offset - start + up.size_bytes]
    patch_header(job.file, lambda header: header[GATE].update(data_offsets=span))
    job.expect("P532", "overlap", "mlp.up_proj", GATE)


def test_integer_type(job: Job) -> None:
    retype(job.file, GATE, "I32")
    job.expect("P535", GATE, "I32")


def test_an_expert_without_a_predictor(job: Job) -> None:
    job.model = make_model(MIXTURE)
    job.weights = draw_weights(job.model)
    name = "model.layers.1.block_sparse_moe.experts.2.predictor.fc2.weight"
    del job.weights[name]
    job.save()
    job.expect("P533", name, "--predictors")


# Files


def test_missing_folder(job: Job) -> None:
    job.folder.joinpath("checkpoint").rename(job.folder / "elsewhere")
    job.expect("P530", str(job.checkpoint))


def test_missing_config(job: Job) -> None:
    (job.checkpoint / "config.json").unlink()
    job.expect("P530", "config.json", "Hugging Face folder")


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\x00", b"[" * 100_000])
def test_garbled_config(job: Job, content: bytes) -> None:
    (job.checkpoint / "config.json").write_bytes(content)
    job.expect("P532", "config.json")


def test_no_weights(job: Job) -> None:
    job.file.unlink()
    job.expect("P531", "no safetensors files")


def test_several_files_without_index(job: Job) -> None:
    job.file.rename(job.checkpoint / "a.safetensors")
    (job.checkpoint / "b.safetensors").write_bytes(b"")
    job.expect("P531", "2 weight files", "model.safetensors.index.json")


def test_a_cut_file_names_the_first_tensor_that_is_gone(job: Job) -> None:
    last = max(list_safetensors(job.file).values(), key=lambda tensor: tensor.offset)
    with job.file.open("r+b") as stream:
        stream.truncate(job.file.stat().st_size - 4)
    job.expect("P532", "model.safetensors", "cut", last.name)


def test_a_file_that_is_cut_while_it_is_read(job: Job) -> None:
    def cut(label: str, share: float) -> None:
        if share > 0:
            with job.file.open("r+b") as stream:
                stream.truncate(9000)

    job.options["progress"] = cut
    job.expect("P532", "model.safetensors", "ends inside tensor")


def patch_header(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = file.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])


def retype(file: Path, name: str, dtype: str) -> None:
    patch_header(file, lambda header: header[name].update(dtype=dtype))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        b"\xff" * 100,
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 4) + b"null",
        struct.pack("<Q", 9) + b"{notjson}",
        struct.pack("<Q", 100_000) + b"[" * 100_000,
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    ],
)
def test_garbage_instead_of_weights(job: Job, content: bytes) -> None:
    job.file.write_bytes(content)
    job.expect("P532", "model.safetensors")


@pytest.mark.parametrize(
    "entry",
    [
        5,
        {},
        {"dtype": "F32", "shape": [96, 64]},
        {"dtype": "F32", "shape": [96, 64], "data_offsets": [0]},
        {"dtype": "F32", "shape": [96, 64], "data_offsets": [0, "9"]},
        {"dtype": "F32", "shape": [96, 64.0], "data_offsets": [0, 24576]},
        {"dtype": "F32", "shape": "96", "data_offsets": [0, 24576]},
        {"dtype": "F32", "shape": [96, 64], "data_offsets": [24576, 0]},
        {"dtype": "F32", "shape": [96, 64], "data_offsets": [-24576, 0]},
        {"dtype": "F32", "shape": [-96, -64], "data_offsets": [0, 24576]},
        {"dtype": "F32", "shape": [96, 64], "data_offsets": [0, 24572]},
        {"dtype": None, "shape": [96, 64], "data_offsets": [0, 24576]},
    ],
)
def test_a_malformed_entry_is_named(job: Job, entry: object) -> None:
    patch_header(job.file, lambda header: header.update({GATE: entry}))
    job.expect("P532", "model.safetensors", GATE)


def test_a_tensor_that_a_header_lists_twice(job: Job) -> None:
    text = json.dumps({GATE: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}})
    twice = (text[:-1] + "," + text[1:]).encode()
    job.file.write_bytes(struct.pack("<Q", len(twice)) + twice)
    job.expect("P536", GATE, "twice")


# Shards


def shard(job: Job) -> dict[str, str]:
    """Cut the weights into two files; return the index's weight map."""
    names = sorted(job.weights)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2])):
        name = f"part-{number}.safetensors"
        write_safetensors(job.checkpoint / name, {key: job.weights[key] for key in part})
        weight_map |= dict.fromkeys(part, name)
    job.file.unlink()
    write_index(job, weight_map)
    return weight_map


def write_index(job: Job, weight_map: object) -> None:
    file = job.checkpoint / "model.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": weight_map}))


def test_a_shard_is_missing(job: Job) -> None:
    shard(job)
    (job.checkpoint / "part-1.safetensors").unlink()
    job.expect("P532", "part-1.safetensors", "No such file")


@pytest.mark.parametrize(
    "target",
    ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\0b", "\ud800", 5],
)
def test_an_index_cannot_name_files_elsewhere(job: Job, target: object) -> None:
    weight_map = shard(job)
    write_index(job, {**weight_map, GATE: target})
    job.expect("P538", GATE, repr(target))


def test_an_index_that_names_the_wrong_file(job: Job) -> None:
    weight_map = shard(job)
    other = "part-0.safetensors" if weight_map[GATE][5] == "1" else "part-1.safetensors"
    write_index(job, {**weight_map, GATE: other})
    job.expect("P533", GATE, other, "index.json")


@pytest.mark.parametrize("weight_map", [None, {}, [], "text"])
def test_an_index_without_files(job: Job, weight_map: object) -> None:
    shard(job)
    write_index(job, weight_map)
    job.expect("P532", "weight_map")


def test_a_tensor_in_two_shards(job: Job) -> None:
    weight_map = shard(job)
    other = "part-0.safetensors" if weight_map[GATE][5] == "1" else "part-1.safetensors"
    names = [name for name, file in weight_map.items() if file == other]
    tensors = {name: job.weights[name] for name in [*names, GATE]}
    write_safetensors(job.checkpoint / other, tensors)
    job.expect("P536", GATE, "part-0", "part-1")


# Configuration


@pytest.mark.parametrize(
    ("key", "value", "path"),
    [
        ("num_hidden_layers", 4, "shape.layers"),
        ("num_attention_heads", 8, "shape.heads"),
        ("num_key_value_heads", 4, "shape.kv_heads"),
        ("intermediate_size", 97, "shape.ffn"),
        ("rms_norm_eps", 1e-6, "norm.epsilon"),
        ("rope_theta", 500000.0, "rope.theta"),
        ("tie_word_embeddings", False, "tied_head"),
        ("rope_parameters", {"rope_theta": 500000.0}, "rope.theta"),
    ],
)
def test_a_config_that_contradicts_the_model(job: Job, key: str, value: object, path: str) -> None:
    file = job.checkpoint / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    job.expect("P537", "config.json", path)


@pytest.mark.parametrize("value", [None, "absent"])
def test_what_the_config_does_not_state_is_not_compared(job: Job, value: object) -> None:
    config = json.loads((job.checkpoint / "config.json").read_text())
    config["num_key_value_heads"] = value
    if value == "absent":
        del config["num_key_value_heads"]
    (job.checkpoint / "config.json").write_text(json.dumps(config))
    job.convert()


# Predictors


def test_predictors_are_missing(job: Job) -> None:
    job.weights = {name: rows for name, rows in job.weights.items() if "predictor" not in name}
    job.save()
    job.expect("P533", "no predictors", "--predictors")


def test_the_predictor_of_one_layer_is_missing(job: Job) -> None:
    del job.weights[OUTER]
    job.save()
    job.expect("P533", OUTER)


def test_a_predictor_for_other_neurons(job: Job) -> None:
    job.weights[OUTER] = job.weights[OUTER][:-1]
    job.save()
    job.expect("P534", OUTER, "[95, 32]", "[96, 32]")


def test_predictors_of_another_rank(job: Job) -> None:
    job.model = make_model({"predictor": {"rank": 64}})
    job.expect("P534", "rank 32", "says 64", "predictor.rank = 32")


def test_predictors_that_the_model_does_not_announce(job: Job) -> None:
    job.model = make_model({"predictor": None})
    job.options["predictors"] = job.file
    job.expect("P542", "[predictor]")


def test_a_predictor_file_that_does_not_exist(job: Job) -> None:
    job.options["predictors"] = job.folder / "none.safetensors"
    job.expect("P532", "none.safetensors")


# Activation counts


def count_file(job: Job, **columns: Any) -> Path:
    shape = (3, 96)
    table = {
        "layer": np.repeat(np.arange(3), 96),
        "neuron": np.tile(np.arange(96), 3),
        "count": np.zeros(shape, np.int64).reshape(-1),
        **columns,
    }
    file = job.folder / "counts.parquet"
    pq.write_table(
        pa.table({name: values for name, values in table.items() if values is not None}), file
    )
    return file


@pytest.mark.parametrize(
    ("columns", "word"),
    [
        ({"neuron": None}, "neuron"),
        ({"layer": np.zeros(288, np.int64)}, "listed twice"),
        ({"layer": np.repeat(np.arange(1, 4), 96)}, "outside of 3 x 96"),
        ({"neuron": np.tile(np.arange(-1, 95), 3)}, "outside of 3 x 96"),
        ({"count": np.full(288, -1)}, "negative"),
        ({"count": np.full(288, "many")}, ""),
        ({"count": pa.array([None] * 288, pa.int64())}, "missing"),
        ({"count": np.full(288, 0.5)}, ""),
    ],
)
def test_counts_that_are_not_of_this_model(job: Job, columns: dict[str, Any], word: str) -> None:
    job.options["activations"] = count_file(job, **columns)
    job.expect("P540", "counts.parquet", word)


def test_counts_of_another_size(job: Job) -> None:
    counts = np.zeros((3, 97), np.int64)
    job.options["activations"] = write_counts(job.folder / "counts.parquet", counts)
    job.expect("P540", "291 rows", "3 layers x 96 neurons")


@pytest.mark.parametrize("content", [None, b"", b"PAR1 garbage PAR1"])
def test_counts_that_cannot_be_read(job: Job, content: bytes | None) -> None:
    file = job.folder / "counts.parquet"
    if content is not None:
        file.write_bytes(content)
    job.options["activations"] = file
    job.expect("P540", "counts.parquet")


# Tokenizer


def test_missing_tokenizer(job: Job) -> None:
    (job.checkpoint / "tokenizer.json").unlink()
    job.expect("P543", "tokenizer.json")


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff"])
def test_garbled_tokenizer(job: Job, content: bytes) -> None:
    (job.checkpoint / "tokenizer.json").write_bytes(content)
    job.expect("P543", "tokenizer.json")


def test_a_tokenizer_of_a_larger_vocabulary(job: Job) -> None:
    (job.checkpoint / "tokenizer.json").write_bytes(make_tokenizer(300))
    job.expect("P543", "300 tokens", "288")


@pytest.mark.parametrize("name", ["../tokenizer.json", "/etc/passwd", "a/b.json"])
def test_a_tokenizer_elsewhere(job: Job, name: str) -> None:
    job.model = make_model({"tokenizer": {"file": name}})
    job.expect("P543", name)


# Output


def test_an_output_that_exists(job: Job) -> None:
    (job.folder / "store").mkdir()
    (job.folder / "store/file").write_text("x")
    with pytest.raises(UserError, match="P521"):
        job.convert()
    assert (job.folder / "store/file").read_text() == "x"
