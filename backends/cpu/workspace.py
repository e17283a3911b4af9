"""Where the executor's arrays come from, and how kernels see them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pi2.arrays import F32
from pi2.backends.compiler.runtime import Library
from pi2.backends.experts import slice_tensor
from pi2.backends.kernels.isa import PAIRED_GROUP_BYTES
from pi2.backends.protocol import BuildRequest
from pi2.plan.weights.layout import GROUP, round_up


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

    def wrap(self, array: npt.NDArray[Any]) -> Any:
        """Return a kernel's view of an array and keep the array."""
        self._kept.append(array)
        return self._library.wrap(array)

    def wrap_tensor(self, name: str) -> tuple[Any, ...]:
        """Return the kernels' views of a tensor of the store: weights, and scales if it has any.

        fp16 weights have no scales: the weights stand in, and are not read as such.
        """
        return self.wrap_part(name, 0, 1)

    def wrap_part(self, name: str, part: int, parts: int) -> tuple[Any, ...]:
        """Return the same of a part of a tensor's rows."""
        tensor = slice_tensor(self._request.tensors[name], part, parts)
        if tensor.precision is None:
            return (self.wrap_floats(np.asarray(tensor.weights).view(np.float32)),)
        weights = self.wrap(np.asarray(tensor.weights).view(np.uint8))
        if tensor.scales is None:
            return (weights, weights)
        return (weights, self.wrap(np.asarray(tensor.scales).view(np.uint8)))

    def wrap_floats(self, values: npt.NDArray[Any]) -> Any:
        """Return a kernel's view of float32 values, of an aligned copy where they lie badly."""
        flat = values.reshape(-1)
        if flat.ctypes.data % 64:
            copy = self.make("float32", len(flat), segment="predictor")
            copy[:] = flat
            flat = copy
        return self.wrap(flat)

    def wrap_norm(self, name: str, bias: bool) -> tuple[Any, ...]:
        """Return the kernels' views of a norm: weight, and bias if it has one."""
        return (*self.wrap_tensor(name), *(self.wrap_tensor(f"{name}_bias") if bias else ()))

    def make_activations(
        self,
        tokens: int,
        length: int,
        planes: int,
        values: F32 | None = None,
        *,
        tiles: int = 0,
    ) -> tuple[Any, ...]:
        """Return codes, scales, sums and values for ``tokens`` vectors, and ``tiles``, as many as
        there are threads, where the kernels take tokens in pairs."""
        if values is None:
            values = self.make("float32", tokens, length)
        groups = length // GROUP
        even = round_up(tokens, 2) if tiles else tokens
        arrays = (
            self.wrap(self.make("int8", even, planes, length)),
            self.wrap(self.make("float32", even, groups)),
            self.wrap(self.make("int32", tokens, groups)),
            self.wrap(values),
        )
        if not tiles:
            return arrays
        return (*arrays, self.wrap(self.make("int8", tiles, groups * PAIRED_GROUP_BYTES)))
