"""Neurons of a layer in memory together: found, read and computed as they arrive. With
``pipeline.phases = 2`` gates are read first, then up and down behind open ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from pi2.arrays import F32, I32, I64, Bits
from pi2.backends.executor import Executor
from pi2.engine.statistics import NeuronCounters
from pi2.memory.cache import Lookup, NeuronCache
from pi2.memory.flash import FlashReader, PendingRead
from pi2.memory.policy import ABSENT
from pi2.memory.read_sieve import ReadSieve
from pi2.plan.documents.plan import Decode


@dataclass(slots=True)
class Wave:
    """Neurons of a layer that are in memory together: found, and on their way."""

    layer: int
    found: Lookup
    pending: PendingRead | None
    rest: I32
    """Stored indices that the cold cache has no room for until this wave is computed."""
    held: bool
    """Whether the cache holds their slots; slots of a layer that is all hot never leave."""
    owned: int
    """Neurons of the layer that another unit was to compute when they were found."""
    by_token: I64 | None = None
    """Which of several tokens have named each neuron [neurons], a bit for each; None of one."""
    experts: list[I32] | None = None
    """Experts of each token that they belong to, if these were predicted ahead."""
    taken: int = 0
    """Clusters that have been waited for."""
    named: I32 | None = None
    """Stored indices of all of them, of a wave that was begun ahead for chosen experts."""
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
    ) -> None:
        """``separate_scales``: see `pi2.engine.feed_forward.FeedForward`."""
        self._executor = executor
        self.cache = cache
        self._reader = reader
        self._predictor = decode.predictor
        self._separate_scales = separate_scales
        self.sieve = make_sieve(decode, cache.arena.shape[1])
        """Says which missing neurons are worth a read, if the plan leaves some out."""
        self._tokens = 1
        self.counters = NeuronCounters()
        self._only_resident = False
        """Whether neurons that are not in memory are left out."""

    @contextmanager
    def leave_out_missing(self) -> Iterator[None]:
        """Let nothing be read meanwhile: tokens are computed with resident neurons only."""
        self._only_resident = True
        try:
            yield
        finally:
            self._only_resident = False

    def _keep_resident(self, layer: int, indices: I32) -> I32:
        """The ``indices`` [n] that are in memory."""
        return indices.compress(self.cache.locate(layer, indices) != ABSENT)

    def _select_tokens(self) -> Iterator[int]:
        if self._tokens == 1:
            yield 0
            return
        for token in range(self._tokens):
            self._executor.select_token(token)
            yield token
        self._executor.select_token(0)

    def _begin_wave(
        self,
        layer: int,
        owned: int,
        indices: I32,
        by_token: I64 | None = None,
        scores: F32 | None = None,
    ) -> Wave:
        """Find neurons and begin to read missing ones, if given ``scores`` only those worth it;
        those without a slot wait for later waves."""
        cache = self.cache
        if len(indices) == 0 or cache.is_all_hot(layer, indices):
            found = cache.look_up(layer, indices)
            rest = indices[:0]
            self.counters.touched += len(indices)
            return Wave(
                layer, found, pending=None, rest=rest, held=False, owned=owned, by_token=by_token
            )
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
        return Wave(
            layer,
            found,
            pending=pending,
            rest=found.rest,
            held=True,
            owned=owned,
            by_token=by_token,
        )

    def _compute_wave(self, wave: Wave) -> None:
        found, pending = wave.found, wave.pending
        try:
            if wave.in_phases and wave.is_ahead:
                # Gates have arrived: up and down are read while resident neurons are computed.
                self._open_gates(wave)
            if len(found.resident_slots):
                self._add_neurons(wave, found.resident_slots)
            if wave.in_phases and not wave.is_ahead:
                self._open_gates(wave)
            if pending is not None:
                for number in range(len(pending.clusters)):
                    slots, indices = self._take_cluster(wave, pending, number)
                    if len(slots):
                        self._add_neurons(wave, slots, indices)
        except BaseException:
            self._abandon_wave(wave)
            raise
        if wave.held:
            self.cache.release(found)
            if wave.closed:
                closed = np.concatenate(wave.closed)
                unread = self._reader.rest_bytes
                self.cache.forget(wave.layer, closed, unread_bytes=unread)

    def _open_gates(self, wave: Wave) -> None:
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
        for token in self._select_tokens():
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

    def _abandon_wave(self, wave: Wave) -> None:
        if wave.held:
            self.cache.release(wave.found)
        if wave.pending is not None:
            for read in (wave.pending, *(rest for *_, rest in wave.opened)):
                if read is not None:
                    self._reader.abandon(read)
            self.cache.forget(wave.layer, wave.found.missing)
