"""Folders of MLC-LLM: the store is that of the checkpoint with the weights that they stand for."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pi2.arrays import F32
from pi2.diagnostics import UserError
from pi2.formats import find_packing
from pi2.importing.checkpoint import open_checkpoint
from pi2.importing.convert import convert_checkpoint
from pi2.importing.new_model import describe_checkpoint
from pi2.plan.documents.model import Model
from pi2.plan.weights.bundles import unpack_part
from pi2.store.reader import NeuronStore
from tests.helpers.checkpoints import write_checkpoint, write_safetensors
from tests.helpers.gguf_goldens import convert as convert_all
from tests.helpers.gguf_goldens import expect_same_weights
from tests.helpers.gguf_tensors import read_checkpoint
from tests.helpers.goldens import EXACT, copy_checkpoint
from tests.helpers.mlc_folders import (
    dequantize,
    fuse,
    make_arrays,
    make_chat_config,
    quantize,
    write_folder,
)
from tests.helpers.models import draw_weights, make_model

Config = dict[str, Any]
DOWN = "model.layers.0.mlp.down_proj.weight"
GATE = "model.layers.1.mlp.gate_up_proj.q_weight"


def convert(source: Path, store: Path, tokenizer: Path, precision: str) -> Model:
    """Convert ``source`` with the document that is made from it, all weights in ``precision``."""
    return convert_all(source, store, tokenizer, dict.fromkeys(EXACT, precision))


def make_tiny(tmp_path: Path) -> tuple[Path, Config, dict[str, F32]]:
    """A Hugging Face folder whose matrices can all be quantised, its configuration and weights."""
    model = make_model({"predictor": None, "ffn": {"activation": "silu"}, "tied_head": False})
    weights = draw_weights(model)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", model, weights)
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"max_position_embeddings": 64, "hidden_act": "silu", "bos_token_id": 256}
    config |= {"eos_token_id": [257]}
    (checkpoint / "config.json").write_text(json.dumps(config))
    return checkpoint, config, weights


def round_as_mlc(weights: dict[str, F32], config: Config, quantization: str) -> dict[str, F32]:
    rounded = {}
    for name, values in weights.items():
        quantized = quantization == "q4f16_1" and values.ndim > 1
        if quantized and "block_sparse_moe.gate" not in name:
            rounded[name] = dequantize(*quantize(values)).astype(np.float32)
        elif config["model_type"] == "gemma" and name.endswith("norm.weight"):
            rounded[name] = (values + np.float32(1)).astype(np.float16) - np.float32(1)
        else:
            rounded[name] = values.astype(np.float16).astype(np.float32)
    return rounded


@pytest.mark.parametrize("index", ["tensor-cache.json", "ndarray-cache.json"])
def test_four_bit_folders_are_read_bit_for_bit(tmp_path: Path, index: str) -> None:
    checkpoint, config, weights = make_tiny(tmp_path)
    folder = write_folder(tmp_path / "mlc", config, weights, index=index)
    assert len(list(folder.glob("params_shard_*.bin"))) > 5
    expected = round_as_mlc(weights, config, "q4f16_1")
    tensors = open_checkpoint(folder).tensors
    assert set(tensors) == set(weights)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor.read(), expected[name], err_msg=name)
        assert tensor.shape == expected[name].shape
    down = tensors[DOWN]
    np.testing.assert_array_equal(down.widen(down.read_turned()), expected[DOWN].T)
    write_safetensors(checkpoint / "model.safetensors", expected)
    tokenizer = checkpoint / "tokenizer.json"
    found = convert(folder, tmp_path / "a", tokenizer, "fp16")
    same = convert(checkpoint, tmp_path / "b", tokenizer, "fp16")
    assert found.tokenizer == same.tokenizer.model_copy(update={"add_bos": False})
    for key in ("shape", "norm", "rope", "attention", "ffn", "tied_head", "tensors"):
        assert getattr(found, key) == getattr(same, key), key
    expect_same_weights(tmp_path / "a", tmp_path / "b")


def test_codes_are_taken_over_into_int4(tmp_path: Path) -> None:
    """The store has MLC-LLM's nibbles and scales, but for down, whose groups lie the other way."""
    checkpoint, config, weights = make_tiny(tmp_path)
    folder = write_folder(tmp_path / "mlc", config, weights)
    model = convert(folder, tmp_path / "store", checkpoint / "tokenizer.json", "int4")
    with NeuronStore.open(tmp_path / "store", model=model) as store:
        for layer, stored in enumerate(store.layers):
            for place, part in enumerate(("gate", "up")):
                words, scales = quantize(weights[f"model.layers.{layer}.mlp.{part}_proj.weight"])
                codes = (words[..., None] >> (np.arange(8, dtype=np.uint32) * 4)) & 15
                expected = codes.reshape(96, 2, 32).astype(np.float32) - 7
                expected *= scales.astype(np.float32)[:, :, None]
                found = unpack_part(stored.bundles, store.bundle, place)
                np.testing.assert_array_equal(found, expected.reshape(96, 64))
            output = store.tensors[f"layers.{layer}.output"]
            words, scales = quantize(weights[f"model.layers.{layer}.self_attn.o_proj.weight"])
            np.testing.assert_array_equal(output.scales, scales)
            codes = find_packing("int4").unpack(output.weights.view(np.uint8), 64)
            np.testing.assert_array_equal(codes[:, 0] + 7, words[:, 0] & 15)


