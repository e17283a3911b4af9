"""Tensors that checkpoints do not have as such."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

from pi2.arrays import F32
from pi2.importing.rows import fill_heads
from pi2.importing.safetensors_file import SourceTensor, list_safetensors

HEADS, OWN, SIZE = 3, 4, 6


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SourceTensor]:
    file = tmp_path_factory.mktemp("heads") / "model.safetensors"
    rng = np.random.default_rng(1)
    shapes = {"rows": (HEADS * OWN, 5), "bias": (HEADS * OWN,), "columns": (5, HEADS * OWN)}
    save_file({name: rng.random(shape, np.float32) for name, shape in shapes.items()}, file)
    return list_safetensors(file)


def fill(values: F32, axis: int) -> F32:
    """What heads along ``axis`` become."""
    shape = list(values.shape)
    parts = values.reshape((*shape[:axis], HEADS, OWN, *shape[axis + 1 :]))
    padding = [(0, 0)] * parts.ndim
    padding[axis + 1] = (0, SIZE - OWN)
    shape[axis] = HEADS * SIZE
    filled: F32 = np.pad(parts, padding).reshape(shape)
    return filled


@pytest.mark.parametrize(("name", "axis"), [("rows", 0), ("bias", 0), ("columns", 1)])
def test_heads_are_filled_up_piece_by_piece(
    stored: dict[str, SourceTensor], name: str, axis: int
) -> None:
    tensor = fill_heads(stored[name], HEADS, SIZE, by_columns=axis == 1)
    expected = fill(stored[name].read(), axis)
    assert tensor.shape == expected.shape
    np.testing.assert_array_equal(tensor.read(), expected)
    for start in range(len(expected)):
        for stop in range(start + 1, len(expected) + 1):
            np.testing.assert_array_equal(tensor.read(start, stop), expected[start:stop])
    if tensor.shape[1:]:
        turned = tensor.widen(tensor.read_turned())
        np.testing.assert_array_equal(turned, expected.T)
