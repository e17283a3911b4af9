"""Every figure of a device document that was measured, with a label, its unit and its spread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel

from pi2.plan.checking.figures import walk_figures
from pi2.plan.documents.device import (
    ComputeFigure,
    Device,
    KernelFigure,
    RateFigure,
    ReadFigure,
    ThreadsFigure,
)
from pi2.plan.documents.quantities import approximate_number, format_bytes

Measure = Literal["B/s", "s", "GOP/s", "share"]

_SCALES: dict[Measure, tuple[tuple[float, str], ...]] = {
    "B/s": ((1e9, "GB/s"), (1e6, "MB/s"), (1.0, "B/s")),
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")),
    "GOP/s": ((1.0, "GOP/s"),),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A figure and its spread."""

    label: str
    value: float
    spread: float
    """Standard deviation: of a share as it is, of anything else as a part of its value."""
    measure: Measure

    @property
    def text(self) -> str:
        """The figure's value for people."""
        return write_value(self.value, self.measure)


def list_readings(device: Device) -> Iterator[Reading]:
    """Everything that a second probe measures again."""
    for path, figure in walk_figures(device):
        found = _read_value(figure)
        if found is None:
            continue
        value, measure = found
        place = ".".join(part for part in path if isinstance(part, str))
        label = f"{place}{_describe_settings(figure)}"
        yield Reading(label=label, value=value, spread=figure.spread or 0.0, measure=measure)
        if isinstance(figure, ReadFigure) and figure.overlap is not None:
            yield Reading(
                label=f"{label}, hidden by computing",
                value=figure.overlap,
                spread=figure.overlap_spread or 0.0,
                measure="share",
            )
    storage = device.storage
    if storage.latency is not None:
        yield Reading(
            label="storage.latency",
            value=float(storage.latency),
            spread=storage.latency_spread or 0.0,
            measure="s",
        )


def write_value(value: float, measure: Measure) -> str:
    """Four digits with a unit; shares in percent."""
    if measure == "share":
        return f"{value:.0%}"
    scales = _SCALES[measure]
    size, unit = next((item for item in scales if abs(value) >= item[0]), scales[-1])
    return f"{approximate_number(value / size, 4)} {unit}"


def _read_value(figure: BaseModel) -> tuple[float, Measure] | None:
    match figure:
        case KernelFigure():
            return float(figure.time), "s"
        case ComputeFigure():
            return figure.giga_ops, "GOP/s"
        case ReadFigure():
            return float(figure.rate), "B/s"
        case RateFigure():
            return float(figure.value), "B/s"
        case _:
            return None


def _describe_settings(figure: BaseModel) -> str:
    match figure:
        case KernelFigure():
            width = "" if figure.width is None else f" width {figure.width}"
            types = "" if figure.kv == "fp16" else f" kv {figure.kv}"
            types += "" if figure.activations == "int16" else f" activations {figure.activations}"
            return f" {figure.kernel} {figure.size}{width}{types}"
        case ComputeFigure():
            return f" {figure.precision}"
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
            return " " + " ".join(parts)
        case ThreadsFigure():
            return f" threads {figure.threads}"
        case _:
            return ""
