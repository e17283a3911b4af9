"""Weights of the store rearranged for a GPU: neighbouring threads read neighbouring words.

The store's groups of 32 weights keep their words (`pi2.backends.gpu.kernels.code`), in two orders:

- *tiles*, for rows that are multiplied with inputs: 32 rows are a tile.  In it comes one vector of
  16 bytes of each row, then the next of each row, and so on; if neurons have gates, all of the
  gates of a tile come before its up rows.  Scales likewise: one of each row, then the next.
- *rows*, for vectors that are added up or gathered: a vector's groups one after the other, and its
  scales.

A piece of a multiple of 32 rows is contiguous in both.  Rows that fill up the last tile are zero.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pi2.arrays import U8, U32, Scales
from pi2.backends.gpu.arrays import TILE
from pi2.formats import find_packing
from pi2.plan.weights.bundles import slice_bias, slice_experts, slice_part
from pi2.plan.weights.layout import BundleLayout, Precision, round_up


class WholeTiles:
    """Passes neurons of layers on in whole tiles: others wait for the next ones."""

    def __init__(self) -> None:
        self._layer, self._first, self._rest = -1, 0, np.empty((0, 0), np.uint8)

    def take(self, layer: int, first: int, bundles: U8, count: int) -> tuple[int, U8]:
        """Return the first of the neurons that fill tiles now, and their bundles; the last ones of
        a layer of ``count`` need not."""
        if self._layer == layer and len(self._rest):
            assert first == self._first + len(self._rest), "neurons come in stored order"
            first, bundles = self._first, np.concatenate([self._rest, bundles])
        is_last = first + len(bundles) == count
        size = len(bundles) if is_last else len(bundles) // TILE * TILE
        self._layer, self._first, self._rest = layer, first + size, bundles[size:].copy()
        return first, bundles[:size]


_Element = TypeVar("_Element", bound=np.generic)

_VECTOR = 4
"""Words of a vector of 16 bytes."""


PackedArrays = dict[str, npt.NDArray[Any]]
"""Flat arrays by the names of kernels' parameters.  Of neurons: weights and scales of gates and
ups, and of downs, which are in rows; biases [n, parts] and experts [n] if the layout has them."""


def _pack_tiles(parts: Sequence[npt.NDArray[_Element]], vector: int = 1) -> npt.NDArray[_Element]:
    """Arrange elements [n, .] of each part in tiles, of which the last is filled up: flat; so many
    elements of a row stay together."""
    filled = [fill_tile(part.reshape(len(part), -1)) for part in parts]
    joined = np.stack([part.reshape(-1, TILE, part.shape[1]) for part in filled], 1)
    tiles, count, rows, elements = joined.shape
    vectors = joined.reshape(tiles, count, rows, elements // vector, vector)
    return np.ascontiguousarray(vectors.transpose(0, 1, 3, 2, 4)).reshape(-1)


def pack_matrix(
    weights: U8, scales: Scales | None, length: int, precision: Precision
) -> PackedArrays:
    """Arrange a packed matrix uint8 [rows, weight_bytes] in tiles, by the names of kernels'
    parameters; the last is filled up."""
    words = find_packing(precision).order_words(weights, length)
    found: PackedArrays = {"matrix_weights": _pack_tiles([words], _VECTOR)}
    if scales is not None:
        found["matrix_scales"] = _pack_tiles([scales])
    return found


def pack_neurons(bundles: U8, layout: BundleLayout) -> PackedArrays:
    """Arrange bundles uint8 [n, .] that have their scales in them for the kernels of
    `pi2.backends.gpu.kernels.ffn`, which read gates and ups in tiles; the last is filled up."""
    inputs, scales, others = _take_arrays(bundles, layout)
    found = {name: fill_tile(array).reshape(-1) for name, array in others.items()}
    found["gate_up_weights"] = _pack_tiles(inputs, _VECTOR)
    if scales:
        found["gate_up_scales"] = _pack_tiles(scales)
    return found


def pack_slots(bundles: U8, layout: BundleLayout) -> PackedArrays:
    """Arrange bundles uint8 [n, .] that have their scales in them for slots: all vectors in rows,
    a neuron's inputs one after the other."""
    inputs, scales, others = _take_arrays(bundles, layout)
    found: PackedArrays = {name: array.reshape(-1) for name, array in others.items()}
    found["gate_up_weights"] = np.stack(inputs, 1).reshape(-1)
    if scales:
        found["gate_up_scales"] = np.stack(scales, 1).reshape(-1)
    return found


def _take_arrays(bundles: U8, layout: BundleLayout) -> tuple[list[U32], list[Scales], PackedArrays]:
    """Words and scales of inputs, and the other arrays [n, .]."""
    packing = find_packing(layout.precision)
    parts = [slice_part(bundles, layout, index) for index in range(len(layout.parts))]
    words = [packing.order_words(weights, layout.hidden) for weights, _ in parts]
    scales = [own for _, own in parts if own is not None]
    others: PackedArrays = {"down_weights": words[-1]}
    if scales:
        others["down_scales"] = np.ascontiguousarray(scales[-1])
    if layout.biases:
        count = range(len(layout.biases))
        others["biases"] = np.stack([slice_bias(bundles, layout, index) for index in count], 1)
    if layout.expert_offset is not None:
        others["experts"] = slice_experts(bundles, layout)
    return words[:-1], scales[:-1], others


def fill_tile(array: npt.NDArray[_Element]) -> npt.NDArray[_Element]:
    """Add rows of zeros to the next multiple of 32."""
    missing = round_up(len(array), TILE) - len(array)
    if missing == 0:
        return array
    return np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)])
