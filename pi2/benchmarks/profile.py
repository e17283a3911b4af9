"""Where a token's time goes: compiled kernels, waiting for reads and for other units, Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pi2.backends.observer import ExecutorObserver
from pi2.engine.share_observer import ShareObserver
from pi2.memory.observer import ReadObserver, WatchedRun

if TYPE_CHECKING:
    from pi2.engine.parts import Parts
    from pi2.memory.flash import PendingRead


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Seconds of one run, in the thread that drives it."""

    tokens: int
    total_s: float
    kernels_s: float
    """In compiled functions; in calls of the executor where it has none."""
    io_wait_s: float
    """Waiting for neurons to arrive."""
    unit_wait_s: float = 0.0
    """Waiting for units beside the executor."""
    calls: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Number and seconds of the calls that ``kernels_s`` is the sum of, by name."""

    @property
    def python_s(self) -> float:
        """Everything else: orchestration."""
        return self.total_s - self.kernels_s - self.io_wait_s - self.unit_wait_s


class KernelTimes(ExecutorObserver):
    """Adds up the time in an executor's kernels."""

    def __init__(self) -> None:
        self.calls: dict[str, tuple[int, float]] = {}

    def note_kernel(self, name: str, layer: int | None, start_s: float, end_s: float) -> None:
        """Count a call."""
        count, seconds = self.calls.get(name, (0, 0.0))
        self.calls[name] = (count + 1, seconds + end_s - start_s)


class ReadWaits(ReadObserver):
    """Adds up the time in which the engine waits for reads."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def note_wait(self, pending: PendingRead, number: int, start_s: float, end_s: float) -> None:
        """Count waiting for scattered reads."""
        self.seconds += end_s - start_s

    def note_run_wait(self, run: WatchedRun, start_s: float, end_s: float) -> None:
        """Count waiting for a long read."""
        self.seconds += end_s - start_s


class UnitWaits(ShareObserver):
    """Adds up the time in which the engine waits for units beside the executor."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def note_unit_wait(self, unit: str, layer: int | None, start_s: float, end_s: float) -> None:
        """Count waiting for a unit."""
        self.seconds += end_s - start_s


@dataclass(frozen=True, slots=True)
class Watches:
    """What observes a run that is profiled."""

    kernels: KernelTimes
    reads: ReadWaits
    units: UnitWaits

    def report(self, tokens: int, total_s: float) -> Profile:
        """The profile of what has run since they were made."""
        calls = dict(self.kernels.calls)
        return Profile(
            tokens=tokens,
            total_s=total_s,
            kernels_s=sum(seconds for _, seconds in calls.values()),
            io_wait_s=self.reads.seconds,
            unit_wait_s=self.units.seconds,
            calls=calls,
        )


@contextmanager
def watch_parts(parts: Parts) -> Iterator[Watches]:
    """Observe a loaded model's executor, its reader and the units beside it meanwhile."""
    watches = Watches(KernelTimes(), ReadWaits(), UnitWaits())
    with observe_parts(parts, watches.kernels, watches.reads, watches.units):
        yield watches


@contextmanager
def observe_parts(
    parts: Parts,
    executor_observer: ExecutorObserver,
    read_observer: ReadObserver,
    share_observer: ShareObserver | None = None,
) -> Iterator[None]:
    """Let a loaded model's executor, its reader and the units beside it be observed meanwhile.
    Only profiles and traces do it: other runs call what they always call."""
    if parts.whole is not None:
        try:
            parts.whole.observe(executor_observer)
            yield
        finally:
            parts.whole.observe(None)
        return
    shares = parts.feed_forward.shares
    try:
        parts.executor.observe(executor_observer)
        parts.reader.observe(read_observer)
        shares.observe(share_observer)
        yield
    finally:
        parts.executor.observe(None)
        parts.reader.observe(None)
        shares.observe(None)
