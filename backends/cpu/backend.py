"""What `pi2.backends.protocol.Backend` asks of the cpu backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pi2.backends.cpu.needs import count_chunk_bytes, need_workspace
from pi2.formats import find_packing
from pi2.plan.arithmetic.units import UnitFacts
from pi2.plan.documents.device import UnitKind
from pi2.tile_permission import permit_tiles

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
    "prepare",
]

COMPUTES = True
NATIVE = True
KINDS: tuple[UnitKind, ...] = ("cpu",)
ONLY_EMULATED = False


def find_obstacles(features: frozenset[str], architecture: str) -> list[str]:
    """Return what keeps the kernels from running here."""
    from pi2.backends.compiler.functions import find_obstacles as find_missing
    from pi2.backends.kernels.isa import ARCHITECTURES, choose_isa

    if architecture not in ARCHITECTURES:
        return [f"no kernels for architecture {architecture}", *find_missing()]
    obstacles = []
    if choose_isa(features, architecture).blocks and not permit_tiles():
        obstacles.append("the system does not let this process use amx-int8")
    return obstacles + find_missing()


def find_limits(facts: UnitFacts) -> list[str]:
    """Return what it cannot compute of a plan."""
    rows, model = facts.resolved.divided_rows, facts.resolved.model
    if rows is not None and model.state_layers:
        return ["cannot divide projections and the head of a model whose layers keep a state"]
    if rows is not None and any(len(block.mixers) != 1 for block in model.blocks):
        return ["cannot divide projections and the head of a model with layers without attention"]
    limits = []
    if rows is not None and rows.output and model.norm.outputs:
        limits.append("cannot divide projections whose results are normalised (norm.outputs)")
    if rows is not None and (rows.qkv or rows.output) and model.attention.latent is not None:
        limits.append("cannot divide the projections of latent attention")
    if rows is not None and model.other_heads is not None:
        limits.append("cannot divide projections of layers whose heads differ (other_heads)")
    if rows is not None and model.attention.kv_shared_layers:
        limits.append("cannot divide projections of layers that share keys (kv_shared_layers)")
    if rows is not None and model.altup is not None:
        limits.append("cannot divide projections of a model with several residual streams (altup)")
    has_gates = facts.resolved.plan.decode.predictor == "gate"
    if has_gates and find_packing(model.quantization.ffn).shares_down_scales:
        limits.append(f"keeps no gates of {model.quantization.ffn}: no `gate` predictor")
    return limits


def prepare(request: BuildRequest) -> Callable[[BuildRequest], Executor]:
    """Compile the kernels unless they are cached."""
    from pi2.backends.compiler.cache import load_or_compile
    from pi2.backends.cpu.specification import make_spec

    spec = make_spec(request)
    path = load_or_compile(spec, request.progress)

    def build(request: BuildRequest) -> Executor:
        from pi2.backends.compiler.runtime import Library
        from pi2.backends.cpu.executor import CpuExecutor
        from pi2.backends.cpu.workspace import measure_arrays

        sizes = measure_arrays(request)
        library = Library(path, sizes, threads=request.threads, cores=request.cores)
        return CpuExecutor(request, spec, library)

    return build


def build(request: BuildRequest) -> Executor:
    return prepare(request)(request)
