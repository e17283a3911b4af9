"""What a calibration has found so far, in a file: the same command goes on after an interrupt."""

from __future__ import annotations

import hashlib
import io
import json
import time
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pi2.evaluation.scores import Scores
from pi2.sharing.files import write_atomically
from pi2.sparsity.magnitudes import Histogram, LayerMagnitudes

FORMAT = 1
PAUSE_S = 20.0
"""Time between two writes while windows are counted."""
_PARTS = ("gates", "both", "energy")


@dataclass(slots=True)
class KeptFindings:
    """Histograms, and scores of the dense model and of every target that was tried."""

    file: Path | None
    """None keeps nothing."""
    asked: tuple[object, ...]
    """What the findings depend on, beside the plan."""
    _arrays: dict[str, Any] = field(default_factory=dict)
    _key: str = ""
    _written_s: float = field(default_factory=time.monotonic)

    def restore(self, digest: str, layers: dict[int, LayerMagnitudes]) -> int:
        """Fill ``layers`` with what was counted for the plan with the ``digest``; returns how many
        windows that were: none of other plans, texts or settings."""
        text = json.dumps([FORMAT, digest, *self.asked], default=str)
        self._key = hashlib.sha256(text.encode()).hexdigest()
        if self.file is None:
            return 0
        try:
            with np.load(self.file, allow_pickle=False) as found:
                if str(found["key"]) != self._key:
                    return 0
                self._arrays = {name: found[name] for name in found.files}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return 0
        for name in self._arrays:
            kind, _, number = name.partition(".")
            if kind != "tokens":
                continue
            counts = [int(count) for count in self._arrays[name]]
            layers[int(number)] = LayerMagnitudes(
                [
                    Histogram(*(self._arrays[f"{part}.{number}.{expert}"] for part in _PARTS))
                    for expert in range(len(counts))
                ],
                counts,
            )
        return int(self._arrays["windows"])

    def note_windows(
        self, count: int, layers: dict[int, LayerMagnitudes], *, is_last: bool
    ) -> None:
        """Keep what ``count`` windows have shown; not each time, for it takes a moment."""
        if not is_last and time.monotonic() - self._written_s < PAUSE_S:
            return
        self._arrays["windows"] = np.asarray(count)
        for number, layer in layers.items():
            self._arrays[f"tokens.{number}"] = np.asarray(layer.tokens, np.int64)
            for expert, histogram in enumerate(layer.experts):
                for part in _PARTS:
                    self._arrays[f"{part}.{number}.{expert}"] = getattr(histogram, part)
        self._write()

    def find_scores(self, name: str) -> Scores | None:
        """Scores that were kept under ``name``."""
        losses = self._arrays.get(f"losses.{name}")
        return None if losses is None else Scores(losses, self._arrays[f"choices.{name}"])

    def find_figures(self, name: str) -> tuple[float, ...]:
        """Figures that were kept beside them."""
        return tuple(float(item) for item in self._arrays[f"figures.{name}"])

    def note_scores(self, name: str, scores: Scores, figures: tuple[float, ...] = ()) -> None:
        """Keep scores, and figures beside them."""
        self._arrays |= {
            f"losses.{name}": scores.losses,
            f"choices.{name}": scores.choices,
            f"figures.{name}": np.asarray(figures, np.float64),
        }
        self._write()

    def drop(self) -> None:
        """Remove the file: everything is done."""
        if self.file is not None:
            self.file.unlink(missing_ok=True)

    def _write(self) -> None:
        if self.file is None:
            return
        content = io.BytesIO()
        np.savez_compressed(content, key=np.asarray(self._key), **self._without_key())
        write_atomically(self.file, content.getvalue())
        self._written_s = time.monotonic()

    def _without_key(self) -> dict[str, Any]:
        return {name: array for name, array in self._arrays.items() if name != "key"}
