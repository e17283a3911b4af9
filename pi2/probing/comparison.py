"""Two device documents beside each other, figure by figure."""

from __future__ import annotations

from dataclasses import dataclass

from pi2.plan.documents.device import Device
from pi2.probing.figures import Measure, list_readings, write_value

TOLERANCE = 0.03
"""What equal figures may differ by even where no spread was found."""
WORST_LINES = 12
"""Figures that differ are listed once more at the end, the worst ones."""
DEVIATIONS = 2.0
"""How many standard deviations of the difference count as agreement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A figure of both documents."""

    label: str
    old: float
    new: float
    allowed: float
    """Difference that the spreads of both explain: of shares as it is, else a part of the value."""
    measure: Measure = "B/s"

    @property
    def change(self) -> float:
        """Difference of the new one from the old one: of shares as it is, else a part of it."""
        return self.new - self.old if self.measure == "share" else self.new / self.old - 1.0

    @property
    def agrees(self) -> bool:
        """Whether the spreads explain the difference."""
        return abs(self.change) <= self.allowed


def compare_devices(old: Device, new: Device) -> list[Row]:
    """Rows of the figures that both documents have."""
    before = {item.label: item for item in list_readings(old)}
    rows = []
    for after in list_readings(new):
        first = before.get(after.label)
        if first is None or (after.measure != "share" and min(first.value, after.value) <= 0):
            continue
        deviation = (first.spread**2 + after.spread**2) ** 0.5
        rows.append(
            Row(
                label=after.label,
                old=first.value,
                new=after.value,
                allowed=TOLERANCE + DEVIATIONS * deviation,
                measure=after.measure,
            )
        )
    return rows


def write_rows(rows: list[Row]) -> list[str]:
    """A line per figure, then what they mean together."""
    width = max((len(row.label) for row in rows), default=0)
    lines = [
        f"{row.label:{width}}  {write_value(row.old, row.measure):>11}  "
        f"{write_value(row.new, row.measure):>11}  {row.change:+7.1%}  "
        f"{'agrees' if row.agrees else 'DIFFERS'} (spreads explain {row.allowed:.1%})"
        for row in rows
    ]
    others = [row for row in rows if not row.agrees]
    lines.append(f"{len(rows) - len(others)} of {len(rows)} figures agree within their spreads")
    if others:
        lines.append(
            "the machine is noisy, or another one: "
            + ("this figure differs" if len(others) == 1 else f"these {len(others)} differ")
            + " by more than both spreads explain"
        )
        worst = sorted(others, key=lambda row: -abs(row.change))[:WORST_LINES]
        lines += [f"  {row.label}: {row.change:+.1%}" for row in worst]
        if len(others) > len(worst):
            lines.append(f"  and {len(others) - len(worst)} more")
    return lines
