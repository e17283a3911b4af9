"""Neurons of a layer in memory together: found, read and computed as they arrive. With
``pipeline.phases = 2`` gates are read first, then up and down behind open ones."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from pi2.arrays import F32, I32, I64, Bits
from pi2.backends.executor import Executor
from pi2.engine.statistics import NeuronCounters
from pi2.memory.cache import Lookup, NeuronCache
from pi2.memory.flash import FlashReader, PendingRead
from pi2.memory.read_sieve import ReadSieve
from pi2.plan.arithmetic.sizes import PART_NEURONS
from pi2.plan.documents.plan import Decode


@dataclass(slots=True)
class Wave:
    """Neurons of a layer that are in memory together: found, and on their way."""

    layer: int
    found: Lookup
    pending: PendingRead | None
    rest: I32
    """Stored indices that the cold cache has no room for until this wave is computed."""
    owned: int
    """Neurons of the layer that another unit was to compute when they were found."""
    by_token: I64 | None = None
    """Which of several tokens have named each neuron [neurons], a bit for each; None of one."""
    experts: list[I32] | None = None
    """Experts of each token that they belong to, if these were predicted ahead."""
    named: I32 | None = None
    """Stored indices of all of them, if they are computed in their order."""
    opened: list[tuple[I32, I32, PendingRead | None]] = field(default_factory=list)
    """In two phases, of each cluster: slots and stored indices of neurons with open gates, and
    their remaining reads."""
    closed: list[I32] = field(default_factory=list)
    """Stored indices of neurons of which only the gate was read."""

    @property
    def in_phases(self) -> bool:
        """Whether gates are read before the rest."""
        return self.pending is not None and self.pending.gates is not None

    @property
    def is_ahead(self) -> bool:
        """Whether its reads began before the layer's input was known."""
        return self.experts is not None


def make_sieve(decode: Decode, neuron_bytes: int) -> ReadSieve | None:
    """Make what says which missing neurons are worth a read of ``neuron_bytes``; None where all
    are, or no predictor gives scores."""
    least, share = decode.missing_threshold, decode.leave_out
    if decode.predictor != "low-rank" or (least is None and share is None):
        return None
    return ReadSieve(decode.threshold, least=least, share=share, neuron_bytes=neuron_bytes)


