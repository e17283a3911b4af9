"""What `pi2.backends.protocol.Backend` asks of the null backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

# A plan that is tried dry is meant for kernels: it has to have the room that they need.
from pi2.backends.cpu.arrays import count_segments as count_segments
from pi2.backends.reference.backend import find_obstacles as find_obstacles
from pi2.backends.reference.backend import find_unit_obstacles as find_unit_obstacles
from pi2.plan.arithmetic.units import Need, UnitFacts, Verdict
from pi2.plan.documents.device import UnitKind

if TYPE_CHECKING:
    from pi2.backends.blocks.interpreter import Interpreter
    from pi2.backends.executor import Executor
    from pi2.backends.protocol import BuildRequest, ProgramRequest
    from pi2.backends.units import DenseUnit, UnitRequest, WholeModel, WholeRequest
    from pi2.plan.documents.model import Model
    from pi2.plan.documents.plan import KvType

VERDICT: Verdict = "dry run"
NATIVE = False
KINDS: tuple[UnitKind, ...] = ()
ONLY_EMULATED = False


def find_limits(facts: UnitFacts) -> list[str]:
    """Name a unit that computes: plans are tried dry as a whole."""
    resolved = facts.resolved
    for unit in (resolved.sparse_unit, *resolved.dense_units):
        name = resolved.find_backend(unit) or "null"
        if name != "null":
            return [f"computes nothing, and `{name}` of `{unit}` does: all are tried dry, or none"]
    return []


def need_unit_memory(facts: UnitFacts) -> Need:
    """Bytes of the neurons, without padding in memory of the unit's own; 0 of a whole model."""
    if facts.share is None:
        return Need(0, "nothing, it is a dry run")
    bundle, count = facts.share.bundle, sum(facts.share.neurons)
    size = bundle.used_bytes
    if facts.resolved.shares_main_memory(facts.unit):
        size = bundle.stride
    return Need(count * size, f"{count} neurons of {size} bytes")


def build(request: BuildRequest) -> Executor:
    from pi2.backends.null.executor import NullExecutor

    return NullExecutor(request)


def build_unit(request: UnitRequest) -> DenseUnit:
    from pi2.backends.null.executor import NullUnit

    return NullUnit(request)


def interpret(request: ProgramRequest, model: Model, formats: list[str], kv: KvType) -> Interpreter:
    from pi2.backends.null.executor import NullInterpreter

    return NullInterpreter(model, formats, kv)


def build_whole(request: WholeRequest) -> WholeModel:
    from pi2.backends.null.executor import NullModel

    return NullModel(request)
