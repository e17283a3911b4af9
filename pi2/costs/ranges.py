"""How far speeds are from the expected one: a range's ends are predictions with all rates low, or
high, as they are apart on devices of a class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pi2.plan.documents.quantities import approximate_number

Side = Literal["low", "high"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Factors of an expected rate."""

    low: float = 1.0
    high: float = 1.0

    @classmethod
    def around(cls, factor: float) -> Spread:
        return cls(low=1.0 / factor, high=factor)

    def find(self, side: Side) -> float:
        return self.low if side == "low" else self.high

    def invert(self) -> Spread:
        """Of times instead of rates."""
        return Spread(low=1.0 / self.high, high=1.0 / self.low)

    def widen(self, other: Spread) -> Spread:
        return Spread(low=min(self.low, other.low), high=max(self.high, other.high))


CERTAIN = Spread()


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Tokens per second: the least that a plan promises, the expected ones, and the most."""

    low: float
    expected: float
    high: float

    def write(self) -> str:
        """``"7.1 - 9.8 - 12"``, or one number if all are written alike."""
        ends = dict.fromkeys(map(approximate_number, (self.low, self.expected, self.high)))
        return " - ".join(ends)

    def describe(self) -> dict[str, Any]:
        return {key: round(getattr(self, key), 4) for key in ("low", "expected", "high")}