class Waves:
    """Begins, computes and abandons waves; knows how many tokens are computed."""

    def __init__(
        self,
        executor: Executor,
        cache: NeuronCache,
        reader: FlashReader,
        *,
        decode: Decode,
        separate_scales: bool,
        in_order: bool,
    ) -> None:
        """``separate_scales``: see `pi2.engine.feed_forward.FeedForward`; ``in_order``: neurons are
        computed in stored order, in parts of `PART_NEURONS`, wherever they come from."""
        self._executor = executor
        self.cache = cache
        self._reader = reader
        self._predictor = decode.predictor
        self._separate_scales, self._in_order = separate_scales, in_order
        self.sieve = make_sieve(decode, cache.arena.shape[1])
        """Says which missing neurons are worth a read, if the plan leaves some out."""
        self.tokens = 1
        self.counters = NeuronCounters()

    def select_tokens(self) -> Iterator[int]:
        if self.tokens == 1:
            yield 0
            return
        for token in range(self.tokens):
            self._executor.select_token(token)
            yield token
        self._executor.select_token(0)

    def begin(
        self,
        layer: int,
        owned: int,
        indices: I32,
        by_token: I64 | None = None,
        scores: F32 | None = None,
    ) -> Wave:
        """Find neurons and begin to read missing ones, if given ``scores`` only those worth it;
        those without a slot wait for later waves."""
        cache, named, later = self.cache, None, None
        if self._in_order:
            taken = cache.count_taken(layer, indices)
            if taken < len(indices):
                # Those that are put off begin with a part.
                taken = max(taken - taken % PART_NEURONS, min(taken, PART_NEURONS))
            indices, later = indices[:taken], indices[taken:].copy()
            named = indices
        found = cache.look_up(layer, indices, scores, self.sieve)
        self.counters.predicted -= found.skipped
        self.counters.touched += len(indices) - len(found.rest) - found.skipped
        pending = None
        cache.hold(found)
        try:
            if len(found.missing):
                pending = self._reader.start(layer, found.missing, found.missing_slots)
        except BaseException:
            # The cache counts them as in memory, and nobody will read them.
            cache.release(found)
            cache.forget(layer, found.missing)
            raise
        rest = found.rest if later is None else later
        return Wave(layer, found, pending, rest, owned, by_token=by_token, named=named)

    def compute(self, wave: Wave) -> None:
        try:
            if wave.named is None:
                self._compute_as_they_come(wave)
            else:
                self._compute_in_order(wave, wave.named)
        except BaseException:
            self.abandon(wave)
            raise
        self.cache.release(wave.found)
        if wave.closed:
            closed = np.concatenate(wave.closed)
            self.cache.forget(wave.layer, closed, unread_bytes=self._reader.rest_bytes)

    def _compute_as_they_come(self, wave: Wave) -> None:
        found, pending = wave.found, wave.pending
        if wave.in_phases and wave.is_ahead:
            # Gates have arrived: up and down are read while resident neurons are computed.
            self.open_gates(wave)
        if len(found.resident_slots):
            self._add_neurons(wave, found.resident_slots)
        if wave.in_phases and not wave.is_ahead:
            self.open_gates(wave)
        if pending is not None:
            for number in range(len(pending.clusters)):
                slots, indices = self._take_cluster(wave, pending, number)
                if len(slots):
                    self._add_neurons(wave, slots, indices)

    def _compute_in_order(self, wave: Wave, named: I32) -> None:
        pending, taken = wave.pending, 0
        assert not wave.in_phases
        slots = self.cache.locate(wave.layer, named)
        clusters = () if pending is None else pending.clusters
        for first in range(0, len(named), PART_NEURONS):
            part = slice(first, first + PART_NEURONS)
            own = named[part]
            while pending is not None and taken < len(clusters):
                if pending.indices[clusters[taken].start] > own[-1]:
                    break
                self._reader.finish(pending, taken)
                taken += 1
            self._add_neurons(wave, slots[part], own)

    def open_gates(self, wave: Wave) -> None:
        """Compute the gates that have been read, and begin to read what follows the open ones."""
        pending, reader = wave.pending, self._reader
        if wave.opened:
            return
        assert pending is not None and pending.gates is not None
        for number, cluster in enumerate(pending.clusters):
            slots = reader.finish(pending, number)
            indices = pending.indices[cluster]
            opened = self._find_open(wave, slots, indices)
            rest = reader.start_rest(pending, number, opened)
            wave.opened.append((slots.compress(opened), indices.compress(opened), rest))
            closed = pending.gates[cluster] & ~opened
            wave.closed.append(indices.compress(closed))

    def _take_cluster(self, wave: Wave, pending: PendingRead, number: int) -> tuple[I32, I32]:
        """Wait for a cluster; return the slots and stored indices of its neurons that may fire."""
        if pending.gates is None:
            return self._reader.finish(pending, number), pending.indices[pending.clusters[number]]
        slots, indices, rest = wave.opened[number]
        if rest is not None:
            self._reader.finish(rest, 0)
        return slots, indices

    def _find_open(self, wave: Wave, slots: I32, indices: I32) -> Bits:
        """Whether the gates of the neurons in ``slots`` are open, for any token that named them;
        ``indices`` are their stored indices."""
        arena = self.cache.arena
        if wave.by_token is None:
            return self._executor.find_open(wave.layer, arena, slots, indices)
        opened = np.zeros(len(slots), np.bool_)
        named = wave.by_token.take(indices)
        for token in self.select_tokens():
            own = np.flatnonzero((named >> token) & 1)
            if len(own):
                found = self._executor.find_open(wave.layer, arena, slots[own], indices[own])
                opened[own] |= found
        return opened

    def _add_neurons(self, wave: Wave, slots: I32, indices: I32 | None = None) -> None:
        """Compute the neurons in ``slots``, with the gates that have found them, if they have;
        ``indices``: their stored indices, if they are at hand."""
        cache, layer, by_token = self.cache, wave.layer, wave.by_token
        arena = cache.arena
        self._reader.advance()
        # Gates are never computed ahead (P254): they are those of the layer's input.
        known = self._predictor == "gate"
        if indices is None and (known or self._separate_scales or by_token is not None):
            indices = cache.find_indices(layer, slots)
        if by_token is None:
            self._executor.add_neurons(layer, arena, slots, indices, known)
            return
        assert indices is not None
        if len(slots):
            named = by_token.take(indices)
            self._executor.add_named_neurons(layer, arena, slots, indices, named, known)

    def abandon(self, wave: Wave) -> None:
        self.cache.release(wave.found)
        if wave.pending is not None:
            for read in (wave.pending, *(rest for *_, rest in wave.opened)):
                if read is not None:
                    self._reader.abandon(read)
            self.cache.forget(wave.layer, wave.found.missing)
