"""What `pi2.backends.protocol.Backend` asks of the cpu backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pi2.backends.blocks.contract import OF_STORES as FILES
from pi2.backends.cpu.arrays import count_segments as count_segments
from pi2.backends.cpu.request import list_programs, make_spec
from pi2.formats import find_packing
from pi2.model.options import describe_unknown
from pi2.plan.arithmetic.units import UnitFacts, Verdict, list_undivided
from pi2.plan.documents.device import UnitKind
from pi2.tile_permission import permit_tiles

if TYPE_CHECKING:
    from pi2.backends.executor import Executor
    from pi2.backends.protocol import BuildRequest

VERDICT: Verdict = "runs"
NATIVE = True
KINDS: tuple[UnitKind, ...] = ("cpu",)
ONLY_EMULATED = False
COMPUTED = frozenset(option for option in FILES if not option.startswith("attention.index"))
"""Options of models that there are kernels for."""


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
    """Return the parts of a plan that it cannot compute."""
    rows, model = facts.resolved.divided_rows, facts.resolved.model
    limits = describe_unknown(model, COMPUTED, facts.resolved.plan.kv.context)
    whole = ["norm.outputs"] if rows is not None and rows.output else []
    whole += ["attention.latent"] if rows is not None and (rows.qkv or rows.output) else []
    limits += list_undivided(facts, whole)
    has_gates = facts.resolved.plan.decode.predictor == "gate"
    if has_gates and find_packing(model.quantization.ffn).shares_down_scales:
        limits.append(f"keeps no gates of {model.quantization.ffn}: no `gate` predictor")
    return limits


def prepare(request: BuildRequest) -> Callable[[BuildRequest], Executor]:
    """Compile the kernels unless they are cached."""
    from pi2.backends.compiler.cache import load_or_compile, load_or_compile_several

    spec = make_spec(request)
    path = load_or_compile(spec, request.progress)
    programs = list_programs(request)
    if request.has_little_memory:
        for own in programs:
            load_or_compile(own, request.progress)
    load_or_compile_several(programs, request.progress)

    def build(request: BuildRequest) -> Executor:
        from pi2.backends.cpu.executor import CpuExecutor

        return CpuExecutor(request, spec, path)

    return build


def build(request: BuildRequest) -> Executor:
    return prepare(request)(request)
