"""What kernels of a library see of arrays and of a store's tensors."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pi2.backends.arithmetic import slice_tensor
from pi2.backends.blocks.room import GRIDS, make_tables
from pi2.backends.compiler.runtime import Library, View
from pi2.backends.cpu.arrays import Arrays
from pi2.backends.cpu.request import count_tokens
from pi2.backends.protocol import BuildRequest
from pi2.plan.weights.layout import Precision, Tensor

Views = dict[str, View]
"""Views of arrays by the names that parameters of kernels have."""


def wrap_all(library: Library, arrays: Arrays) -> Views:
    return {name: library.wrap(array) for name, array in arrays.items()}


def wrap_table(library: Library, precision: Precision, name: str) -> Views:
    """Return a view of what codes of blocks are looked up in, if they are."""
    return {name: library.wrap(make_tables(precision))} if precision in GRIDS else {}


class TensorViews:
    """Makes views of a store's tensors."""

    def __init__(self, library: Library, tensors: Mapping[str, Tensor]) -> None:
        self._library, self._tensors = library, tensors

    def wrap_parts(self, part: int, parts: int, **names: str) -> Views:
        """Views of a part of tensors by kernels' names. fp16 weights replace missing scales."""
        views: Views = {}
        for parameter, name in names.items():
            if name not in self._tensors:
                continue
            tensor = slice_tensor(self._tensors[name], part, parts)
            weights = self._library.wrap(np.asarray(tensor.weights).view(np.uint8))
            if tensor.precision is None:
                views[parameter] = weights
                continue
            views[f"{parameter}_weights"] = views[f"{parameter}_scales"] = weights
            if tensor.scales is not None:
                scales = np.asarray(tensor.scales).view(np.uint8)
                views[f"{parameter}_scales"] = self._library.wrap(scales)
        return views


def measure_arrays(request: BuildRequest) -> dict[str, int]:
    """Return what the symbols in shapes of kernels' parameters stand for."""
    return {
        "tokens": count_tokens(request),
        "sequences": request.step_tokens,
        "neurons": request.neurons,
        "expert": request.model.shape.ffn,
        "threads": request.threads,
    }
