"""The course of a benchmark: load, warm up, repeat in turns, measure the limit in between."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Protocol

from pi2.diagnostics import UserError
from pi2.machine import detect_memory
from pi2.measuring.contestant import BUFFER_BYTES, BandwidthLimit, Profile, Recipe, RemoteContestant
from pi2.measuring.contestants import PlanRecipe
from pi2.measuring.samples import (
    Bandwidth,
    Description,
    Row,
    Sample,
    TokenBytes,
    Workload,
    add_counters,
)
from pi2.progress import Progress, ignore_progress
from pi2.refit import FittedPlan


class Measured(Protocol):
    """What a session needs of a contestant (`pi2.measuring.contestant`)."""

    description: Description

    def run(self, workload: Workload) -> Sample: ...

    def profile(self, workload: Workload) -> Profile | None: ...

    def count_bytes(self, workload: Workload, active: float | None) -> TokenBytes | None: ...

    def read_peak_rss_bytes(self) -> int: ...


class Limit(Protocol):
    """What a session needs of `pi2.measuring.contestant`."""

    def measure(self) -> list[float]: ...

    def summarise(self, speeds: list[float]) -> Bandwidth: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A row, and where its time goes if that was asked for."""

    row: Row
    profile: Profile | None = None


NoteLost = Callable[[UserError], None]
"""Is told why a program that others are compared with has ended."""


@dataclass(slots=True)
class _Turn:
    contestant: Measured
    workload: Workload
    samples: list[Sample] = field(default_factory=list)


class _Turns:
    """Contestants that are left: errors of the first are raised, others that fail drop out."""

    def __init__(self, contestants: Sequence[Measured], note_lost: NoteLost) -> None:
        self.left = list(contestants)
        self._first = contestants[0]
        self._note_lost = note_lost

    def run(self, turn: _Turn) -> None:
        """Run a turn, unless its contestant was lost."""
        if turn.contestant not in self.left:
            return
        try:
            turn.samples.append(turn.contestant.run(turn.workload))
        except UserError as error:
            if turn.contestant is self._first:
                raise
            self.left.remove(turn.contestant)
            self._note_lost(error)


def run_session(
    contestants: Sequence[Measured],
    workloads: Sequence[Workload],
    *,
    repetitions: int,
    limit: Limit,
    with_profile: bool = False,
    progress: Progress = ignore_progress,
    note_lost: NoteLost = lambda error: None,
) -> Iterator[Outcome]:
    """Measure workloads with all contestants in turns, after a warm-up, and the bandwidth in
    between. A later contestant that raises `UserError` drops out, and ``note_lost`` is told."""
    course = _Turns(contestants, note_lost)
    for _, alike in groupby(workloads, lambda workload: replace(workload, sequences=None)):
        turns = [_Turn(contestant, workload) for workload in alike for contestant in course.left]
        label, steps = f"measuring {turns[0].workload.name}", repetitions + 1
        progress(label, 0.0)
        for turn in turns:
            course.run(turn)
            turn.samples.clear()
        speeds = limit.measure()
        for repetition in range(repetitions):
            progress(label, (repetition + 1) / steps)
            for turn in turns:
                course.run(turn)
            if repetition == repetitions // 2:
                speeds += limit.measure()
        speeds += limit.measure()
        progress(label, 1.0)
        bandwidth = limit.summarise(speeds)
        for turn in turns:
            if turn.contestant not in course.left:
                continue
            yield Outcome(
                row=_make_row(turn, bandwidth),
                profile=turn.contestant.profile(turn.workload) if with_profile else None,
            )


def _make_row(turn: _Turn, bandwidth: Bandwidth) -> Row:
    contestant, workload, samples = turn.contestant, turn.workload, turn.samples
    counters = add_counters(samples)
    active = None if counters is None else counters.active_share
    return Row(
        description=contestant.description,
        workload=workload,
        samples=tuple(samples),
        peak_rss_bytes=contestant.read_peak_rss_bytes(),
        token_bytes=contestant.count_bytes(workload, active),
        bandwidth=bandwidth,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Workloads and settings of a measurement."""

    workloads: Sequence[Workload]
    repetitions: int
    with_profile: bool = False
    text: str | None = None
    """Tokens are taken from it; without, from the vocabulary in order."""


_LEAST_BUFFER_BYTES = 64 << 20
_BUFFER_PART = 8


def _choose_buffer_bytes() -> int:
    """Bytes that the bandwidth is measured with: a small part of the free memory, which plans need,
    but more than most caches."""
    most = detect_memory().available_bytes // _BUFFER_PART
    return min(BUFFER_BYTES, max(_LEAST_BUFFER_BYTES, most))


def measure_plan(
    found: FittedPlan,
    course: Course,
    *,
    others: Callable[[Description], Sequence[Recipe]] = lambda description: (),
    progress: Progress = ignore_progress,
    note_lost: NoteLost = lambda error: None,
) -> list[Outcome]:
    """Measure ``course`` with a plan; UserError P641, P642. ``others`` make other engines, given
    the plan's description; ``note_lost`` is told if one fails (P640, P652)."""
    path, overrides = found.resolved.path, dict(found.overrides)
    with ExitStack() as stack:
        recipe = PlanRecipe(path=path, overrides=overrides, text=course.text)
        contestants = [stack.enter_context(RemoteContestant(recipe, progress, "pi2"))]
        described = contestants[0].description
        for other in others(described):
            try:
                remote = RemoteContestant(other, progress, "the other engine")
            except UserError as error:
                if error.diagnostics[0].code not in ("P640", "P652"):
                    raise
                note_lost(error)
            else:
                contestants.append(stack.enter_context(remote))
        size = _choose_buffer_bytes()
        limit = stack.enter_context(BandwidthLimit(described.threads, size_bytes=size))
        return list(
            run_session(
                contestants,
                course.workloads,
                repetitions=course.repetitions,
                limit=limit,
                with_profile=course.with_profile,
                progress=progress,
                note_lost=note_lost,
            )
        )
