"""A device's figures are plausible.

Why: predictions divide by them. A rate of zero has no meaning, and one that is a million times too
large or too small is a wrong unit or a slipped digit.

Example: ``rate = "0 MB/s"`` or ``frequency = "3.3 kHz"``.

Fix: correct the number or its unit; leave the figure out if nobody knows it.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from pi2.plan.checking.figures import walk_values
from pi2.plan.checking.findings import Facts, Finding
from pi2.plan.documents.device import (
    ComputeFigure,
    CpuCluster,
    KernelFigure,
    Memory,
    PowerFigure,
    RateFigure,
    ReadFigure,
    Storage,
)
from pi2.plan.documents.quantities import (
    HERTZ_UNITS,
    RATE_UNITS_OUT,
    SECOND_UNITS,
    WATT_UNITS,
    Units,
    approximate_number,
    format_bytes,
    format_quantity,
)

CODE = "P261"
SEVERITY = "error"
NEEDS = ("device",)

_Bounds = tuple[float, float, Units | None]
_LIMITS: tuple[tuple[type[BaseModel], str, _Bounds], ...] = (
    (RateFigure, "value", (1e6, 1e14, RATE_UNITS_OUT)),
    (ReadFigure, "rate", (1e3, 1e12, RATE_UNITS_OUT)),
    (ReadFigure, "block", (1, 2**30, None)),
    (ReadFigure, "range", (512, 2**50, None)),
    (PowerFigure, "value", (1e-3, 1e5, WATT_UNITS)),
    (ComputeFigure, "giga_ops", (1e-3, 1e8, None)),
    (KernelFigure, "time", (1e-9, 1e4, SECOND_UNITS)),
    (KernelFigure, "giga_ops", (1e-3, 1e8, None)),
    (KernelFigure, "bytes", (1, 2**50, None)),
    (CpuCluster, "frequency", (1e6, 1e11, HERTZ_UNITS)),
    (Memory, "capacity", (2**20, 2**50, None)),
    (Memory, "usable", (2**20, 2**50, None)),
    (Storage, "latency", (1e-9, 10.0, SECOND_UNITS)),
)
"""Least and most of a key, and its units; None for bytes and plain numbers."""


def check(facts: Facts) -> Iterator[Finding]:
    """Compare every figure with what machines have."""
    for path, item in walk_values(facts.device, ()):
        for kind, key, (least, most, units) in _LIMITS:
            if not isinstance(item, kind):
                continue
            value = getattr(item, key)
            if value is None or least <= value <= most:
                continue
            wanted = f"from {_write(least, key, units)} to {_write(most, key, units)}"
            yield Finding(
                document="device",
                path=(*path, key),
                message=f"no machine has {_write(value, key, units)} here: figures are {wanted}",
                help="correct the number or its unit, or leave the figure out: `pi2 probe` "
                "measures most of them",
            )


def _write(value: float, key: str, units: Units | None) -> str:
    if units is not None:
        return format_quantity(value, units)
    return approximate_number(value, 6) if key == "giga_ops" else format_bytes(int(value))
