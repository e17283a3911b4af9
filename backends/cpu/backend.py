"""What `pi2.backends.protocol.Backend` asks of the cpu backend."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from pi2.backends.cpu.needs import count_chunk_bytes, need_workspace
from pi2.plan.arithmetic.units import UnitFacts
from pi2.plan.documents.device import UnitKind

if TYPE_CHECKING:
    from pi2.backends.protocol import BuildRequest, Executor

__all__ = [
    "COMPUTES",
    "KINDS",
    "NATIVE",
    "build",
    "count_chunk_bytes",
    "find_limits",
    "find_obstacles",
    "need_workspace",
]

COMPUTES = True
NATIVE = True
KINDS: tuple[UnitKind, ...] = ("cpu",)


def find_obstacles(features: frozenset[str], architecture: str) -> list[str]:
    """Return what keeps the kernels from running here."""
    from pi2.backends.compiler.runtime import find_runtime_library
    from pi2.backends.kernels.isa import ARCHITECTURES

    obstacles = []
    if architecture not in ARCHITECTURES:
        obstacles.append(f"no kernels for architecture {architecture}")
    if find_runtime_library() is None:
        obstacles.append("apache-tvm is not installed")
    if importlib.util.find_spec("tvm_ffi") is None:
        obstacles.append("apache-tvm-ffi is not installed")
    return obstacles


def find_limits(facts: UnitFacts) -> list[str]:
    """Return what it cannot compute of a plan."""
    if facts.resolved.divided_rows is not None and facts.resolved.model.state_layers:
        return ["cannot divide projections and the head of a model whose layers keep a state"]
    rows, norm = facts.resolved.divided_rows, facts.resolved.model.norm
    if rows is not None and rows.output and norm.outputs:
        return ["cannot divide projections whose results are normalised (norm.outputs)"]
    return []


def build(request: BuildRequest) -> Executor:
    """Compile the kernels unless they are cached, and make the executor."""
    from pi2.backends.compiler.cache import load_or_compile
    from pi2.backends.compiler.runtime import Library, start_threads
    from pi2.backends.cpu.arrays import measure_arrays
    from pi2.backends.cpu.executor import CpuExecutor
    from pi2.backends.cpu.specification import make_spec

    spec = make_spec(request)
    path = load_or_compile(spec, request.progress)
    start_threads(request.threads, request.cores)
    return CpuExecutor(request, spec, Library(path, measure_arrays(request)))
