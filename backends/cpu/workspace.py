"""Where the executor's arrays come from, and how kernels see them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pi2.arrays import F32
from pi2.backends.compiler.runtime import Library, View
from pi2.backends.experts import slice_tensor
from pi2.backends.kernels.isa import BLOCK_TOKENS, Isa, count_blocks_bytes
from pi2.backends.kernels.spec import KernelSpec
from pi2.backends.protocol import BuildRequest
from pi2.plan.weights.layout import GROUP, round_up

Views = dict[str, View]
"""Views of arrays by the names that parameters of kernels have."""


class Workspace:
    """Arrays of the executor, taken from the plan's segments and wrapped for the kernels."""

    def __init__(self, request: BuildRequest, library: Library) -> None:
        self._request = request
        self._library = library
        self._kept: list[npt.NDArray[Any]] = []

    def make(self, dtype: str, *shape: int, segment: str = "workspace") -> npt.NDArray[Any]:
        """Return a zeroed array of the segment."""
        kind = np.dtype(dtype)
        size = int(np.prod(shape)) * kind.itemsize
        raw = self._request.allocate(segment, round_up(max(size, 1), 64))
        return raw[:size].view(kind).reshape(shape)

    def wrap(self, array: npt.NDArray[Any]) -> View:
        """Return a kernel's view of an array and keep the array."""
        self._kept.append(array)
        return self._library.wrap(array)

    def wrap_tensors(self, **tensors: str) -> Views:
        """Return views of tensors of the store by the kernels' names for them: those that the model
        has.

        A packed ``qkv`` gives ``qkv_weights`` and ``qkv_scales``; fp16 weights have no scales: the
        weights stand in, and are not read as such.
        """
        return self.wrap_parts(0, 1, **tensors)

    def wrap_own_rows(self, parameter: str, name: str, first: int) -> Views:
        """Return views of a packed tensor's rows from ``first`` on."""
        tensor = self._request.tensors[name].take_rows(first)
        weights = self.wrap(np.ascontiguousarray(tensor.weights).view(np.uint8))
        views = {f"{parameter}_weights": weights, f"{parameter}_scales": weights}
        if tensor.scales is not None:
            scales = np.ascontiguousarray(tensor.scales).view(np.uint8)
            views[f"{parameter}_scales"] = self.wrap(scales)
        return views

    def wrap_parts(self, part: int, parts: int, **tensors: str) -> Views:
        """Return views of a part of the rows of tensors."""
        views: Views = {}
        for parameter, name in tensors.items():
            if name not in self._request.tensors:
                continue
            tensor = slice_tensor(self._request.tensors[name], part, parts)
            if tensor.precision is None:
                views[parameter] = self.wrap_floats(np.asarray(tensor.weights).view(np.float32))
                continue
            weights = self.wrap(np.asarray(tensor.weights).view(np.uint8))
            views[f"{parameter}_weights"] = views[f"{parameter}_scales"] = weights
            if tensor.scales is not None:
                scales = np.asarray(tensor.scales).view(np.uint8)
                views[f"{parameter}_scales"] = self.wrap(scales)
        return views

    def wrap_floats(self, values: npt.NDArray[Any]) -> View:
        """Return a kernel's view of float32 values, of an aligned copy where they lie badly."""
        flat = values.reshape(-1)
        if flat.ctypes.data % 64:
            copy = self.make("float32", len(flat), segment="predictor")
            copy[:] = flat
            flat = copy
        return self.wrap(flat)

    def make_activations(
        self,
        name: str,
        tokens: int,
        length: int,
        planes: int,
        values: F32 | None = None,
        *,
        isa: Isa | None = None,
        upper: bool = False,
    ) -> Views:
        """Return views of codes, scales, sums and values for ``tokens`` vectors; of what the
        schedules of ``isa`` have of several tokens: an even number of codes and scales, or blocks;
        with ``upper``, of sums of upper planes."""
        if values is None:
            values = self.make("float32", tokens, length)
        groups = length // GROUP
        even = round_up(tokens, 2) if isa is not None and isa.pairs else tokens
        more = {}
        if isa is not None and isa.blocks:
            size = count_blocks_bytes(length, planes)
            blocks = self.make("int8", round_up(tokens, BLOCK_TOKENS) // BLOCK_TOKENS, size)
            more[f"{name}_blocks"] = self.wrap(blocks)
        if upper:
            more[f"{name}_upper_sums"] = self.wrap(self.make("int32", tokens, groups))
        return more | {
            f"{name}_codes": self.wrap(self.make("int8", even, planes, length)),
            f"{name}_scales": self.wrap(self.make("float32", even, groups)),
            f"{name}_sums": self.wrap(self.make("int32", tokens, groups)),
            f"{name}_values": self.wrap(values),
        }

    def make_tiles(self, name: str, spec: KernelSpec, length: int) -> Views:
        """Return the view of the room in which threads unpack weights that several tokens share."""
        size = spec.isa.count_tile_bytes(length)
        return {f"{name}_tiles": self.wrap(self.make("int8", spec.threads, size))}
