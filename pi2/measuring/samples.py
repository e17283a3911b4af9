"""Figures of timed runs, and figures computed from them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Literal

import numpy as np

from pi2.arrays import I32
from pi2.engine.accounts import TokenBytes
from pi2.engine.statistics import RunStatistics

Kind = Literal["pp", "tg"]
"""``pp``: a prompt is processed; ``tg``: tokens are generated one by one."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One test, as in llama-bench: ``pp512``, ``tg64``, ``tg64 @ d512``."""

    kind: Kind
    tokens: int
    """Tokens that are timed."""
    depth: int
    """Tokens that are in the KV cache before the clock starts."""
    sequences: int | None = None
    """Sequences that generate at the same time; None: as many as the plan says."""

    @property
    def name(self) -> str:
        times = "" if self.sequences is None else f" x {self.sequences}"
        behind = f" @ d{self.depth}" if self.depth else ""
        return f"{self.kind}{self.tokens}{times}{behind}"

    @property
    def mean_position(self) -> float:
        return self.depth + (self.tokens + 1) / 2


def list_workloads(
    prompts: Sequence[int],
    answers: Sequence[int],
    depths: Sequence[int],
    sequences: Sequence[int | None] = (None,),
) -> list[Workload]:
    """All prompts, then all answers, at all depths and ``sequences``; lengths of 0 are left out."""
    return [
        *(Workload("pp", length, depth) for depth in depths for length in prompts if length),
        *(
            Workload("tg", length, depth, count)
            for depth in depths
            for length in answers
            if length
            for count in sequences
        ),
    ]


class TokenSource:
    """Endless tokens, equal for every program and new for the cache in each repetition."""

    def __init__(self, tokens: I32) -> None:
        assert len(tokens) > 0
        self._tokens = tokens
        self._place = 0

    @classmethod
    def walk_vocabulary(cls, vocab: int, without: Sequence[int] = ()) -> TokenSource:
        """The vocabulary in order without some tokens, starting behind bytes and marks."""
        tokens = np.setdiff1d(np.arange(vocab, dtype=np.int32), np.array(without, np.int32))
        return cls(np.roll(tokens, -min(1000, len(tokens) // 4)))

    def take(self, count: int) -> I32:
        """The next ``count`` tokens, int32 [count]."""
        places = (self._place + np.arange(count)) % len(self._tokens)
        self._place = (self._place + count) % len(self._tokens)
        return self._tokens[places]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    tokens: int
    seconds: float
    counters: RunStatistics | None = None
    """What the engine counted meanwhile, where it is ours."""
    busy_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of work of each unit but the sparse one, by its name."""

    @property
    def tokens_s(self) -> float:
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
    return reduce(add, counted) if counted else None


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
class Bandwidth:
    """Read bandwidth of the memory, measured between repetitions."""

    bytes_s: float
    """Bytes per second: median of the measurements."""
    threads: int
    method: str
    """Method of reading: a compiled kernel, or numpy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    description: Description
    workload: Workload
    samples: tuple[Sample, ...]
    peak_rss_bytes: int
    token_bytes: TokenBytes | None = None
    """None where it is not known, and for prompts, which are bound by arithmetic."""
    bandwidth: Bandwidth | None = None

    @property
    def speed(self) -> Speed:
        return summarise_speed(self.samples)

    @property
    def sequences(self) -> int:
        """Sequences whose tokens are counted together: prompts are read one after the other."""
        if self.workload.kind == "pp":
            return 1
        return self.workload.sequences or self.description.batch

    @property
    def counters(self) -> RunStatistics | None:
        return add_counters(self.samples)
