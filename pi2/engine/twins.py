"""Neurons that are computed by their low-bit twins, instead of being read or left out.

Which ones, the plan's dials say: what they would leave out has its twin computed instead.  Twins
are in memory, of every neuron that may be on flash.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from pi2.arrays import I32
from pi2.backends.protocol import Executor


class TwinNeurons:
    """Notes which twins a layer's tokens need, and computes them when the layer has its input."""

    def __init__(self, executor: Executor, firsts: Sequence[int]) -> None:
        """``firsts``: the stored index of each layer's first neuron that has a twin."""
        self.firsts = firsts
        self.computed = 0
        """Twins that were computed, over layers and tokens."""
        self._executor = executor
        self._waiting: dict[int, list[tuple[int, I32]]] = {}

    def note(self, layer: int, token: int, indices: I32) -> None:
        """Let the twins of the neurons ``indices`` [n] of ``layer`` be computed for ``token``."""
        if len(indices):
            self._waiting.setdefault(layer, []).append((token, indices))

    def take_left_out(self, layer: int, token: int, named: I32, kept: I32) -> I32:
        """Note the twins of those ``named`` neurons [n] (ascending) that are not ``kept`` [m];
        return what is kept, and those that have none."""
        if len(kept) == len(named):
            return named
        left = np.setdiff1d(named, kept, assume_unique=True)
        count = int(left.searchsorted(self.firsts[layer]))
        self.note(layer, token, left[count:])
        return np.union1d(kept, left[:count]).astype(np.int32) if count else kept

    def compute(self, layer: int, tokens: Iterable[int]) -> None:
        """Add what was noted for ``layer``; ``tokens`` selects one after the other."""
        noted = self._waiting.pop(layer, None)
        if noted is None:
            return
        for token in tokens:
            for own, indices in noted:
                if own == token:
                    self._executor.add_twins(layer, indices)
                    self.computed += len(indices)

    def forget(self, layer: int) -> None:
        """Forget what was noted for ``layer``: it is asked for again."""
        self._waiting.pop(layer, None)

    def abandon(self) -> None:
        """Forget everything."""
        self._waiting.clear()
