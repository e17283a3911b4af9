"""The FFN of a layer with its neurons in memory and on flash.

Dense (prefill, and decode with ``predictor = "none"``): `pi2.engine.neuron_stream` gives all
neurons, those on flash in long reads while others are computed; in a mixture those of the experts
that any token chose.
Sparse (decode): the predictor names the neurons, the cache says which are in memory; those compute
while the missing ones are being read, and these, cluster by cluster, as they arrive.  In two phases
(``pipeline.phases = 2``) gates are read first, and up and down of those that are open, a cluster's
while the next one's gates are computed.  Where the plan looks ahead, the prediction is made before
the layer's attention, or while the layer before it computes, so that these hide the reads.

In a step of several sequences, what any of their tokens needs is looked up and read once; each
token computes what its own prediction named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from pi2.arrays import I32, U8, Bits
from pi2.backends.protocol import Executor
from pi2.engine.dense_shares import DenseShares, Jobs
from pi2.engine.experts import ExpertNeurons, unite_experts
from pi2.engine.neuron_stream import NeuronStream
from pi2.memory.balance import HotBalance
from pi2.memory.cache import Lookup, NeuronCache
from pi2.memory.flash import FlashReader, PendingRead
from pi2.memory.null_reader import NullReader
from pi2.plan.documents.plan import Decode

MOST_EXPERTS = 0.9
"""Share of a layer's experts from which the next layer of a prompt is read as a whole, before its
routing is known."""


@dataclass(slots=True)
class NeuronCounters:
    """Neurons of sparse layers, summed over layers and tokens; ``predicted``: those computed."""

    predicted: int = 0
    active: int = 0
    possible: int = 0
    routed: int = 0
    """Experts that computed tokens in layers whose routing was looked ahead at."""
    foreseen: int = 0
    """Those of them that looking ahead had named."""


@dataclass(slots=True)
class Wave:
    """Neurons of a layer that are in memory together: found, and on their way."""

    layer: int
    found: Lookup
    pending: PendingRead | None
    rest: I32
    """Stored indices that the cold cache has no room for until this wave is computed."""
    held: bool
    """Whether the cache holds their slots; those of a layer that is all hot never leave."""
    owned: int
    """Neurons of the layer that another unit was to compute when they were found."""
    by_token: Bits | None = None
    """Which neurons [neurons] each of several tokens has named; None of one."""
    experts: list[I32] | None = None
    """Experts that they belong to, of each token, where these were guessed ahead."""
    taken: int = 0
    """Clusters that have been waited for."""
    named: I32 | None = None
    """Stored indices of all of them, of a wave that was begun ahead for chosen experts."""
    opened: list[tuple[I32, I32, PendingRead | None]] = field(default_factory=list)
    """In two phases, of each cluster: slots and stored indices of those whose gates are open, and
    what is still read of them."""
    closed: list[I32] = field(default_factory=list)
    """Stored indices of those of which only the gate was read."""

    @property
    def in_phases(self) -> bool:
        """Whether gates are read before the rest."""
        return self.pending is not None and self.pending.gates is not None

    @property
    def is_ahead(self) -> bool:
        """Whether its reads began before the layer's input was known."""
        return self.experts is not None


