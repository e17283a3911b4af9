"""Ends work that makes no progress because memory is short, and says how much it takes."""

from __future__ import annotations

from functools import partial

from pi2.backends.faults.shortage import STALL_S, MemoryWatch
from pi2.diagnostics import UserError
from pi2.machine import detect_memory
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.quantities import approximate_bytes, write_least, write_most
from pi2.progress import Progress

ROOM = 1.125
"""Memory that a budget needs, with the system's own tables and caches of it, by the budget."""


def open_watch(resolved: ResolvedPlan) -> MemoryWatch:
    """Watch a run of ``resolved`` from now on, in a thread that is to be closed."""
    return MemoryWatch(partial(describe_shortage, resolved.plan.memory.budget))


def describe_shortage(budget_bytes: int) -> UserError:
    """P696, with what this machine or its group has and what a plan's budget needs."""
    limit = detect_memory().limit_bytes
    needed = int(budget_bytes * ROOM)
    fitting = write_most(int(min(budget_bytes, limit) / ROOM**2))
    return UserError.of(
        "P696",
        f"memory is short: for {STALL_S} s the run made no progress, and pages of files "
        f"went out as they came in. It may have {approximate_bytes(limit)}, and a budget of "
        f"{approximate_bytes(budget_bytes)} needs about {approximate_bytes(needed)}",
        help=f"--memory '{fitting}' leaves more room; or give it '{write_least(needed)}', or end "
        "what else runs in its group",
    )


def watch_progress(watch: MemoryWatch, progress: Progress) -> Progress:
    """``progress`` of a load that ends with the watch's error in a shortage."""

    def report(label: str, share: float) -> None:
        watch.check()
        progress(label, share)

    return report
