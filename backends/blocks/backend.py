"""What `pi2.backends.protocol.Backend` asks of the backend that computes files as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pi2.backends.cpu.backend import find_obstacles as find_obstacles
from pi2.plan.arithmetic.units import UnitFacts, Verdict
from pi2.plan.documents.device import UnitKind

if TYPE_CHECKING:
    from pi2.backends.blocks.interpreter import Interpreter
    from pi2.backends.protocol import ProgramRequest
    from pi2.plan.documents.model import Model
    from pi2.plan.documents.plan import KvType

VERDICT: Verdict = "runs"
NATIVE = True
KINDS: tuple[UnitKind, ...] = ()
ONLY_EMULATED = False


def find_limits(facts: UnitFacts) -> list[str]:
    """Name the operators of a model that there are no kernels for."""
    from pi2.backends.blocks.contract import find_unknown

    unknown = find_unknown(facts.resolved.model)
    return [f"does not compute {', '.join(unknown)}"] if unknown else []


def interpret(request: ProgramRequest, model: Model, formats: list[str], kv: KvType) -> Interpreter:
    """Load or compile kernels, which run as `pi2.backends.blocks.interpreter` says."""
    from pi2.backends.blocks.interpreter import CompiledInterpreter

    return CompiledInterpreter(request, model, formats, kv)
