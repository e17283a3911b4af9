"""Models of any width: zeros fill up the last group of 32 in a store, and nothing else changes."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pi2.formats import find_packing
from pi2.importing.convert import convert_checkpoint, pad_columns
from pi2.model.tensors import list_tensors
from pi2.plan.weights.layout import Precision, fill_groups
from pi2.store.reader import NeuronStore
from pi2.store.verification import verify_store
from tests.helpers.bundles import unpack_bundles
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.models import draw_weights, gather_rows, make_model

STEPS = {"int4": 7, "int8": 127, "fp16": 1024}
"""Steps from zero to the largest weight of a group."""


@settings(max_examples=40, deadline=None)
@given(
    width=st.integers(1, 130),
    precision=st.sampled_from(["int4", "int8", "fp16"]),
    seed=st.integers(0, 2**16),
)
def test_filled_groups_give_back_the_weights_and_zeros(
    width: int, precision: Precision, seed: int
) -> None:
    rows = np.random.default_rng(seed).standard_normal((3, width), dtype=np.float32)
    length = fill_groups(width)
    assert 0 <= length - width < 32 == 32 + length % 32
    packed, scales = find_packing(precision).quantize(pad_columns(rows, length))
    restored = find_packing(precision).dequantize(packed, scales, length)
    assert not restored[:, width:].any()
    step = np.abs(rows).max() / STEPS[precision]
    assert np.abs(restored[:, :width] - rows).max() <= 0.51 * step + 1e-6


def test_a_width_that_fills_its_groups_is_left_as_it_is() -> None:
    rows = np.ones((2, 96), np.float32)
    assert fill_groups(96) == 96
    assert pad_columns(rows, 96) is rows


WIDTHS = {
    "hidden": {"hidden": 48, "heads": 2, "kv_heads": 1, "head_dim": 32},
    "heads": {"hidden": 64, "heads": 3, "kv_heads": 1, "head_dim": 24},
    "both": {"hidden": 42, "heads": 7, "kv_heads": 7, "head_dim": 6, "ffn": 33},
}


@pytest.mark.parametrize("precision", ["int4", "int8", "fp16"])
@pytest.mark.parametrize("case", WIDTHS)
def test_store_holds_checkpoint_and_zeros(tmp_path: Path, case: str, precision: Precision) -> None:
    quantization = dict.fromkeys(("ffn", "attention", "embedding", "head", "predictor"), precision)
    model = make_model({"shape": WIDTHS[case], "quantization": quantization, "tied_head": False})
    shape, names, weights = model.shape, model.tensors, draw_weights(model)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", model, weights)
    convert_checkpoint(checkpoint, model, tmp_path / "store")
    original = np.tile(np.arange(shape.ffn, dtype=np.int32), (shape.layers, 1))
    hidden = fill_groups(shape.hidden)
    listed = {tensor.name: tensor for tensor in list_tensors(model, [32] * shape.layers)}
    with NeuronStore.open(tmp_path / "store", model=model) as store:
        assert set(store.tensors) == set(listed)
        for name, tensor in store.tensors.items():
            rows = np.atleast_2d(gather_rows(model, weights, original, name))
            size = (listed[name].rows, listed[name].length)
            expected = np.zeros(size, np.float32)
            expected[: rows.shape[0], : rows.shape[1]] = rows
            if tensor.precision is None:
                np.testing.assert_array_equal(tensor.weights.reshape(size), expected)
                continue
            packed, scales = find_packing(tensor.precision).quantize(expected)
            np.testing.assert_array_equal(tensor.weights, packed)
            if scales is not None:
                np.testing.assert_array_equal(tensor.scales, scales)
        for number, layer in enumerate(store.layers):
            gate, up, down = (
                weights[pattern.format(layer=number)]
                for pattern in (names.gate, names.up, names.down)
            )
            stored = unpack_bundles(layer.bundles, store.bundle)
            for rows, found in zip((gate, up, np.ascontiguousarray(down.T)), stored, strict=True):
                packed, scales = find_packing(precision).quantize(pad_columns(rows, hidden))
                np.testing.assert_array_equal(
                    found, find_packing(precision).dequantize(packed, scales, hidden)
                )
                assert not found[:, shape.hidden :].any()
    assert verify_store(tmp_path / "store") == []
