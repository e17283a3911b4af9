"""Source of the neurons' arrays, and their views for kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pi2.arrays import F32
from pi2.backends.arithmetic import slice_tensor
from pi2.backends.compiler.runtime import Library, View
from pi2.backends.cpu.course import count_tokens
from pi2.backends.kernels.isa import BLOCK_TOKENS, Isa, count_blocks_bytes
from pi2.backends.kernels.spec import KernelSpec
from pi2.backends.protocol import BuildRequest
from pi2.plan.weights.layout import GROUP, Precision, round_up

Views = dict[str, View]
"""Views of arrays by the names that parameters of kernels have."""


class Workspace:
    """Arrays of the executor, taken from the plan's segments and wrapped for the kernels."""

    def __init__(self, request: BuildRequest, library: Library) -> None:
        self._request = request
        self._library = library

    def make(self, dtype: str, *shape: int, segment: str = "workspace") -> npt.NDArray[Any]:
        kind = np.dtype(dtype)
        size = int(np.prod(shape)) * kind.itemsize
        raw = self._request.allocate(segment, round_up(max(size, 1), 64))
        return raw[:size].view(kind).reshape(shape)

    def wrap(self, array: npt.NDArray[Any]) -> View:
        return self._library.wrap(array)

    def wrap_parts(self, part: int, parts: int, **tensors: str) -> Views:
        """Views of a part of the store's tensors by kernels' names. fp16 weights replace missing
        scales."""
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
        """Views of codes, scales, sums and values for ``tokens`` vectors, laid out for ``isa``."""
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
        """Return the view of the room in which threads unpack weights that several tokens share, if
        they do."""
        if not spec.isa.unpacks:
            return {}
        size = spec.isa.count_tile_bytes(length)
        return {f"{name}_tiles": self.wrap(self.make("int8", spec.threads, size))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrays:
    """Arrays that the neurons of each chunk of a prompt have."""

    read: F32
    """Their input [chunk, width], before it is rounded: the program's own array, unless there
    are several chunks, as are `routes`."""
    total: F32
    """Their sum [chunk, width]."""
    routes: F32
    """Weights of the experts [chunk, experts]."""
    cutoffs: F32
    """Cutoffs of a layer's gates [chunk], if layers have them."""
    views: Views
    """All of them, by the kernels' names."""


def wrap_table(space: Workspace, precision: Precision, name: str) -> Views:
    """Return a view of what codes of blocks are looked up in, if they are."""
    from pi2.backends.blocks.room import GRIDS, make_tables

    return {name: space.wrap(make_tables(precision))} if precision in GRIDS else {}


def make_arrays(space: Workspace, spec: KernelSpec, read: F32, given: F32, routes: F32) -> Arrays:
    """Return arrays for as many tokens as ``read`` has; ``given``: what `Arrays.total` becomes."""
    chunk = len(read)
    total = space.make("float32", chunk, spec.hidden)
    views = {"y": space.wrap(total), "given": space.wrap(given)}
    if spec.experts:
        views["routes"] = space.wrap(routes)
    views |= wrap_table(space, spec.precision.gates, "block_table")
    if spec.sub_norm:
        views["squares"] = space.wrap(space.make("float32", chunk))
    views |= space.make_activations(
        "hidden", chunk, spec.hidden, spec.most_planes, read, isa=spec.isa, upper=spec.upper_steps
    )
    cutoffs = np.zeros(0, np.float32)
    if spec.cutoff_rows:
        cutoffs = space.make("float32", chunk)
        views["cutoffs"] = space.wrap(cutoffs)
    return Arrays(read=read, total=total, routes=routes, cutoffs=cutoffs, views=views)


def measure_arrays(request: BuildRequest) -> dict[str, int]:
    """Return what the symbols in shapes of kernels' parameters stand for."""
    return {
        "tokens": count_tokens(request),
        "sequences": request.step_tokens,
        "neurons": request.neurons,
        "expert": request.model.shape.ffn,
        "threads": request.threads,
    }
