"""Histograms of a layer's magnitudes, the thresholds that follow from them, and a file that keeps
them while a calibration goes on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pi2.arrays import F32, F64, I64, U8
from pi2.backends.protocol import BuildRequest
from pi2.backends.reference.neurons import activate, multiply_inputs
from pi2.engine.layer_model import Routing
from pi2.measuring.texts import Scores, Unfinished
from pi2.plan.documents.plan_units import SparsityMethod
from pi2.plan.reading.thresholds import LayerThresholds

_FINE_SHIFT = 17
"""Bits of a float32 below its sign, exponent and the first 6 of its mantissa."""
_FINE_BINS = 1 << (31 - _FINE_SHIFT)
_COARSE_SHIFT = 20
_COARSE_FIRST = (127 - 20) << 3
"""First bin of the coarse histogram: it includes magnitudes below 2^-20."""
_COARSE_BINS = 32 << 3
FEWEST_TOKENS = 32
"""Fewest tokens of an expert that give it its own thresholds."""


def compute_magnitudes(request: BuildRequest, inputs: F32, bundles: U8, cutoffs: F32 | None) -> F32:
    """|act(gate)| and act(gate) * up [2, T, n] of ``bundles`` [n, .] for ``inputs`` [T, hidden] and
    ``cutoffs`` [T, 1]; without gates, up twice."""
    layout = request.whole_bundle
    values = multiply_inputs(layout, inputs, bundles)
    gate = activate(request.model, values[0], None, cutoffs)
    product = gate * values[1] if layout.is_gated else gate
    return np.asarray(np.abs(np.stack([gate, product])))


@dataclass(slots=True)
class Histogram:
    """What a layer's neurons did on the tokens so far."""

    gates: I64
    """Histogram of neurons by |act(gate)| [fine bins]."""
    both: I64
    """Neurons by |act(gate)| and |act(gate) * up| [coarse bins, coarse bins]; [0, 0] for CATS."""
    energy: F64
    """Sum of squares of the latter in the same bins."""

    @classmethod
    def make(cls, method: SparsityMethod) -> Histogram:
        bins = 0 if method == "cats" else _COARSE_BINS
        return cls(
            gates=np.zeros(_FINE_BINS, np.int64),
            both=np.zeros((bins, bins), np.int64),
            energy=np.zeros((bins, bins), np.float64),
        )

    def add(self, magnitudes: F32) -> None:
        """Count |act(gate)| and |act(gate) * up| [2, ...]."""
        gates, values = magnitudes.reshape(2, -1)
        bits = np.ascontiguousarray(gates, np.float32).view(np.uint32)
        self.gates += np.bincount(bits >> _FINE_SHIFT, minlength=_FINE_BINS)
        if not len(self.both):
            return
        rows, columns = (_find_coarse(item) for item in (gates, values))
        cells = rows * _COARSE_BINS + columns
        size = _COARSE_BINS * _COARSE_BINS
        self.both += np.bincount(cells, minlength=size).reshape(self.both.shape)
        squares = np.square(values, dtype=np.float64)
        self.energy += np.bincount(cells, squares, size).reshape(self.both.shape)

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram(
            gates=self.gates + other.gates,
            both=self.both + other.both,
            energy=self.energy + other.energy,
        )

    def choose(self, target: float) -> LayerThresholds:
        """Thresholds that leave out ``target`` of what up and down hold."""
        if not len(self.both):
            return self._choose_gate(target)
        return self._choose_both(target)

    def _choose_gate(self, target: float) -> LayerThresholds:
        sums = np.cumsum(self.gates)
        wanted = target * int(sums[-1])
        place = int(np.searchsorted(sums, wanted))
        before = int(sums[place]) - int(self.gates[place])
        part = (wanted - before) / max(1, int(self.gates[place]))
        low, high = _find_fine_edge(place), _find_fine_edge(place + 1)
        kept = round(1.0 - target, 6)
        return LayerThresholds(gate=_shorten(low + part * (high - low)), computed=kept, active=kept)

    def _choose_both(self, target: float) -> LayerThresholds:
        """CATS and TEAL: thresholds that leave out ``target`` and lose the least energy."""
        total = int(self.both.sum())
        # Neurons below each edge of gates, and the energy that goes with them.
        closed = np.concatenate([[0], np.cumsum(self.both.sum(axis=1))]) / total
        lost = np.concatenate([[0.0], np.cumsum(self.energy.sum(axis=1))])
        # Of the neurons above each edge, those in every bin of values.
        kept = np.cumsum(np.vstack([self.both, np.zeros(_COARSE_BINS)])[::-1], axis=0)[::-1]
        worth = np.cumsum(np.vstack([self.energy, np.zeros(_COARSE_BINS)])[::-1], axis=0)[::-1]
        best: tuple[float, int, float, float] | None = None
        for edge, share in enumerate(closed):
            dropped = 2 * target - share
            if share > target or dropped > 1.0:
                continue
            counts = np.cumsum(kept[edge])
            wanted = (dropped - share) * total
            place = min(int(np.searchsorted(counts, wanted)), _COARSE_BINS - 1)
            own = kept[edge][place]
            part = (wanted - (counts[place] - own)) / own if own else 0.0
            cost = lost[edge] + worth[edge][:place].sum() + part * worth[edge][place]
            low, high = _find_coarse_edge(place), _find_coarse_edge(place + 1)
            if best is None or cost < best[0]:
                best = (cost, edge, low + part * (high - low), dropped)
        if best is None:  # all gates in a bin or two
            return self._choose_gate(target)
        _, edge, down, dropped = best
        return LayerThresholds(
            gate=_shorten(_find_coarse_edge(edge)),
            down=_shorten(down),
            computed=round(1.0 - float(closed[edge]), 6),
            active=round(1.0 - dropped, 6),
        )


