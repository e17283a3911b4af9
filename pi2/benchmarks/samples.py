"""Figures of timed runs, and what is computed from them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any

from pi2.benchmarks.workloads import Workload
from pi2.engine.statistics import RunStatistics, divide


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One timed repetition."""

    tokens: int
    seconds: float
    counters: RunStatistics | None = None
    """What the engine counted meanwhile, where it is ours."""
    busy_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that each unit beside the sparse one has worked meanwhile, by its name."""

    @property
    def tokens_s(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Tokens per second over repetitions."""

    mean: float
    deviation: float
    """Sample standard deviation; 0 for a single repetition."""
    median: float
    repetitions: int


def summarise_speed(samples: Sequence[Sample]) -> Speed:
    """Mean, deviation and median of the repetitions' speeds."""
    speeds = [sample.tokens_s for sample in samples]
    return Speed(
        mean=statistics.fmean(speeds),
        deviation=statistics.stdev(speeds) if len(speeds) > 1 else 0.0,
        median=statistics.median(speeds),
        repetitions=len(speeds),
    )


def add_counters(samples: Sequence[Sample]) -> RunStatistics | None:
    """Counters of all repetitions together; None where nothing is counted."""
    counted = [sample.counters for sample in samples if sample.counters is not None]
    if not counted:
        return None
    names = RunStatistics.__dataclass_fields__
    values: dict[str, list[Any]] = {
        name: [getattr(item, name) for item in counted] for name in names
    }
    together: dict[str, Any] = {
        name: None if None in found else reduce(add, found)  # None: nobody counts it
        for name, found in values.items()
    }
    return RunStatistics(**together)


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a program says about itself when it is ready."""

    engine: str
    """Name and version of the engine."""
    model: str
    """Short name of the model."""
    backend: str
    threads: int
    synthetic: bool
    """Whether weights are random: the figures then say nothing about text."""
    predictor: str | None = None
    batch: int = 1
    """Sequences that generate at the same time; their tokens are counted together."""
    plan: str | None = None
    """Path of the plan."""
    digest: str | None = None
    """Digest of the plan."""
    budget_bytes: int | None = None
    """Highest resident set that the plan allows."""
    load_s: float | None = None
    notes: tuple[str, ...] = ()
    """What a reader of the figures has to know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBytes:
    """Bytes that one token must read from memory, by what they are for."""

    attention: float
    """Projections and norms of all layers, and a row of the embedding."""
    head: float
    predictor: float
    """Bytes of low-rank predictors, or of all gate rows."""
    neurons: float
    """Bundles of the active neurons, padding left out."""
    kv: float
    """Bytes of the keys and values of the context."""

    @property
    def total(self) -> float:
        """Bytes of all parts together."""
        return self.attention + self.head + self.predictor + self.neurons + self.kv


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Read bandwidth of the memory, measured between repetitions."""

    bytes_s: float
    """Bytes per second: median of the measurements."""
    threads: int
    method: str
    """Method of reading: a compiled kernel, or numpy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table."""

    description: Description
    workload: Workload
    samples: tuple[Sample, ...]
    peak_rss_bytes: int
    token_bytes: TokenBytes | None = None
    """None where it is not known, and for prompts, which are bound by arithmetic."""
    bandwidth: Bandwidth | None = None

    @property
    def speed(self) -> Speed:
        """Tokens per second."""
        return summarise_speed(self.samples)

    @property
    def sequences(self) -> int:
        """Sequences whose tokens are counted together: prompts are read one after the other."""
        if self.workload.kind == "pp":
            return 1
        return self.workload.sequences or self.description.batch

    @property
    def counters(self) -> RunStatistics | None:
        """Counters of all repetitions."""
        return add_counters(self.samples)

    @property
    def total_bytes(self) -> float | None:
        """Bytes that a token must read."""
        return None if self.token_bytes is None else self.token_bytes.total

    @property
    def used_bytes_s(self) -> float | None:
        """Bytes per second that tokens must read, at the median speed."""
        return None if self.total_bytes is None else self.total_bytes * self.speed.median

    @property
    def limit_bytes_s(self) -> float | None:
        """Bytes per second that the memory gives."""
        return None if self.bandwidth is None else self.bandwidth.bytes_s

    @property
    def limit_share(self) -> float | None:
        """Share of the read bandwidth that tokens use."""
        if self.used_bytes_s is None or self.limit_bytes_s is None:
            return None
        return divide(self.used_bytes_s, self.limit_bytes_s)

    @property
    def busy_shares(self) -> dict[str, float]:
        """Share of the measured time in which each unit beside the sparse one has worked."""
        total_s = sum(sample.seconds for sample in self.samples)
        names = dict.fromkeys(name for sample in self.samples for name in sample.busy_s)
        return {
            name: sum(sample.busy_s.get(name, 0.0) for sample in self.samples) / total_s
            for name in names
        }

    @property
    def active_share(self) -> float | None:
        """Share of neurons with a non-zero activation."""
        return None if self.counters is None else self.counters.active_share

    @property
    def predicted_share(self) -> float | None:
        """Share of neurons that were computed because a predictor named them."""
        return None if self.counters is None else self.counters.predicted_share

    @property
    def hit_rate(self) -> float | None:
        """Share of those that were in memory."""
        return None if self.counters is None else self.counters.hit_rate

    @property
    def flash_bytes_token(self) -> float | None:
        """Bytes read from flash per token."""
        counters = self.counters
        if counters is None:
            return None
        return counters.flash_read_bytes / sum(sample.tokens for sample in self.samples)
