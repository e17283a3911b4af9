"""Repeated measurements of one thing, and what is said of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pi2.progress import Progress

Key = tuple[str, ...]
"""What was measured: a kind, then its settings as text."""

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
    """Best quartile of times (``less``) or rates (``more``), else the median, rounded to four
    digits; spread 0 for a single measurement.

    Other work on the machine makes times longer and never shorter: the best quarter of the figures
    is what the machine does by itself, and no single lucky one.
    """
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
    """Round to four significant digits."""
    return float(f"{value:.{DIGITS}g}")


def collect_rounds(
    measures: Sequence[tuple[Key, Callable[[], float]]],
    rounds: int,
    progress: Progress,
    label: str,
) -> dict[Key, list[float]]:
    """Measure everything in turn, ``rounds`` times over.

    A machine whose speed drifts then shows it in the spread of every figure, instead of in the
    difference between two of them.
    """
    found: dict[Key, list[float]] = {key: [] for key, _ in measures}
    total = rounds * len(measures)
    for number in range(rounds):
        for place, (key, measure) in enumerate(measures):
            found[key].append(measure())
            progress(label, (number * len(measures) + place + 1) / total)
    return found
