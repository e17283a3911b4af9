"""Broken weight files: one diagnostic that names file and tensor, and no store left behind."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pi2.importing.safetensors_file import list_safetensors
from tests.helpers.checkpoints import write_safetensors
from tests.helpers.models import MIXTURE, draw_weights, make_model
from tests.helpers.spoilt_conversion import GATE, OUTER, Job, make_job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return make_job(tmp_path)


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
        b"", b"1234567", b"\xff" * 100, struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 4) + b"null", struct.pack("<Q", 9) + b"{notjson}",
        struct.pack("<Q", 100_000) + b"[" * 100_000,
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    ],
)  # fmt: skip
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
    write_index(job, {**shard(job), GATE: target})
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
    write_safetensors(job.checkpoint / other, {name: job.weights[name] for name in [*names, GATE]})
    job.expect("P536", GATE, "part-0", "part-1")
