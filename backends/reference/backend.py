"""What `pi2.backends.protocol.Backend` asks of the reference backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pi2.backends.cpu.needs import count_chunk_bytes, need_workspace
from pi2.backends.limits import list_unknown_weights
from pi2.plan.arithmetic.needs import Need
from pi2.plan.arithmetic.units import UnitFacts
from pi2.plan.documents.device import Unit, UnitKind

if TYPE_CHECKING:
    from pi2.backends.dense_unit import DenseUnit, UnitRequest
    from pi2.backends.protocol import BuildRequest, Executor

# It stands in for the cpu backend, to compare with: a plan has the same room for both.
__all__ = [
    "COMPUTES",
    "KINDS",
    "NATIVE",
    "ONLY_EMULATED",
    "build",
    "build_unit",
    "count_chunk_bytes",
    "find_limits",
    "find_obstacles",
    "find_unit_obstacles",
    "need_unit_memory",
    "need_workspace",
]

COMPUTES = True
NATIVE = False
KINDS: tuple[UnitKind, ...] = ()
ONLY_EMULATED = False


def find_obstacles(features: frozenset[str], architecture: str) -> list[str]:
    """Return nothing: numpy runs everywhere."""
    return []


def find_unit_obstacles(unit: Unit) -> list[str]:
    """Return nothing: it plays every unit itself."""
    return []


def find_limits(facts: UnitFacts) -> list[str]:
    """Return what it cannot compute of a plan."""
    model = facts.resolved.model
    if facts.resolved.divided_rows is not None and model.state_layers:
        return ["cannot divide projections and the head of a model whose layers keep a state"]
    if facts.resolved.divided_rows is not None and model.uneven_layers:
        return ["cannot divide projections and the head of a model with layers without attention"]
    limits = []
    if facts.resolved.divided_rows is not None and model.other_heads is not None:
        limits.append("cannot divide projections of layers whose heads differ (other_heads)")
    if facts.resolved.divided_rows is not None and model.attention.kv_shared_layers:
        limits.append("cannot divide projections of layers that share keys (kv_shared_layers)")
    if facts.resolved.divided_rows is not None and model.altup is not None:
        limits.append("cannot divide projections of a model with several residual streams (altup)")
    if facts.neurons is not None:
        limits += list_unknown_weights(model)
    has_gates = facts.resolved.plan.decode.predictor == "gate"
    if has_gates and model.quantization.ffn == "mxfp4":
        limits.append("keeps no gates of mxfp4: no `gate` predictor, no [sparsity]")
    return limits


def need_unit_memory(facts: UnitFacts) -> Need:
    """Return the bytes of the neurons with their scales, and in a process of its own of inputs,
    sums and two stretches of neurons."""
    from pi2.backends.reference.unit_memory import count_unit_memory

    return count_unit_memory(facts)


def build(request: BuildRequest) -> Executor:
    """Make the executor; nothing is compiled."""
    from pi2.backends.reference.executor import ReferenceExecutor

    return ReferenceExecutor(request)


def build_unit(request: UnitRequest) -> DenseUnit:
    """Make a unit that works in a thread, or in a process of its own."""
    from pi2.backends.reference.dense_unit import ThreadUnit
    from pi2.backends.reference.process_unit import ProcessUnit

    return ThreadUnit(request) if request.process == "same" else ProcessUnit(request)