@pytest.mark.parametrize(
    ("name", "quantization"),
    [("gemma", "q0f16"), ("mixtral", "q4f16_1"), ("qwen2", "q0f16"), ("qwen3", "q4f16_1")],
)
def test_families(tmp_path: Path, name: str, quantization: str) -> None:
    checkpoint = copy_checkpoint(name, tmp_path / "checkpoint")
    config, weights = read_checkpoint(checkpoint)
    if quantization == "q4f16_1":
        # Rows must be whole groups of 32.
        weights, config = widen_ffn(weights, config)
        (checkpoint / "config.json").write_text(json.dumps(config))
    folder = write_folder(tmp_path / "mlc", config, weights, quantization)
    write_safetensors(checkpoint / "model.safetensors", round_as_mlc(weights, config, quantization))
    tokenizer = checkpoint / "tokenizer.json"
    found = convert(folder, tmp_path / "a", tokenizer, "fp16")
    same = convert(checkpoint, tmp_path / "b", tokenizer, "fp16")
    for key in ("shape", "norm", "rope", "attention", "ffn", "moe", "tied_head", "multipliers"):
        assert getattr(found, key) == getattr(same, key), key
    expect_same_weights(tmp_path / "a", tmp_path / "b")


def widen_ffn(weights: dict[str, F32], config: Config) -> tuple[dict[str, F32], Config]:
    size = -(-config["intermediate_size"] // 32) * 32
    more = size - config["intermediate_size"]
    wider = {}
    for name, values in weights.items():
        if name.endswith(("gate_proj.weight", "up_proj.weight", "w1.weight", "w3.weight")):
            wider[name] = np.pad(values, ((0, more), (0, 0)))
        elif name.endswith(("down_proj.weight", "w2.weight")):
            wider[name] = np.pad(values, ((0, 0), (0, more)))
        else:
            wider[name] = values
    return wider, config | {"intermediate_size": size}


def test_what_tvm_writes_is_read(tmp_path: Path) -> None:
    """float32 that is shortened to bfloat16, as TVM's own writer does it."""
    tvmjs = pytest.importorskip("tvm.contrib.tvmjs")
    _, config, weights = make_tiny(tmp_path)
    folder = tmp_path / "mlc"
    arrays = make_arrays(fuse(weights, config), "q0f32")
    tvmjs.dump_tensor_cache(arrays, str(folder), encode_format="f32-to-bf16", show_progress=False)
    (folder / "mlc-chat-config.json").write_text(json.dumps(make_chat_config(config, "q0f32")))
    for name, tensor in open_checkpoint(folder).tensors.items():
        np.testing.assert_allclose(tensor.read(), weights[name], rtol=2**-8)
    arrays = make_arrays(fuse(weights, config), "q4f16_1")
    shutil.rmtree(folder)
    tvmjs.dump_tensor_cache(arrays, str(folder), show_progress=False)
    (folder / "mlc-chat-config.json").write_text(json.dumps(make_chat_config(config, "q4f16_1")))
    expected = round_as_mlc(weights, config, "q4f16_1")
    for name, tensor in open_checkpoint(folder).tensors.items():
        np.testing.assert_array_equal(tensor.read(), expected[name])


# Broken folders


@pytest.fixture
def broken(tmp_path: Path) -> Callable[..., None]:
    """Converts a folder that ``spoil`` has changed, and expects one finding and no store."""
    checkpoint, config, weights = make_tiny(tmp_path)
    folder = write_folder(tmp_path / "mlc", config, weights)
    shutil.copy(checkpoint / "tokenizer.json", folder)
    model = describe_checkpoint(folder, "tiny").model

    def expect(spoil: Callable[[Path], object], code: str, *words: str) -> None:
        spoil(folder)
        with pytest.raises(UserError) as caught:
            convert_checkpoint(folder, model, tmp_path / "store")
        assert [item.code for item in caught.value.diagnostics] == [code], str(caught.value)
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert not {path.name for path in tmp_path.iterdir()} & {"store", ".store.partial"}

    return expect


def change_index(change: Callable[[list[Any]], object]) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        file = folder / "tensor-cache.json"
        index = json.loads(file.read_text())
        change(index["records"])
        file.write_text(json.dumps(index))

    return spoil


def find_record(shards: list[Any], name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return next((s, r) for s in shards for r in s["records"] if r["name"] == name)


def remove(name: str) -> Callable[[Path], object]:
    def change(shards: list[Any]) -> None:
        shard, record = find_record(shards, name)
        shard["records"].remove(record)

    return change_index(change)


def overlap(shards: list[Any]) -> None:
    shard = next(shard for shard in shards if len(shard["records"]) > 1)
    shard["records"][1]["byteOffset"] -= 2


def move(shards: list[Any]) -> None:
    shards[0]["records"][-1]["byteOffset"] += 4


def shrink(shards: list[Any]) -> None:
    find_record(shards, GATE)[1]["shape"][0] -= 1


def write(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def add(entry: object) -> Callable[[Path], object]:
    return change_index(lambda shards: shards[0]["records"].append(entry))


SHARD, INDEX, OTHER = "params_shard_1.bin", "tensor-cache.json", GATE.replace("1", "0")
SCALES, CHAT, NORM = GATE.replace("weight", "scale"), "mlc-chat-config.json", "model.norm.weight"
SPOILT: dict[str, tuple[Callable[[Path], object], str, tuple[str, ...]]] = {
    "a cut shard": (write(SHARD, lambda data: data[:100]), "P532", (SHARD, "cut", "tensor 'model")),
    "a changed shard": (write(SHARD, lambda data: b"\xff" + data[1:]), "P532", (SHARD, "MD5")),
    "a missing shard": (lambda folder: (folder / SHARD).unlink(), "P533", (SHARD, "tensor 'model")),
    "tensors that overlap": (change_index(overlap), "P532", ("overlap", "params_shard_")),
    "a tensor beyond the end": (change_index(move), "P532", ("params_shard_0.bin", "it is cut")),
    "a tensor twice": (
        change_index(lambda shards: find_record(shards, GATE)[1].update(name=OTHER)),
        *("P536", (OTHER,)),
    ),
    "a wrong shape": (
        change_index(lambda shards: find_record(shards, GATE)[1]["shape"].reverse()),
        *("P534", ("gate_up_proj.q_scale",)),
    ),
    "a wrong size": (change_index(shrink), "P532", (GATE, "bytes that its shape needs")),
    "a missing tensor": (remove(NORM), "P533", (NORM,)),
    "weights without scales": (remove(SCALES), "P533", ("q_scale", INDEX)),
    "a type that is no number": (
        change_index(lambda shards: find_record(shards, NORM)[1].update(dtype="e4m3_float8")),
        *("P535", (NORM, "e4m3_float8")),
    ),
    "another quantisation": (
        write(CHAT, lambda data: data.replace(b"q4f16_1", b"q3f16_1")),
        *("P535", ("q3f16_1", "q4f16_1", CHAT)),
    ),
    "no list of tensors": (lambda folder: (folder / INDEX).unlink(), "P531", (INDEX,)),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "P543", ("--tokenizer",)),
    "an entry that is a number": (add(5), "P532", ("is malformed",)),
    "an entry of nothing": (add({}), "P532", ("is malformed",)),
    "an entry without a shape": (add({"name": "x"}), "P532", ("is malformed",)),
    "a shape of a number": (add({"name": "x", "shape": 3, "dtype": "f"}), "P532", ("malformed",)),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_broken_folder_is_one_finding(broken: Callable[..., None], name: str) -> None:
    spoil, code, words = SPOILT[name]
    broken(spoil, code, *words)


@pytest.mark.parametrize("name", ["../secret.bin", "/etc/passwd", "", ".."])
def test_shards_outside_of_the_folder(broken: Callable[..., None], name: str) -> None:
    spoil = change_index(lambda shards: shards[0].update(dataPath=name))
    broken(spoil, "P538", "tensor-cache.json", name)
