"""Whether a device has room for what a plan puts on it."""

from __future__ import annotations

from collections.abc import Sequence

from pi2.backends.gpu.launchers.interface import Launcher
from pi2.diagnostics import UserError
from pi2.plan.documents.quantities import approximate_bytes


def check_memory(launcher: Launcher, sizes: Sequence[int]) -> None:
    """P361 where the driver says that the device has no room for arrays of ``sizes`` bytes."""
    facts, help = launcher.facts, "give the unit a smaller share of `layers.split`"
    largest, total = max(sizes), sum(sizes)
    if largest > facts.max_array_bytes:
        raise UserError.of(
            "P361",
            f"{facts.name} takes at most {approximate_bytes(facts.max_array_bytes)} in one piece,"
            f" and the plan needs {approximate_bytes(largest)}",
            help=help,
        )
    state = launcher.read_memory()
    if state is not None and total > state.free_bytes:
        raise UserError.of(
            "P361",
            f"{facts.name} has {approximate_bytes(state.free_bytes)} free, and the plan puts"
            f" {approximate_bytes(total)} on it",
            help=f"{help}, or end other programs that use it",
        )
