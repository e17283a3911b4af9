"""Kernels for a device, compiled ahead of time and kept in the kernel cache."""

from __future__ import annotations

from collections.abc import Mapping

from pi2.backends.compiler.cache import load_or_compile
from pi2.backends.compiler.compilers import Compiler
from pi2.backends.gpu.kernels.signature import KernelImage
from pi2.backends.gpu.kernels.specification import GpuSpec
from pi2.backends.gpu.launchers.interface import Launcher, LoadedKernel
from pi2.progress import Progress

IMAGES = Compiler("pi2.backends.gpu.kernels.compile", ".json")


def load_image(spec: GpuSpec, progress: Progress) -> KernelImage:
    """Return the compiled kernels of ``spec``.

    Raises P363 where they must be compiled and the API's compiler is not installed, P651 where
    compiling fails.
    """
    return KernelImage.from_json(load_or_compile(spec, progress, IMAGES).read_text())


def load_kernels(
    launcher: Launcher, spec: GpuSpec, progress: Progress
) -> Mapping[str, LoadedKernel]:
    """Return the kernels of ``spec``, by name, ready to be bound to arrays of ``launcher``."""
    assert spec.target == launcher.facts.target, (spec.target, launcher.facts)
    return launcher.load(load_image(spec, progress))
