"""The gates of a mixture's experts, which say which of their neurons count for a token.

A plan with thresholds and ``predictor = "router"`` has them apart from the neurons
(`pi2.store.gates`).  Those of the chosen experts are read first, an expert's in one stretch, and
kept in a cache of their own in the segment ``predictor``; then those neurons are read that reach
their expert's threshold (CATS, arXiv 2404.08763), and no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pi2.arrays import I32
from pi2.backends.protocol import Executor
from pi2.engine.experts import mark_experts, unite_experts
from pi2.memory.cache import Lookup, NeuronCache
from pi2.memory.flash import FlashReader, PendingRead
from pi2.memory.null_reader import NullReader


@dataclass(slots=True)
class _Held:
    """Records that are in memory, or on their way there."""

    layer: int
    experts: I32
    found: Lookup
    pending: PendingRead | None = None


class ExpertGates:
    """Names the neurons of chosen experts whose gates are open."""

    def __init__(
        self,
        executor: Executor,
        cache: NeuronCache,
        reader: FlashReader | NullReader,
        neurons: FlashReader | NullReader,
        usual_shares: Sequence[float],
    ) -> None:
        """``cache`` and ``reader`` are of records, of which each layer has one for every expert;
        what is read is counted by the reader of ``neurons``, too.  ``usual_shares``: of an expert's
        neurons, that usually compute, by layer."""
        self._executor = executor
        self._cache = cache
        self._reader = reader
        self._neurons = neurons
        self.usual_shares = usual_shares
        self._ahead: _Held | None = None

    def prefetch(self, layer: int, experts: I32) -> None:
        """Begin to read the gates of ``experts`` (ascending) of ``layer``, as far as there is
        room."""
        self.end_ahead()
        self._ahead = self._begin(layer, experts)

    def end_ahead(self) -> None:
        """Keep what was read ahead, but hold it no longer."""
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            self._complete(ahead)

    def find_open(self, layer: int, chosen: Sequence[I32]) -> list[I32]:
        """Stored indices, ascending, of the neurons with open gates of each token's ``chosen``
        experts (ascending)."""
        self.end_ahead()
        wanted = unite_experts(chosen)
        found: list[list[I32]] = [[] for _ in chosen]
        while len(wanted):
            held = self._begin(layer, wanted)
            self._complete(held)
            # Nothing else is looked up before these are computed with.
            slots = self._cache.locate(layer, held.experts)
            for token, own in enumerate(chosen):
                mine = mark_experts(held.experts, own)
                if not mine.any():
                    continue
                if len(chosen) > 1:
                    self._executor.select_token(token)
                named = self._executor.predict_gate(
                    layer, held.experts.compress(mine), slots.compress(mine)
                )
                found[token].append(named.copy())
            wanted = held.found.rest
        if len(chosen) > 1:
            self._executor.select_token(0)
        none = np.empty(0, np.int32)
        return [np.sort(np.concatenate([none, *own])) for own in found]

    def _begin(self, layer: int, experts: I32) -> _Held:
        """Find records, and begin to read those that are missing."""
        cache = self._cache
        found = cache.look_up(layer, experts)
        held = _Held(layer, experts[: len(experts) - len(found.rest)], found)
        cache.hold(found)
        try:
            if len(found.missing):
                held.pending = self._reader.start(layer, found.missing, found.missing_slots)
        except BaseException:
            self._abandon(held)
            raise
        return held

    def _complete(self, held: _Held) -> None:
        """Wait for what is read, and hold it no longer."""
        pending, before = held.pending, self._reader.read_bytes
        try:
            for number in range(0 if pending is None else len(pending.clusters)):
                assert pending is not None
                self._reader.finish(pending, number)
        except BaseException:
            self._abandon(held)
            raise
        self._cache.release(held.found)
        self._neurons.read_bytes += self._reader.read_bytes - before

    def _abandon(self, held: _Held) -> None:
        self._cache.release(held.found)
        if held.pending is not None:
            self._reader.abandon(held.pending)
        self._cache.forget(held.layer, held.found.missing)

    def abandon(self) -> None:
        """Forget reads that are under way, after an error or an interrupt."""
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            self._abandon(ahead)
