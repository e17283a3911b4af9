"""The FFN of models with cutoffs of gates: layers that have one compute the neurons that it leaves
open, and the others, whose activation is never zero, all of theirs.

What is in memory changes no bit.  Named neurons are computed in stored order, in parts of
`PART_NEURONS` that are counted from the layer's first: the hottest come first, so that the others
are read meanwhile.  Layers that are computed whole are cut into pieces of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from pi2.arrays import F32, I32, I64
from pi2.engine.feed_forward import FeedForward
from pi2.engine.waves import Wave
from pi2.plan.arithmetic.sizes import PART_NEURONS


class CutFeedForward(FeedForward):
    """Computes FFN layers of which gates with a cutoff name the neurons of some."""

    def __init__(self, *arguments: Any, cut: Collection[int], **named: Any) -> None:
        """See `FeedForward`; ``cut``: layers whose gates have a cutoff."""
        super().__init__(*arguments, keeps_bits=True, **named)
        self._cut = frozenset(cut)

    def decode_is_dense(self, layer: int) -> bool:
        """Whether a generated token computes every neuron of ``layer``."""
        return layer not in self._cut

    def _count_following(self, layer: int) -> int | None:
        if not self._sequences:
            return None
        others = (other for other in range(layer + 1, self._layers) if other in self._cut)
        return next(others, self._layers) - layer - 1

    def run_dense(self, layer: int, chunks: int = 1) -> Iterator[int]:
        """See `FeedForward`; neurons of steps are counted, for tokens compute others of other
        layers."""
        yield from super().run_dense(layer, chunks)
        computed = self._neurons * self._sequences
        self.counters.predicted += computed
        self.counters.active += computed
        self.counters.possible += computed

    def _begin_wave(
        self,
        layer: int,
        owned: int,
        indices: I32,
        by_token: I64 | None = None,
        scores: F32 | None = None,
    ) -> Wave:
        """See `pi2.engine.waves.Waves`; what is left for later begins with a part."""
        taken = self._cache.count_taken(layer, indices)
        if taken < len(indices):
            taken = max(taken - taken % PART_NEURONS, min(taken, PART_NEURONS))
        wave = super()._begin_wave(layer, owned, indices[:taken], by_token, scores)
        wave.named, wave.rest = indices[:taken], indices[taken:].copy()
        return wave

    def _compute_wave(self, wave: Wave) -> None:
        found, pending, named = wave.found, wave.pending, wave.named
        assert named is not None and not wave.in_phases
        try:
            slots = self._cache.locate(wave.layer, named)
            clusters = [] if pending is None else list(pending.clusters)
            for first in range(0, len(named), PART_NEURONS):
                part = slice(first, first + PART_NEURONS)
                own = named[part]
                while pending is not None and wave.taken < len(clusters):
                    if pending.indices[clusters[wave.taken].start] > own[-1]:
                        break
                    self._reader.finish(pending, wave.taken)
                    wave.taken += 1
                self._add_neurons(wave, slots[part], own)
        except BaseException:
            self._abandon_wave(wave)
            raise
        if wave.held:
            self._cache.release(found)
