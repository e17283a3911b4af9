"""How far stored weights are from those of the checkpoint."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np

from pi2.arrays import F32
from pi2.plan.weights.layout import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorError:
    """The error of one tensor of the checkpoint."""

    tensor: str
    precision: Precision
    relative: float
    """Root of the squared errors' sum, by that of the weights."""
    largest: float
    """Largest error of a weight."""


@dataclass(slots=True)
class _Sums:
    precision: Precision
    wrong: float = 0.0
    size: float = 0.0
    largest: float = 0.0


@dataclass(slots=True)
class ErrorReport:
    """Adds up errors piece by piece, from several threads."""

    _sums: dict[str, _Sums] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(
        self,
        tensor: str,
        rows: F32,
        stored: F32,
        precision: Precision,
    ) -> None:
        """Compare ``rows`` [n, length] of ``tensor`` with what is ``stored`` of them."""
        wrong = stored - rows
        sums = (float(np.vdot(wrong, wrong)), float(np.vdot(rows, rows)))
        largest = float(np.abs(wrong).max(initial=0))
        with self._lock:
            known = self._sums.setdefault(tensor, _Sums(precision))
            known.wrong += sums[0]
            known.size += sums[1]
            known.largest = max(known.largest, largest)

    def list_errors(self) -> list[TensorError]:
        """All tensors, by name."""
        return [
            TensorError(
                tensor=name,
                precision=sums.precision,
                relative=float(np.sqrt(sums.wrong / sums.size)) if sums.size else 0.0,
                largest=sums.largest,
            )
            for name, sums in sorted(self._sums.items())
        ]
