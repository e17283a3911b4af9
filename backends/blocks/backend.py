"""What `pi2.backends.protocol.Backend` asks of the backend that computes files as they are."""

from __future__ import annotations

from pi2.backends.cpu.backend import find_obstacles
from pi2.plan.arithmetic.units import UnitFacts
from pi2.plan.documents.device import UnitKind

__all__ = ["COMPUTES", "KINDS", "NATIVE", "ONLY_EMULATED", "find_limits", "find_obstacles"]

COMPUTES = True
NATIVE = True
KINDS: tuple[UnitKind, ...] = ()
ONLY_EMULATED = False


def find_limits(facts: UnitFacts) -> list[str]:
    """Name the operators of a model that there are no kernels for."""
    from pi2.backends.blocks.contract import find_unknown

    unknown = find_unknown(facts.resolved.model)
    return [f"does not compute {', '.join(unknown)}"] if unknown else []
