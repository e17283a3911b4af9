"""The kernels of a specification."""

from __future__ import annotations

from collections.abc import Iterator

from pi2.backends.gpu.kernels.code import Kernel
from pi2.backends.gpu.kernels.ffn import list_ffn_kernels
from pi2.backends.gpu.kernels.specification import GpuSpec


def list_kernels(spec: GpuSpec) -> Iterator[Kernel]:
    """Make all of them."""
    if spec.ffn is not None:
        yield from list_ffn_kernels(spec.ffn, spec.target.fp16)
