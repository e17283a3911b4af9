"""Repeated measurements of one thing, and what is said of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pi2.progress import Progress

Key = tuple[str, ...]
"""What was measured: a kind, then its settings as text."""

DIGITS = 4
"""Significant digits of a figure: more would be noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Median of the measurements, their relative standard deviation, and their number."""

    value: float
    spread: float
    samples: int


def summarise(values: Sequence[float]) -> Summary:
    """Median, rounded to four digits; spread 0 for a single measurement."""
    assert values, "nothing was measured"
    mean = statistics.fmean(values)
    spread = statistics.stdev(values) / mean if len(values) > 1 and mean else 0.0
    return Summary(
        value=round_digits(statistics.median(values)), spread=round(spread, 4), samples=len(values)
    )


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
