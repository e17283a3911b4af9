"""Converting a checkpoint: the store holds its weights, quantised, in the chosen order."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from pi2.arrays import F32, I32
from pi2.backends.arithmetic import slice_tensor
from pi2.diagnostics import UserError
from pi2.formats import find_packing
from pi2.importing.checkpoint import open_checkpoint
from pi2.importing.convert import convert_checkpoint
from pi2.importing.predictors import announce_predictors
from pi2.importing.safetensors_file import list_safetensors
from pi2.plan.documents.model import Model
from pi2.store.reader import NeuronStore
from pi2.store.verification import verify_store
from tests.helpers.bundles import pack_bundles
from tests.helpers.checkpoints import (
    Dtype,
    narrow,
    write_checkpoint,
    write_counts,
    write_safetensors,
)
from tests.helpers.models import MIXTURE, draw_weights, gather_rows, make_model

Weights = dict[str, F32]


def prepare(folder: Path, changes: Mapping[str, Any] | None = None) -> tuple[Model, Weights, Path]:
    model = make_model(changes)
    weights = draw_weights(model)
    return model, weights, write_checkpoint(folder / "checkpoint", model, weights)


def expect_store(path: Path, model: Model, weights: Weights, original: I32 | None = None) -> None:
    """The store at ``path`` is what `model` and ``weights`` demand, neurons as ``original``."""
    names = model.tensors
    if original is None:
        original = np.tile(np.arange(model.shape.ffn, dtype=np.int32), (model.shape.layers, 1))
    with NeuronStore.open(path, model=model) as store:
        for number, layer in enumerate(store.layers):
            order = original[number]
            np.testing.assert_array_equal(layer.original, order)
            gate = weights[names.gate.format(layer=number)][order]
            up = weights[names.up.format(layer=number)][order]
            down = np.ascontiguousarray(weights[names.down.format(layer=number)].T[order])
            np.testing.assert_array_equal(layer.bundles, pack_bundles(gate, up, down, store.bundle))
        for name, tensor in store.tensors.items():
            rows = gather_rows(model, weights, original, name)
            if tensor.precision is None:
                np.testing.assert_array_equal(tensor.weights, rows)
                continue
            packed, scales = find_packing(tensor.precision).quantize(rows)
            np.testing.assert_array_equal(tensor.weights, packed)
            if scales is not None:
                assert tensor.scales is not None
                np.testing.assert_array_equal(tensor.scales, scales)
    assert verify_store(path) == []


def split_predictors(model: Model, weights: Weights) -> tuple[Weights, Weights]:
    inside = {name: values for name, values in weights.items() if "predictor" not in name}
    return inside, {name: values for name, values in weights.items() if "predictor" in name}


CASES: dict[str, dict[str, Any]] = {
    "all defaults": {},
    "no predictors": {"predictor": None},
    "a head of its own": {"tied_head": False},
    "biases of q, k and v": {"attention": {"qkv_bias": True}},
    "int8 neurons": {"quantization": {"ffn": "int8", "attention": "fp16"}},
    "fp16 throughout": {
        "quantization": dict.fromkeys(
            ("ffn", "attention", "embedding", "head", "predictor"), "fp16"
        ),
        "tied_head": False,
    },
    "odd sizes": {"shape": {"hidden": 96, "ffn": 33, "heads": 3, "kv_heads": 1, "head_dim": 32}},
    "heads wider than hidden": {"shape": {"head_dim": 32}},
    "more weights than are quantised at a time": {
        "shape": {"layers": 1, "hidden": 512, "ffn": 2100, "vocab": 2500},
        "predictor": None,
    },
    "other names": {
        "tensors": {"gate": "h.{layer}.w1", "embedding": "wte", "predictor_out": "p{layer}.out"}
    },
}


@pytest.mark.parametrize("case", CASES)
def test_the_store_holds_the_quantised_checkpoint(tmp_path: Path, case: str) -> None:
    model, weights, checkpoint = prepare(tmp_path, CASES[case])
    manifest = convert_checkpoint(checkpoint, model, tmp_path / "store")
    assert manifest.order == "index" and not manifest.synthetic
    expect_store(tmp_path / "store", model, weights)


@pytest.mark.parametrize(("dtype", "shards"), [("float32", 3), ("float16", 1), ("bfloat16", 3)])
def test_types_and_shards(tmp_path: Path, dtype: Dtype, shards: int) -> None:
    model = make_model()
    weights = draw_weights(model)
    # The model names no such tensor.
    extra = {**weights, "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    checkpoint = write_checkpoint(tmp_path / "checkpoint", model, extra, dtype=dtype, shards=shards)
    convert_checkpoint(checkpoint, model, tmp_path / "store")
    narrowed = {name: narrow(values, dtype) for name, values in weights.items()}
    expect_store(tmp_path / "store", model, narrowed)


# Order
def test_activation_counts_put_the_most_active_neuron_first(tmp_path: Path) -> None:
    model, weights, checkpoint = prepare(tmp_path)
    shape = (model.shape.layers, model.shape.ffn)
    counts = np.random.default_rng(5).permutation(np.prod(shape)).reshape(shape).astype(np.int64)
    file = write_counts(tmp_path / "counts.parquet", counts)
    manifest = convert_checkpoint(checkpoint, model, tmp_path / "store", activations=file)
    assert manifest.order == "hotness"
    with NeuronStore.open(tmp_path / "store") as store:
        original = np.stack([layer.original for layer in store.layers])
    for layer, order in enumerate(original):
        assert (np.diff(counts[layer][order]) < 0).all()
    expect_store(tmp_path / "store", model, weights, original)
    assert (tmp_path / "store/activations.parquet").read_bytes() == file.read_bytes()
    counts[:], counts[:, 50] = 0, 7  # equally active ones stay in the checkpoint's order
    write_counts(file, counts)
    convert_checkpoint(checkpoint, model, tmp_path / "equal", activations=file)
    with NeuronStore.open(tmp_path / "equal") as store:
        assert store.layers[1].original.tolist() == [50, *range(50), *range(51, 96)]


# Predictors
def test_predictors_may_come_in_a_file_of_their_own(tmp_path: Path) -> None:
    model = make_model()
    weights = draw_weights(model)
    inside, outside = split_predictors(model, weights)
    checkpoint, file = tmp_path / "checkpoint", tmp_path / "predictors.safetensors"
    write_checkpoint(checkpoint, model, inside)
    write_safetensors(file, outside)
    convert_checkpoint(checkpoint, model, tmp_path / "store", predictors=file)
    expect_store(tmp_path / "store", model, weights)
    biasless = {name: values for name, values in outside.items() if not name.endswith("bias")}
    write_safetensors(file, biasless)
    convert_checkpoint(checkpoint, model, tmp_path / "biasless", predictors=file)
    with NeuronStore.open(tmp_path / "biasless") as store:
        assert not store.tensors["layers.1.predictor_bias"].weights.any()


def test_predictors_may_come_in_a_folder_of_powerinfer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model({"quantization": {"predictor": "fp16"}})
    weights = draw_weights(model)
    inside, outside = split_predictors(model, weights)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", model, inside)
    folder = tmp_path / "predictors"
    folder.mkdir()
    for layer in range(3):
        prefix = f"model.layers.{layer}."
        norm = weights[f"{prefix}post_attention_layernorm.weight"]
        # PowerInfer's read what the norm reads, have no bias, and need not have one rank.
        parts = {
            "fc1.weight": outside[f"{prefix}mlp.predictor.fc1.weight"] * norm,
            "fc2.weight": outside[f"{prefix}mlp.predictor.fc2.weight"],
        }
        weights[f"{prefix}mlp.predictor.bias"][:] = 0
        write_safetensors(folder / f"model_{layer}.pt", parts)
    # Files of torch are tested elsewhere, where it is installed.
    monkeypatch.setattr("pi2.importing.predictors.list_torch_file", list_safetensors)
    source = open_checkpoint(checkpoint)
    bare = model.model_copy(update={"predictor": None})
    assert announce_predictors(bare, source, folder).predictor == model.predictor
    convert_checkpoint(checkpoint, model, tmp_path / "store", predictors=folder)
    with NeuronStore.open(tmp_path / "store") as store:
        tensor = store.tensors["layers.1.predictor_in"]
        found = find_packing("fp16").dequantize(tensor.weights.view(np.uint8), tensor.scales, 64)
    expected = outside["model.layers.1.mlp.predictor.fc1.weight"]
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-5)
    (folder / "model_1.pt").unlink()
    with pytest.raises(UserError, match=r"P533.*layers\.1\.mlp\.predictor"):
        convert_checkpoint(checkpoint, model, tmp_path / "other", predictors=folder)
    for file in folder.iterdir():
        file.unlink()
    with pytest.raises(UserError, match=r"P533.*model_0\.pt"):
        convert_checkpoint(checkpoint, model, tmp_path / "other", predictors=folder)


def test_predictors_of_experts_lie_one_after_the_other_in_stored_order(tmp_path: Path) -> None:
    model, weights, checkpoint = prepare(
        tmp_path, {**MIXTURE, "quantization": {"predictor": "fp16"}}
    )
    shape = (model.shape.layers, model.layer_neurons)
    counts = np.random.default_rng(5).permutation(np.prod(shape)).reshape(shape).astype(np.int64)
    file = write_counts(tmp_path / "counts.parquet", counts)
    convert_checkpoint(checkpoint, model, tmp_path / "store", activations=file)
    assert verify_store(tmp_path / "store") == []
    names, ffn = model.tensors, model.shape.ffn
    with NeuronStore.open(tmp_path / "store", model=model) as store:
        original = store.layers[2].original
        for expert in range(4):
            inner, outer, bias = (
                slice_tensor(store.tensors[f"layers.2.predictor_{part}"], expert, 4)
                for part in ("in", "out", "bias")
            )
            mine = original[original // ffn == expert] - expert * ffn

            def find(pattern: str, expert: int = expert) -> F32:
                return weights[pattern.format(layer=2, expert=expert)]

            for tensor, rows in (
                (inner, find(names.predictor_in)),
                (outer, find(names.predictor_out)[mine]),
            ):
                np.testing.assert_array_equal(tensor.weights.view("<f2"), rows.astype("<f2"))
            np.testing.assert_array_equal(bias.weights[0], find(names.predictor_bias)[mine])


def test_a_rank_that_cannot_be_packed_is_filled_with_zeros(tmp_path: Path) -> None:
    model = make_model({"predictor": {"rank": 64}})
    weights = draw_weights(model)
    for layer, rank in enumerate((40, 64, 7)):
        inner = f"model.layers.{layer}.mlp.predictor.fc1.weight"
        outer = f"model.layers.{layer}.mlp.predictor.fc2.weight"
        weights[inner] = np.ascontiguousarray(weights[inner][:rank])
        weights[outer] = np.ascontiguousarray(weights[outer][:, :rank])
    checkpoint = write_checkpoint(tmp_path / "checkpoint", model, weights)
    manifest = convert_checkpoint(checkpoint, model, tmp_path / "store")
    assert manifest.predictor is not None and manifest.predictor.rank == (64, 64, 32)
    padded = dict(weights)
    for layer, rank in enumerate((64, 64, 32)):
        inner = f"model.layers.{layer}.mlp.predictor.fc1.weight"
        outer = f"model.layers.{layer}.mlp.predictor.fc2.weight"
        padded[inner] = np.zeros((rank, 64), np.float32)
        padded[inner][: len(weights[inner])] = weights[inner]
        padded[outer] = np.zeros((96, rank), np.float32)
        padded[outer][:, : weights[outer].shape[1]] = weights[outer]
    expect_store(tmp_path / "store", model, padded)


# The whole
def test_other_files_come_along_and_progress_grows_to_one(tmp_path: Path) -> None:
    model, _, checkpoint = prepare(tmp_path)
    card = tmp_path / "card.json"
    card.write_text("{}")
    shares: list[float] = []

    def note(label: str, share: float) -> None:
        shares.append(share)

    extras = {"training.json": card}
    convert_checkpoint(checkpoint, model, tmp_path / "store", extras=extras, progress=note)
    assert shares == sorted(shares) and (shares[0], shares[-1]) == (0.0, 1.0)
    with NeuronStore.open(tmp_path / "store", model=model) as store:
        assert store.tokenizer_path.read_bytes() == (checkpoint / "tokenizer.json").read_bytes()
        assert store.manifest.find_file("training.json") is not None


def interrupt_conversion(checkpoint: Path, model: Model, store: Path) -> None:
    """Convert until three tensors of two layers are read."""
    progress = Mock(side_effect=[*[None] * 7, KeyboardInterrupt])
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(checkpoint, model, store, progress=progress)


def test_an_interrupted_conversion_goes_on_where_it_was(tmp_path: Path) -> None:
    model, weights, checkpoint = prepare(tmp_path)
    interrupt_conversion(checkpoint, model, tmp_path / "store")
    number = (tmp_path / ".store.partial/layers/ffn-001.arrow").stat().st_ino
    convert_checkpoint(checkpoint, model, tmp_path / "store")
    assert (tmp_path / "store/layers/ffn-001.arrow").stat().st_ino == number
    expect_store(tmp_path / "store", model, weights)


def test_an_interrupted_conversion_of_another_checkpoint_is_not_continued(tmp_path: Path) -> None:
    model = make_model()
    first = write_checkpoint(tmp_path / "first", model, draw_weights(model, seed=1))
    other = draw_weights(model, seed=2)
    second = write_checkpoint(tmp_path / "second", model, other)
    interrupt_conversion(first, model, tmp_path / "store")
    convert_checkpoint(second, model, tmp_path / "store")
    expect_store(tmp_path / "store", model, other)
