"""Counts which neurons fire, alone, in batches of tokens, and together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pi2.arrays import F32, I32, I64, Bits
from pi2.engine.observation import Routing

BATCHES = (1, 2, 3, 4)
"""Sizes of batches whose unions of active neurons are counted."""


@dataclass(slots=True)
class Counts:
    """Sums over the tokens so far, neurons in stored order."""

    fired: I64
    """Batches in which a neuron fired at least once [layers, batch sizes, neurons]."""
    groups: I64
    """Batches [layers, batch sizes]; of size 1 these are the tokens."""
    together: I64
    """Tokens in which two sampled neurons fired both [layers, samples, samples]; on the diagonal,
    tokens in which one fired."""
    samples: I32
    """Stored indices of the sampled neurons [samples], the same in every layer."""
    moments: F32
    """Sums of u u^T over the FFN's inputs [layers, hidden, hidden]; [0, 0, 0] if not wanted."""

    @classmethod
    def make(cls, layers: int, neurons: int, samples: int, moments_of: int = 0) -> Counts:
        """Empty counts; ``samples`` neurons, spread evenly over the stored order;
        ``moments_of``: width of the inputs whose moments are wanted, 0 for none."""
        chosen = np.unique(np.linspace(0, neurons - 1, min(samples, neurons)).astype(np.int32))
        return cls(
            fired=np.zeros((layers, len(BATCHES), neurons), np.int64),
            groups=np.zeros((layers, len(BATCHES)), np.int64),
            together=np.zeros((layers, len(chosen), len(chosen)), np.int64),
            samples=chosen,
            moments=np.zeros((layers if moments_of else 0, moments_of, moments_of), np.float32),
        )

    def list_sums(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays that grow, by name."""
        names = ("fired", "groups", "together", "moments")
        return {name: getattr(self, name) for name in names}


class ActivationCounter:
    """An observer of FFNs (`pi2.engine.observation`) that adds to ``counts``."""

    def __init__(self, counts: Counts, largest: float | None) -> None:
        """``largest``: this share of a token's neurons, those of the largest magnitude, counts
        as active; None counts activations that are not zero."""
        self.counts = counts
        self._largest = largest

    def __call__(
        self, layer: int, inputs: F32, activations: F32, routing: Routing | None = None
    ) -> None:
        active = find_active(activations, self._largest)
        if routing is not None and self._largest is not None:
            # The share is of the neurons that compute: of those of its experts.
            computing = routing.computes[:, routing.owners]
            share = self._largest * float(computing.mean())
            active = find_active(activations, share) & computing
        for place, batch in enumerate(BATCHES):
            groups = len(active) // batch
            # Tokens of a batch stand far apart, as those of different sequences do.
            united = active[: groups * batch].reshape(batch, groups, -1).any(axis=0)
            self.counts.fired[layer, place] += united.sum(axis=0)
            self.counts.groups[layer, place] += groups
        sampled = active[:, self.counts.samples].astype(np.float32)
        self.counts.together[layer] += (sampled.T @ sampled).astype(np.int64)
        if len(self.counts.moments):
            self.counts.moments[layer] += inputs.T @ inputs


def find_active(activations: F32, largest: float | None) -> Bits:
    """Which of ``activations`` [T, neurons] count as active."""
    if largest is None:
        return np.asarray(activations != 0)
    magnitudes = np.abs(activations)
    neurons = activations.shape[1]
    place = neurons - max(1, round(largest * neurons))
    cuts = np.partition(magnitudes, place, axis=1)[:, place]
    return np.asarray(magnitudes >= cuts[:, None])


def measure_skew(fired: I64, share: float = 0.8) -> float:
    """Smallest share of neurons that makes ``share`` of all activations ``fired`` [neurons]."""
    total = int(fired.sum())
    if total == 0:
        return 0.0
    sums = np.cumsum(np.sort(fired)[::-1])
    return float(np.searchsorted(sums, share * total) + 1) / len(fired)
