"""Weights of the store rearranged for a GPU, and brought there: neighbouring threads read
neighbouring words.

The store's groups of 32 weights keep their words (`pi2.backends.gpu.kernels.code`), in two orders:

- *tiles*, for rows that are multiplied with inputs: 32 rows are a tile.  In it comes one vector of
  16 bytes of each row, then the next of each row, and so on; if neurons have gates, all of the
  gates of a tile come before its up rows.  Scales likewise: one of each row, then the next.
- *rows*, for vectors that are added up or gathered: a vector's groups one after the other, and its
  scales.

A piece of a multiple of 32 rows is contiguous in both.  Rows that fill up the last tile are zero.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pi2.arrays import U8, U32, Scales
from pi2.backends.gpu.arrays import TILE, count_tile_bytes
from pi2.backends.gpu.launchers.interface import DeviceArray, Event, Queue
from pi2.formats import find_packing
from pi2.plan.weights.bundles import slice_bias, slice_experts, slice_part
from pi2.plan.weights.layout import BundleLayout, Precision, Tensor, round_up

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


class Uploads:
    """Brings weights to a device: a piece is rearranged while the one before is on its way, and no
    more than that."""

    def __init__(self, queue: Queue, layout: BundleLayout, *, in_slots: bool = False) -> None:
        """``in_slots``: neurons go to slots instead of tiles."""
        self._queue, self._layout = queue, layout
        self._pack = pack_slots if in_slots else pack_neurons
        self._sent: Event | None = None
        self._layer, self._first, self._rest = -1, 0, np.empty((0, 0), np.uint8)
        """Neurons that fill no tile yet."""

    def keep(
        self, arrays: Mapping[str, DeviceArray], layer: int, first: int, bundles: U8, count: int
    ) -> None:
        """Send neurons in whole tiles; others wait for the next ones, but for the last of a layer
        of ``count``."""
        if self._layer == layer and len(self._rest):
            assert first == self._first + len(self._rest), "neurons come in stored order"
            first, bundles = self._first, np.concatenate([self._rest, bundles])
        is_last = first + len(bundles) == count
        size = len(bundles) if is_last else len(bundles) // TILE * TILE
        self._layer, self._first, self._rest = layer, first + size, bundles[size:].copy()
        if size:
            packed = self._pack(bundles[:size], self._layout)
            self._send_tiles(arrays, packed, first, count_tile_bytes(self._layout))

    def put(self, arrays: Mapping[str, DeviceArray], first: int, tensor: Tensor) -> None:
        """Send rows of a packed matrix, from row ``first`` on, a multiple of 32."""
        assert tensor.precision is not None and first % TILE == 0, (tensor.name, first)
        weights = np.asarray(tensor.weights).view(np.uint8).reshape(tensor.rows, -1)
        scales = None if tensor.scales is None else tensor.scales.reshape(tensor.rows, -1)
        packed = pack_matrix(weights, scales, tensor.length, tensor.precision)
        tiles = -(-tensor.rows // TILE)
        sizes = {name: values.nbytes // tiles for name, values in packed.items()}
        self._send_tiles(arrays, packed, first, sizes)

    def _send_tiles(
        self,
        arrays: Mapping[str, DeviceArray],
        packed: PackedArrays,
        first: int,
        sizes: Mapping[str, int],
    ) -> None:
        tile, names = first // TILE, packed.keys()
        self.send(*((arrays[name], packed[name], tile * sizes[name]) for name in names))

    def send(self, *pieces: tuple[DeviceArray, npt.NDArray[Any], int]) -> None:
        """Send values to the bytes from some on of arrays."""
        copies = []
        for array, values, offset in pieces:
            flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
            # The caller's memory may change as soon as this returns.
            copies.append((array, np.zeros(round_up(flat.nbytes, 4), np.uint8), offset))
            copies[-1][1][: flat.nbytes] = flat
        self.wait()
        for copy in copies:
            self._queue.upload(*copy)
        self._sent = self._queue.submit()

    def wait(self) -> None:
        """Return when all has arrived."""
        if self._sent is not None:
            self._sent.wait()
            self._sent = None
