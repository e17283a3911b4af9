"""Dense tensors of a store as programs multiply them: rows of whole blocks, each with its scale."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from pi2.arrays import U8
from pi2.caches import find_cache_folder
from pi2.formats import Packing, find_packing
from pi2.model.tensor import takes_blocks
from pi2.plan.weights.layout import Tensor, round_up
from pi2.store.file_read import ALIGNMENT, FileRead
from pi2.store.manifest import StoredTensor
from pi2.store.reader import NeuronStore, name_blocks, view_tensor

_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A tensor as its file has it: all weights, then all scales."""

    entry: StoredTensor
    raw: U8
    """From the first weight to the last scale."""

    def arrange(self) -> None:
        """Put every scale to its weights, in place."""
        own, packing = self.entry, self.entry.dense.packing
        weights_bytes, scales_bytes = own.dense.count_bytes()
        row_weights, row_scales = weights_bytes // own.rows, scales_bytes // own.rows
        first = own.scales_offset - own.weights_offset
        scales = self.raw[first : first + scales_bytes].copy().reshape(own.rows, -1)
        row = row_weights
        if packing.scaled == "groups":
            row += row_scales
        else:
            self.raw[weights_bytes : weights_bytes + scales_bytes] = scales.reshape(-1)
        step = max(1, _PIECE_BYTES // row)
        # From the end on: a row is behind the weights of those before it.
        for start in reversed(range(0, own.rows, step)):
            end = min(start + step, own.rows)
            weights = self.raw[start * row_weights : end * row_weights].reshape(end - start, -1)
            blocks = packing.join_blocks(
                weights, packing.view_scales(scales[start:end], end - start), own.length
            )
            self.raw[start * row : end * row] = blocks.reshape(-1)


class BlockTensors:
    """Tensors that become blocks when their bytes have been read."""

    def __init__(self) -> None:
        self._loaded: list[_Loaded] = []

    def place(
        self,
        file: FileRead,
        store: NeuronStore,
        names: Iterable[str],
        allocate: Callable[[int, int], U8],
    ) -> dict[str, Tensor]:
        """Find a place for the tensors ``names`` in one region of ``allocate(size, spare)``
        (see `FileRead.place`); they are blocks after `arrange`."""
        wanted = set(names)
        found = [tensor for tensor in store.manifest.tensors if tensor.name in wanted]
        ranges, charged = [], 0
        for tensor in found:
            (first, size), (scales, scales_size) = tensor.ranges
            end = scales + scales_size if scales_size else first + size
            ranges.append((first, end - first))
            charged += round_up(size + scales_size, ALIGNMENT)
        places = file.place(ranges, allocate, charged)
        return {
            tensor.name: self._take(tensor, raw) for tensor, raw in zip(found, places, strict=True)
        }

    def _take(self, tensor: StoredTensor, raw: U8) -> Tensor:
        size, scales_size = tensor.dense.count_bytes()
        if not (scales_size and takes_blocks(tensor.name)):
            first = tensor.scales_offset - tensor.weights_offset
            return view_tensor(tensor, raw[:size], raw[first : first + scales_size])
        self._loaded.append(_Loaded(tensor, raw))
        return name_blocks(tensor, raw[: size + scales_size])

    def arrange(self) -> None:
        """Make blocks of all that was read."""
        while self._loaded:
            self._loaded.pop().arrange()


def map_blocks(store: NeuronStore) -> Mapping[str, Tensor]:
    """Return a store's tensors as blocks in a file without a name, which the system writes and
    reads again as it likes."""
    entries = {tensor.name: tensor for tensor in store.manifest.tensors}
    found = dict(store.tensors)
    chosen = [entries[name] for name, own in found.items() if own.scales is not None]
    chosen = [own for own in chosen if takes_blocks(own.name)]
    sizes = [round_up(sum(own.dense.count_bytes()), ALIGNMENT) for own in chosen]
    if not chosen:
        return found
    folder = find_cache_folder("kernels")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(sum(sizes))
        mapped = mmap.mmap(file.fileno(), sum(sizes))
    region, place = np.frombuffer(mapped, np.uint8), 0
    for own, size in zip(chosen, sizes, strict=True):
        raw = region[place : place + sum(own.dense.count_bytes())]
        found[own.name] = name_blocks(own, raw)
        _copy_blocks(own.dense.packing, store.tensors[own.name], found[own.name])
        place += size
    mapped.flush()
    return found


def _copy_blocks(packing: Packing, source: Tensor, made: Tensor) -> None:
    target: U8 = made.weights.view(np.uint8)
    assert source.scales is not None
    if made.scales is not None:
        made.scales[:] = source.scales
    step = max(1, _PIECE_BYTES // target.shape[1])
    for start in range(0, source.rows, step):
        piece = slice(start, start + step)
        weights = np.ascontiguousarray(source.weights[piece]).view(np.uint8)
        target[piece] = packing.join_blocks(weights, source.scales[piece], source.length)


def split_blocks(tensor: Tensor) -> Tensor:
    """Return a tensor of blocks as packed weights and scales: a copy."""
    assert tensor.format is not None and tensor.precision is not None
    packing = find_packing(tensor.precision)
    weights, scales = packing.split_blocks(np.asarray(tensor.weights), tensor.length)
    if tensor.scales is not None:
        scales = tensor.scales
    return Tensor(
        name=tensor.name,
        rows=tensor.rows,
        length=tensor.length,
        precision=tensor.precision,
        weights=weights,
        scales=scales,
    )
