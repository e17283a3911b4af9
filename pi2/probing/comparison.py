"""Two device documents beside each other, figure by figure."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel

from pi2.plan.device import (
    ComputeFigure,
    Device,
    KernelFigure,
    RateFigure,
    ReadFigure,
    ThreadsFigure,
)
from pi2.plan.figures import walk_figures
from pi2.plan.quantities import format_bytes

TOLERANCE = 0.03
"""What equal figures may differ by even where no spread was found."""
DEVIATIONS = 2.0
"""How many standard deviations of the difference count as agreement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A figure of both documents."""

    label: str
    old: float
    new: float
    allowed: float
    """Relative difference that the spreads of both explain."""

    @property
    def change(self) -> float:
        """Relative difference, of the new one from the old one."""
        return self.new / self.old - 1.0

    @property
    def agrees(self) -> bool:
        """Whether the spreads explain the difference."""
        return abs(self.change) <= self.allowed


def compare_devices(old: Device, new: Device) -> list[Row]:
    """Rows of the figures that both documents have."""
    before, after = dict(_list_figures(old)), dict(_list_figures(new))
    rows = []
    for label, (value, spread) in after.items():
        if label in before and before[label][0] > 0 and value > 0:
            old_value, old_spread = before[label]
            deviation = (spread**2 + old_spread**2) ** 0.5
            rows.append(
                Row(
                    label=label,
                    old=old_value,
                    new=value,
                    allowed=TOLERANCE + DEVIATIONS * deviation,
                )
            )
    return rows


def write_rows(rows: list[Row]) -> list[str]:
    """A line per figure, then what they mean together."""
    width = max((len(row.label) for row in rows), default=0)
    lines = [
        f"{row.label:{width}}  {row.old:>10.4g}  {row.new:>10.4g}  {row.change:+7.1%}  "
        + ("agrees" if row.agrees else f"differs (spreads explain {row.allowed:.1%})")
        for row in rows
    ]
    same = sum(row.agrees for row in rows)
    lines.append(f"{same} of {len(rows)} figures agree within their spreads")
    return lines


def _list_figures(device: Device) -> list[tuple[str, tuple[float, float]]]:
    """Labels, values and spreads of what can be compared."""
    found = []
    for path, figure in walk_figures(device):
        value = _read_value(figure)
        if value is not None:
            place = ".".join(part for part in path if isinstance(part, str))
            label = f"{place}{_describe_settings(figure)}"
            found.append((label, (value, figure.spread or 0.0)))
    return found


def _read_value(figure: BaseModel) -> float | None:
    match figure:
        case KernelFigure():
            return float(figure.time)
        case ComputeFigure():
            return figure.giga_ops
        case ReadFigure():
            return float(figure.rate)
        case RateFigure():
            return float(figure.value)
        case _:
            return None


def _describe_settings(figure: BaseModel) -> str:
    match figure:
        case KernelFigure():
            width = "" if figure.width is None else f" width {figure.width}"
            return f" {figure.kernel} {figure.size}{width} (s)"
        case ComputeFigure():
            return f" {figure.precision} (GOP/s)"
        case ReadFigure():
            parts = [figure.pattern, format_bytes(figure.block)]
            if figure.range is not None:
                parts.append(f"within {format_bytes(figure.range)}")
            if figure.depth is not None:
                parts.append(f"depth {figure.depth}")
            if figure.threads is not None:
                parts.append(f"threads {figure.threads}")
            if figure.burst is not None:
                parts.append(f"{figure.burst} at a time")
            return " " + " ".join(parts) + " (B/s)"
        case ThreadsFigure():
            return f" threads {figure.threads} (B/s)"
        case _:
            return " (B/s)"