@dataclass(slots=True)
class LayerMagnitudes:
    experts: list[Histogram]
    """Histogram of each expert; one without experts."""
    tokens: list[int]
    """Number of tokens that each expert has computed."""

    def choose(self, target: float) -> LayerThresholds:
        """Thresholds that leave out ``target``, by expert; rarely used experts take the layer's."""
        whole = sum(self.experts[1:], self.experts[0]).choose(target)
        if len(self.experts) == 1:
            return whole
        own = [
            histogram.choose(target).gate if tokens >= FEWEST_TOKENS else whole.gate
            for histogram, tokens in zip(self.experts, self.tokens, strict=True)
        ]
        return whole.model_copy(update={"experts": tuple(own)})


class MagnitudeObserver:
    """An observer of FFNs (`pi2.engine.layer_model`) that fills histograms of each layer."""

    def __init__(self, method: SparsityMethod) -> None:
        self._method = method
        self.layers: dict[int, LayerMagnitudes] = {}

    def __call__(
        self, layer: int, inputs: F32, magnitudes: F32, routing: Routing | None = None
    ) -> None:
        if layer not in self.layers:
            count = 1 if routing is None else routing.computes.shape[1]
            histograms = [Histogram.make(self._method) for _ in range(count)]
            self.layers[layer] = LayerMagnitudes(histograms, [0] * count)
        found = self.layers[layer]
        for expert, histogram in enumerate(found.experts):
            values = magnitudes
            if routing is not None:
                values = magnitudes[:, routing.computes[:, expert]]
                values = values[:, :, routing.owners == expert]
            found.tokens[expert] += values.shape[1]
            histogram.add(values)


def _find_coarse(magnitudes: F32) -> I64:
    bits = np.ascontiguousarray(magnitudes, np.float32).view(np.uint32) >> _COARSE_SHIFT
    places = bits.astype(np.int64) - _COARSE_FIRST
    return np.asarray(np.clip(places, 0, _COARSE_BINS - 1))


def _find_coarse_edge(place: int) -> float:
    """Lower end of a coarse bin; the first begins at 0."""
    if place == 0:
        return 0.0
    bits = np.uint32((place + _COARSE_FIRST) << _COARSE_SHIFT)
    return float(bits.view(np.float32))


def _find_fine_edge(place: int) -> float:
    return float(np.uint32(place << _FINE_SHIFT).view(np.float32))


def _shorten(value: float) -> float:
    return float(f"{value:.6g}")


FORMAT = 2
_PARTS = ("gates", "both", "energy")


class KeptFindings(Unfinished):
    """Histograms, and scores of the dense model and of every target that was tried."""

    def __init__(self, file: Path | None, asked: tuple[object, ...]) -> None:
        """``asked``: everything that the findings depend on, except the plan."""
        super().__init__(file)
        self._asked = asked

    def restore(self, digest: str, layers: dict[int, LayerMagnitudes]) -> int:
        """Fill ``layers`` with counts of the same plan and texts; return their windows."""
        text = json.dumps([FORMAT, digest, *self._asked], default=str)
        windows = self.begin(hashlib.sha256(text.encode()).hexdigest())
        for name in self.arrays:
            kind, _, number = name.partition(".")
            if kind != "tokens":
                continue
            counts = self.arrays[name].tolist()
            layers[int(number)] = LayerMagnitudes(
                [
                    Histogram(*(self.arrays[f"{part}.{number}.{expert}"] for part in _PARTS))
                    for expert in range(len(counts))
                ],
                counts,
            )
        return windows

    def find_scores(self, name: str) -> tuple[Scores, tuple[float, ...]] | None:
        """Scores and figures that were kept under ``name``."""
        if f"losses.{name}" not in self.arrays:
            return None
        losses, choices, figures = (
            self.arrays[f"{part}.{name}"] for part in ("losses", "choices", "figures")
        )
        return Scores(losses, choices), tuple(figures.tolist())

    def note_scores(self, name: str, scores: Scores, figures: tuple[float, ...] = ()) -> None:
        found = {"losses": scores.losses, "choices": scores.choices}
        found["figures"] = np.asarray(figures, np.float64)
        self.keep({f"{part}.{name}": values for part, values in found.items()})


def list_arrays(layers: dict[int, LayerMagnitudes]) -> dict[str, Any]:
    """Arrays of histograms by part, layer and expert, and numbers of tokens by layer."""
    found: dict[str, Any] = {}
    for number, layer in layers.items():
        found[f"tokens.{number}"] = np.asarray(layer.tokens, np.int64)
        for expert, histogram in enumerate(layer.experts):
            found |= {f"{part}.{number}.{expert}": getattr(histogram, part) for part in _PARTS}
    return found
