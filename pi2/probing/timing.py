"""A step of the engine, and how long a call of it takes."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pi2.diagnostics import UserError
from pi2.plan.documents.device import KernelName
from pi2.plan.documents.plan import ActivationType, KvType
from pi2.probing import tokens

Key = tuple[str, ...]
"""The measurement: a kind, then its settings as text."""

DIGITS = 4
"""Significant digits of a figure: more would be noise."""


AGREED = 0.05
"""The two best figures of a thing agree if they differ by no more than this part."""

Better = Literal["less", "more", "neither"]
"""What an undisturbed machine shows: less of a time, more of a rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What stands for the measurements, their relative standard deviation, and their number."""

    value: float
    spread: float
    samples: int


def summarise(values: Sequence[float], better: Better = "neither") -> Summary:
    """Best quartile of times (``less``) or rates (``more``), else the median, and the spread. Other
    work only slows the machine; the quartile avoids single lucky figures."""
    assert values, "nothing was measured"
    mean = statistics.fmean(values)
    spread = statistics.stdev(values) / mean if len(values) > 1 and mean else 0.0
    value = statistics.median(values)
    if better != "neither" and len(values) > 1:
        quartiles = statistics.quantiles(values, n=4, method="inclusive")
        value = quartiles[0] if better == "less" else quartiles[2]
    return Summary(value=round_digits(value), spread=round(spread, 4), samples=len(values))


def is_agreed(values: Sequence[float], better: Better) -> bool:
    """Whether the two best measurements agree: the machine was not disturbed in either."""
    if len(values) < 2:
        return False
    best, second = sorted(values, reverse=better == "more")[:2]
    return abs(best - second) <= AGREED * abs(best)


def round_digits(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def collect_rounds(
    measures: Sequence[tuple[Key, Callable[[], float]]], rounds: int
) -> dict[Key, list[float]]:
    """Measure everything in turn, ``rounds`` times: drift shows in every spread."""
    found: dict[Key, list[float]] = {key: [] for key, _ in measures}
    for _ in range(rounds):
        for key, measure in measures:
            found[key].append(measure())
    return found


MOST_CACHED = 20.0
"""Rate of a processor's nearest caches relative to its memory, at most."""
ROUND_S = 0.15
"""Time that a kernel is called for in a round; the round's figure is the median call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What a step reads and computes; sent between processes."""

    kernel: KernelName
    size: int
    read_bytes: int | None = None
    operations: float | None = None
    width: int = tokens.LARGE.width
    """Width of the model."""
    kv: KvType = "fp16"
    activations: ActivationType = "int16"

    @property
    def key(self) -> Key:
        return (self.kernel, str(self.size), str(self.width), self.kv, self.activations)


def keep_possible(step: StepFacts, times: Sequence[float], memory_bytes_s: float) -> list[float]:
    """Times of a step that memory of this rate allows; noise can make differences too small."""
    size = step.read_bytes or 0
    return [x for x in times if x > 0.0 and size / x <= MOST_CACHED * memory_bytes_s]


def choose_times(
    steps: Sequence[StepFacts], step_s: Mapping[Key, Sequence[float]], memory_bytes_s: float
) -> dict[Key, list[float]]:
    """Possible times of each step; UserError P343 if there is none, except for waking threads."""
    found = {step.key: keep_possible(step, step_s[step.key], memory_bytes_s) for step in steps}
    unclear = [step for step in steps if not found[step.key] and step.kernel != "wake"]
    if unclear:
        names = ", ".join(f"{step.kernel} {step.size}" for step in unclear)
        raise UserError.of(
            "P343",
            f"no possible time was measured of {names}: the machine does other work",
            help="end other programs and measure again",
        )
    return {key: times for key, times in found.items() if times}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(StepFacts):
    run: Callable[[int], float | None]
    """The timed calls; it may say itself how many seconds count."""
    base: Callable[[int], float | None] | None = None
    """Call whose time is subtracted: only the step's addition is measured."""
    stir: Callable[[int], None] | None = None
    """Runs before every call, untimed: it leaves the caches as other steps of a token do."""


def make_timer(step: Step) -> Callable[[], float]:
    """What measures a step: the median of one round's calls, in seconds."""

    def measure() -> float:
        taken = _time_calls(step.run, step.stir)
        return taken if step.base is None else max(taken - _time_calls(step.base, step.stir), 0.0)

    return measure


def _time_calls(
    run: Callable[[int], float | None], stir: Callable[[int], None] | None = None
) -> float:
    """Median seconds of a call; the first ones make ready and do not count."""
    for index in range(2):
        if stir is not None:
            stir(index)
        run(index)
    times: list[float] = []
    end = time.perf_counter() + ROUND_S
    index = 2
    while len(times) < 5 or time.perf_counter() < end:
        if stir is not None:
            stir(index)
        start = time.perf_counter()
        own_s = run(index)
        times.append(time.perf_counter() - start if own_s is None else own_s)
        index += 1
    return statistics.median(times)
