"""The course of a benchmark: load, warm up, repeat in turns, measure the limit in between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Protocol

from pi2.benchmarks.profile import Profile
from pi2.benchmarks.samples import (
    Bandwidth,
    Description,
    Row,
    Sample,
    TokenBytes,
    add_counters,
)
from pi2.benchmarks.workloads import Workload
from pi2.progress import Progress, ignore_progress


class Measured(Protocol):
    """What a session needs of a contestant (`pi2.benchmarks.contestant`)."""

    description: Description

    def run(self, workload: Workload) -> Sample: ...

    def profile(self, workload: Workload) -> Profile | None: ...

    def count_bytes(self, workload: Workload, active: float | None) -> TokenBytes | None: ...

    def read_peak_rss_bytes(self) -> int: ...


class Limit(Protocol):
    """What a session needs of `pi2.benchmarks.bandwidth`."""

    def measure(self) -> list[float]: ...

    def summarise(self, speeds: list[float]) -> Bandwidth: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A row, and where its time goes if that was asked for."""

    row: Row
    profile: Profile | None = None


@dataclass(slots=True)
class _Taken:
    samples: list[Sample] = field(default_factory=list)


def run_session(
    contestants: Sequence[Measured],
    workloads: Sequence[Workload],
    *,
    repetitions: int,
    limit: Limit,
    with_profile: bool = False,
    progress: Progress = ignore_progress,
) -> Iterator[Outcome]:
    """Measure every workload with every contestant, in turns: A B A B.  Workloads that follow each
    other and differ in the number of sequences only take turns, too.

    Machines grow slower and faster while a benchmark runs; in turns they do so for all alike.  The
    first run of each is a warm-up and not counted.  The bandwidth is measured before, after, and
    in the middle of the repetitions.
    """
    for _, alike in groupby(workloads, lambda workload: replace(workload, sequences=None)):
        turns = [(contestant, workload) for workload in alike for contestant in contestants]
        label, steps = f"measuring {turns[0][1].name}", repetitions + 1
        progress(label, 0.0)
        for contestant, workload in turns:
            contestant.run(workload)
        taken = [_Taken() for _ in turns]
        speeds = limit.measure()
        for repetition in range(repetitions):
            progress(label, (repetition + 1) / steps)
            for (contestant, workload), place in zip(turns, taken, strict=True):
                place.samples.append(contestant.run(workload))
            if repetition == repetitions // 2:
                speeds += limit.measure()
        speeds += limit.measure()
        progress(label, 1.0)
        bandwidth = limit.summarise(speeds)
        for (contestant, workload), place in zip(turns, taken, strict=True):
            yield Outcome(
                row=_make_row(contestant, workload, place.samples, bandwidth),
                profile=contestant.profile(workload) if with_profile else None,
            )


def _make_row(
    contestant: Measured, workload: Workload, samples: Sequence[Sample], bandwidth: Bandwidth
) -> Row:
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