class FeedForward:
    """Computes FFN layers through an executor."""

    def __init__(
        self,
        executor: Executor,
        cache: NeuronCache,
        reader: FlashReader | NullReader,
        staging: U8,
        *,
        layers: int,
        decode: Decode,
        token_neurons: int | None = None,
        balance: HotBalance | None = None,
        separate_scales: bool = False,
        shares: DenseShares | None = None,
        in_order: bool = False,
        experts: ExpertNeurons | None = None,
    ) -> None:
        """``staging`` [2, n, stride]: two page-aligned buffers.

        ``decode``: the plan's predictor, its thresholds, and how it looks ahead.  In a mixture the
        router looks ahead too; experts that it did not name are predicted when the layer's own
        routing is known.  ``token_neurons``: those of a layer that may compute a token,
        if not all.  ``balance``: weighs hot neurons against cold ones between tokens.
        ``separate_scales``: scales lie beside bundles, by stored index.  ``shares``: what units
        beside the executor compute.  ``in_order``: dense layers are computed as a whole and in
        stored order, for those who look at them.  ``experts``: whose neurons are whose, in a
        mixture.
        """
        self._executor = executor
        self._cache = cache
        self._reader = reader
        self.shares = shares or DenseShares(executor, {}, [None] * layers, cache.neurons)
        self._experts = experts
        self._leaves_out = experts is not None and not in_order
        """Whether experts that no token of a prompt has chosen are left out."""
        # What is computed of chosen experts does not depend on what is in memory.
        in_order = in_order or (experts is not None and decode.predictor in ("none", "router"))
        self._stream = NeuronStream(
            cache, reader, staging, layers, first=self._count_owned, in_order=in_order
        )
        self._is_whole = False
        """Whether all neurons of the next layer are taken, since nearly all experts compute."""
        self._jobs: list[Jobs] = []
        """Jobs of units under way, of each chunk."""
        self._layers = layers
        self._predictor = decode.predictor
        self._threshold = decode.threshold
        self._missing_threshold = decode.missing_threshold
        self._look_ahead = decode.look_ahead
        self._token_neurons = cache.neurons if token_neurons is None else token_neurons
        self.balance = balance
        self._separate_scales = separate_scales
        self._wave: Wave | None = None
        self._tokens = 1
        self._sequences = 0
        """Sequences of a step; 0 in a prompt."""
        self.counters = NeuronCounters()

    def _count_owned(self, layer: int) -> int:
        """Neurons of ``layer`` that another unit computes of what is computed now."""
        return self.shares.count_owned(layer, self._sequences)

    def decode_is_dense(self) -> bool:
        """Whether a generated token computes every neuron."""
        return self._predictor == "none"

    def begin_step(self, tokens: int) -> None:
        """Let what follows be about so many tokens, each of another sequence."""
        self.shares.check()
        self._tokens = self._sequences = tokens
        self._is_whole = False

    def begin_prompt(self) -> None:
        """Let what follows be about chunks of a prompt."""
        self.shares.check()
        self._sequences = 0
        self._is_whole = False

    def run_dense(self, layer: int, chunks: int = 1) -> Iterator[int]:
        """Compute all neurons of ``layer`` for the first ``chunks`` chunks that the executor keeps,
        each piece of them for one chunk after the other.

        Yields each chunk's number when its FFN has ended and it is selected: units may be computing
        others meanwhile.
        """
        executor, shares = self._executor, self.shares
        if not self._leaves_out or self._is_whole:
            self._stream.begin(layer)
        owned = self._count_owned(layer)
        others = range(owned, self._cache.neurons)
        for chunk in range(chunks):
            executor.select_chunk(chunk)
            executor.begin_ffn(layer)
            self._jobs.append(shares.start(layer, owned, self._sequences))
        wanted = self._list_wanted(layer, others, chunks)
        reads_on = not self._leaves_out or self._is_whole
        for stretch in self._stream.give(layer, wanted, reads_on=reads_on):
            for chunk, jobs in enumerate(self._jobs):
                if not shares.add(jobs, stretch.bundles, stretch.first):
                    executor.select_chunk(chunk)
                    executor.add_dense(layer, stretch.bundles, stretch.first)
            for jobs in self._jobs:
                shares.wait(jobs)
        for chunk in range(chunks):
            executor.select_chunk(chunk)
            for missed in shares.finish(self._jobs.pop(0)):
                for stretch in self._stream.give_again(layer, missed):
                    executor.add_dense(layer, stretch.bundles, stretch.first)
            executor.end_ffn(layer)
            yield chunk

    def _list_wanted(self, layer: int, others: range, chunks: int) -> list[range]:
        """Stretches of stored order, within ``others``, that the executor computes: all, or those
        of the experts that any token has chosen."""
        if not self._leaves_out:
            return [others]
        assert self._experts is not None
        chosen = []
        for chunk in range(chunks):
            self._executor.select_chunk(chunk)
            chosen.append(self._executor.list_chunk_experts())
        united = unite_experts(chosen)
        was_whole = self._is_whole
        self._is_whole = len(united) >= MOST_EXPERTS * self._experts.experts
        if was_whole:
            return [others]
        return self._experts.list_runs(layer, united, others, self._stream.shortest_gap)

    def prepare_sparse(self, layer: int) -> None:
        """Predict before ``layer``'s attention, from its input, and begin to read what is missing;
        does nothing unless the plan looks ahead."""
        if self._look_ahead != "none" and self._wave is None:
            self._wave = self._begin_ahead(layer)
        # Whatever takes its time is preceded by this: the drive has a queue, and it would run dry.
        self._reader.advance()

    def run_sparse(self, layer: int) -> None:
        """Compute the neurons of ``layer`` that the predictor names, for every token of a step."""
        executor = self._executor
        wave, self._wave = self._wave, None
        if wave is None:
            owned = self._begin_layer(layer)
            waves = [self._find_named(layer, owned)]
        else:
            waves = [wave]
            try:
                if self._look_ahead == "layer" and layer + 1 < self._layers and not len(wave.rest):
                    if wave.in_phases:
                        # Their ups and downs are needed before the next layer's gates.
                        executor.begin_ffn(layer)
                        self._open_gates(wave)
                    self._wave = self._begin_ahead(layer + 1)
                owned = self._begin_layer(layer)
                late = self._list_unforeseen(wave)
                if any(map(len, late)):
                    waves.append(self._find_named(layer, owned, late))
                if wave.owned > owned:
                    # A unit was lost after the prediction.
                    waves.append(self._find_named(layer, owned, end=wave.owned))
            except BaseException:
                self._abandon_wave(wave)
                raise
        self._compute_waves(layer, waves)
        for missed in self.shares.finish(self._jobs.pop()):
            # What a lost unit owned is predicted, and read, like any other neuron.
            lost = self._find_named(layer, missed.start, end=missed.stop)
            self._compute_waves(layer, [lost])
        executor.end_ffn(layer)

    def _begin_layer(self, layer: int) -> int:
        """Begin the FFN of ``layer`` with its own input, and let its unit begin; return how many
        neurons that has."""
        self._executor.begin_ffn(layer)
        owned = self._count_owned(layer)
        self._jobs.append(self.shares.start(layer, owned, self._sequences))
        return owned

    def _find_named(
        self, layer: int, owned: int, late: list[I32] | None = None, end: int | None = None
    ) -> Wave:
        """Begin with the neurons that the predictor names from the first that is not ``owned`` on,
        before ``end`` if it is given, and of experts that were found ``late``, if any."""
        named = self._predict(layer, owned, late, end)
        return self._begin_wave(layer, owned, *named)

    def _begin_ahead(self, layer: int) -> Wave:
        """Predict and begin to read before the layer's own input is known."""
        self._executor.begin_ffn(layer)
        experts = self._list_experts()
        wave = self._find_named(layer, self._count_owned(layer))
        wave.experts = experts
        return wave

    def _list_experts(self) -> list[I32]:
        """Experts of each token."""
        return [self._executor.list_experts().copy() for _ in self._select_tokens()]

    def _select_tokens(self) -> Iterator[int]:
        """Let the executor's calls be about one token of a step after the other."""
        if self._tokens == 1:
            yield 0
            return
        for token in range(self._tokens):
            self._executor.select_token(token)
            yield token
        self._executor.select_token(0)

    def _list_unforeseen(self, wave: Wave) -> list[I32]:
        """Experts of each token that looking ahead has not named."""
        late = []
        for chosen, guessed in zip(self._list_experts(), wave.experts or (), strict=False):
            late.append(chosen[~np.isin(chosen, guessed)])
            self.counters.routed += len(chosen)
            self.counters.foreseen += len(chosen) - len(late[-1])
        return late

    def _compute_waves(self, layer: int, waves: list[Wave]) -> None:
        """Compute ``waves``, and what they have left for later."""
        try:
            while waves:
                wave = waves.pop(0)
                self._compute_wave(wave)
                if not len(wave.rest):
                    continue
                if not waves and self._wave is not None and self._cache.free_capacity == 0:
                    # The next layer's neurons, guessed ahead, have taken all slots.
                    following, self._wave = self._wave, None
                    self._abandon_wave(following)
                waves.append(self._begin_wave(layer, wave.owned, wave.rest, wave.by_token))
        except BaseException:
            for wave in waves:
                self._abandon_wave(wave)
            raise

    def end_token(self) -> None:
        """Count what a token activated in all layers."""
        self.counters.active += self._executor.count_active()
        if self.balance is not None:
            self.balance.end_token()

    def _predict(
        self, layer: int, owned: int, late: list[I32] | None, end: int | None
    ) -> tuple[I32, Bits | None]:
        """Neurons that any token uses, of its experts or of those that were found ``late``, and
        which of them are whose, if there are several."""
        self._reader.advance()
        bounds = (owned, end)
        if self._tokens == 1:
            return self._predict_token(layer, bounds, None if late is None else late[0]), None
        by_token = np.zeros((self._tokens, self._cache.neurons), np.bool_)
        for token in self._select_tokens():
            if late is None or len(late[token]):
                own = None if late is None else late[token]
                indices = self._predict_token(layer, bounds, own)
                by_token[token][indices] = True
        return np.flatnonzero(by_token.any(axis=0)).astype(np.int32), by_token

    def _predict_token(self, layer: int, bounds: tuple[int, int | None], late: I32 | None) -> I32:
        owned, end = bounds
        if self._predictor == "gate":
            indices = _cut(self._executor.predict_gate(layer), owned, end)
        else:
            indices = self._executor.predict_low_rank(layer, self._threshold, late)
            indices = _cut(indices, owned, end)
            if self._missing_threshold is not None:
                scores = self._executor.read_scores()
                indices = self._cache.leave_out(layer, indices, scores, self._missing_threshold)
        self.counters.predicted += len(indices)
        self.counters.possible += self._token_neurons if late is None and end is None else 0
        return indices

    def _begin_wave(
        self, layer: int, owned: int, indices: I32, by_token: Bits | None = None
    ) -> Wave:
        """Find neurons, and begin to read those that are missing.

        Cold ones for which the cache has no slot now are left for later waves.
        """
        cache = self._cache
        if self.balance is None and cache.is_all_hot(layer, indices):
            found = cache.look_up(layer, indices)
            rest = indices[:0]
            return Wave(
                layer, found, pending=None, rest=rest, held=False, owned=owned, by_token=by_token
            )
        end = len(indices)
        free = cache.free_capacity
        if end > free:
            hot = cache.hot_range(layer)
            below, above = np.searchsorted(indices, (hot.start, hot.stop)).tolist()
            # Below the hot ones lie those of a dense unit that is lost.
            end = min(above + free - below, end) if below < free else free
        found = cache.look_up(layer, indices[:end])
        if self.balance is not None:
            self.balance.note(layer, indices[:end], len(found.resident_slots))
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
        rest = indices[end:].copy()
        return Wave(
            layer, found, pending=pending, rest=rest, held=True, owned=owned, by_token=by_token
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
            self._cache.release(found)
            if wave.closed:
                closed = np.concatenate(wave.closed)
                unread = self._reader.rest_bytes
                self._cache.forget(wave.layer, closed, unread_bytes=unread)

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
        """Wait for a cluster; return the slots and stored indices of those of its neurons that may
        fire."""
        if pending.gates is None:
            return self._reader.finish(pending, number), pending.indices[pending.clusters[number]]
        slots, indices, rest = wave.opened[number]
        if rest is not None:
            self._reader.finish(rest, 0)
        return slots, indices

    def _find_open(self, wave: Wave, slots: I32, indices: I32) -> Bits:
        """Whether the gates of the neurons in ``slots`` are open, for any token that named them;
        ``indices`` are their stored indices."""
        arena = self._cache.arena
        if wave.by_token is None:
            return self._executor.find_open(wave.layer, arena, slots, indices)
        opened = np.zeros(len(slots), np.bool_)
        for token in self._select_tokens():
            own = np.flatnonzero(wave.by_token[token].take(indices))
            if len(own):
                found = self._executor.find_open(wave.layer, arena, slots[own], indices[own])
                opened[own] |= found
        return opened

    def _add_neurons(self, wave: Wave, slots: I32, indices: I32 | None = None) -> None:
        """Compute the neurons in ``slots``, with the gates that have found them, if they have;
        ``indices``: their stored indices, where they are at hand."""
        cache, layer, by_token = self._cache, wave.layer, wave.by_token
        self._reader.advance()
        # Gates are never computed ahead (P254): they are those of the layer's input.
        known = self._predictor == "gate"
        if indices is None and (known or self._separate_scales or by_token is not None):
            indices = cache.find_indices(layer, slots)
        if by_token is None:
            self._executor.add_neurons(layer, cache.arena, slots, indices, known)
            return
        assert indices is not None
        for token in self._select_tokens():
            own = by_token[token].take(indices)
            mine = slots.compress(own)
            if len(mine):
                self._executor.add_neurons(layer, cache.arena, mine, indices.compress(own), known)

    def _abandon_wave(self, wave: Wave) -> None:
        if wave.held:
            self._cache.release(wave.found)
        if wave.pending is not None:
            for read in (wave.pending, *(rest for *_, rest in wave.opened)):
                if read is not None:
                    self._reader.abandon(read)
            self._cache.forget(wave.layer, wave.found.missing)

    def abandon(self) -> None:
        """Forget reads and jobs that are under way, after an error or an interrupt."""
        self._jobs.clear()
        self.shares.abandon()
        if self._wave is not None:
            wave, self._wave = self._wave, None
            self._abandon_wave(wave)
        self._stream.abandon()


def _cut(indices: I32, first: int, end: int | None) -> I32:
    """Those of ``indices`` [n] (ascending) from ``first`` on, and before ``end``."""
    if first:
        indices = indices[int(indices.searchsorted(first)) :]
    return indices if end is None else indices[: int(indices.searchsorted(end))]
