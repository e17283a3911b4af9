"""What threads work in during a single call: the same memory for attention and for dense FFNs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pi2.backends.cpu.workspace import Workspace
from pi2.backends.kernels.mixing_layout import lay_out_mixing
from pi2.backends.kernels.spec import KEPT, UNPACKED, KernelSpec

DENSE_FLOATS = (UNPACKED + KEPT) * 128
"""Numbers that a thread of the dense FFN has room for."""


class Scratch:
    """Memory that keeps nothing from call to call."""

    def __init__(self, space: Workspace, spec: KernelSpec) -> None:
        specs = [spec, *(spec.take_other(number + 1) for number in range(len(spec.others)))]
        sizes = [4 * DENSE_FLOATS]
        if spec.latent is None:
            sizes += [lay_out_mixing(own).room_bytes for own in specs]
        self._raw = space.make("uint8", spec.threads * max(sizes))

    def cut(self, *parts: tuple[str, int]) -> list[npt.NDArray[Any]]:
        """Return arrays, one behind the other, of types and numbers of elements; each takes whole
        cache lines."""
        arrays, done = [], 0
        for dtype, number in parts:
            size = number * np.dtype(dtype).itemsize
            assert size % 64 == 0, parts
            arrays.append(self._raw[done : done + size].view(dtype))
            done += size
        return arrays
