"""The FFN of a layer with its neurons in memory and on flash."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from pi2.arrays import F32, I32, I64, U8
from pi2.backends.executor import Executor
from pi2.engine.dense_shares import DenseShares, Jobs
from pi2.engine.experts import ExpertNeurons, mark_experts, unite_experts
from pi2.engine.neuron_stream import NeuronStream, PieceOrder, choose_piece
from pi2.engine.waves import Wave, Waves
from pi2.memory.cache import NeuronCache
from pi2.memory.flash import FlashReader
from pi2.memory.policy import ABSENT
from pi2.plan.documents.plan import Decode

Namer = Callable[[int], tuple[I32, F32 | None]]
"""Tells the prediction for a token, which is selected: stored indices, and scores [neurons] where
they are needed."""

MOST_EXPERTS = 0.9
"""Share of a layer's experts from which the next layer of a prompt is read as a whole, before its
routing is known."""


class FeedForward:
    """Computes FFN layers through an executor."""

    def __init__(
        self,
        executor: Executor,
        cache: NeuronCache,
        reader: FlashReader,
        staging: U8,
        *,
        layers: int,
        decode: Decode,
        token_neurons: Sequence[int] | None = None,
        separate_scales: bool = False,
        shares: DenseShares | None = None,
        in_order: bool = False,
        experts: ExpertNeurons | None = None,
        whole: Collection[int] = (),
        keeps_bits: bool = False,
    ) -> None:
        """``staging`` [2, n, stride]: two page-aligned buffers.

        ``decode``: the plan's predictor, its thresholds, and how it looks ahead.  In an MoE model
        the router looks ahead too; experts that it did not name are predicted when the layer's own
        routing is known.  ``token_neurons``: how many of each layer may compute a token, if not
        all. ``separate_scales``: scales are outside of bundles, by stored index.  ``shares``: the
        neurons of units next to the executor.  ``in_order``: dense layers are computed as a whole
        and in stored order, for those who look at them.  ``experts``: whose neurons are whose, in
        an MoE model.  ``whole``: layers of which a token computes every neuron, next to others.
        ``keeps_bits``: the cache changes no bit of any layer."""
        self._executor, self.cache, self._reader = executor, cache, reader
        self._waves = Waves(
            executor,
            cache,
            reader,
            decode=decode,
            separate_scales=separate_scales,
            in_order=keeps_bits,
        )
        self.counters, self.sieve = self._waves.counters, self._waves.sieve
        self._predictor = decode.predictor
        self._only_resident = False
        """Whether neurons that are not in memory are left out."""
        self._neurons = cache.neurons
        """Neurons of a layer."""
        self.shares = shares or DenseShares(executor, {}, [None] * layers, self._neurons)
        self._experts = experts
        self._leaves_out = experts is not None and not in_order
        """Whether experts that no token of a prompt has chosen are left out."""
        order: PieceOrder = "stored" if in_order else "any"
        size = self._neurons if keeps_bits else None
        if experts is not None and decode.names_all:
            # What is computed of chosen experts does not depend on what is in memory.
            size = experts.size
        piece = None
        if size is not None and not in_order:
            order, piece = "spread", choose_piece(size, staging.shape[2])
        self._stream = NeuronStream(
            cache, reader, staging, layers, first=self._count_owned, order=order, piece=piece
        )
        self._is_whole = False
        """Whether all neurons of the next layer are taken, since nearly all experts compute."""
        self._jobs: list[Jobs] = []
        """Jobs of units under way, of each chunk."""
        self._layers = layers
        self._threshold = decode.threshold
        self._foreseen: list[tuple[I32, F32 | None]] = []
        """The neurons predicted ahead for each token, if no call does it at once."""
        self._look_ahead, self._keeps_bits = decode.look_ahead, keeps_bits
        self._whole = frozenset(range(layers) if decode.names_all else whole)
        self._token_neurons = token_neurons or [self._neurons] * layers
        self._wave: Wave | None = None
        self._sequences = 0
        """Tokens of a step; 0 in a prompt."""

    @contextmanager
    def leave_out_missing(self) -> Iterator[None]:
        """Let nothing be read meanwhile: tokens are computed with resident neurons only."""
        self._only_resident = True
        try:
            yield
        finally:
            self._only_resident = False

    def _count_owned(self, layer: int) -> int:
        """Neurons of ``layer`` in this computation that another unit computes."""
        return self.shares.count_owned(layer, self._sequences)

    def decode_is_dense(self, layer: int) -> bool:
        """Whether a generated token computes every neuron of ``layer``."""
        return layer in self._whole

    def _count_following(self, layer: int) -> int | None:
        """Layers after ``layer`` that now compute all neurons as well; None: all later layers."""
        if not self._sequences:
            return None
        others = (own for own in range(layer + 1, self._layers) if own not in self._whole)
        return next(others, self._layers) - layer - 1

    def begin_step(self, tokens: int) -> None:
        """Let what follows be about so many tokens of one or more sequences."""
        self.shares.check()
        self._waves.tokens = self._sequences = tokens
        self._is_whole = False

    def begin_prompt(self) -> None:
        """Let what follows be about chunks of a prompt."""
        self.shares.check()
        self._sequences = 0
        self._is_whole = False

    def run_dense(self, layer: int, chunks: int = 1) -> Iterator[int]:
        """Compute all neurons of ``layer`` for ``chunks`` chunks, piece by piece; yields a chunk's
        number when its FFN has ended and it is selected."""
        executor, shares = self._executor, self.shares
        following = self._count_following(layer)
        if not self._leaves_out or self._is_whole:
            self._stream.begin(layer, reads_on=0 if self._leaves_out else following)
        owned = self._count_owned(layer)
        others = range(owned, self._neurons)
        for chunk in range(chunks):
            executor.select_chunk(chunk)
            executor.begin_ffn(layer)
            self._jobs.append(shares.start(layer, owned, self._sequences))
        wanted = self._list_wanted(layer, others, chunks)
        reads_on = int(self._is_whole) if self._leaves_out else following
        is_step = self._sequences > 0
        self.counters.touched += owned * is_step
        for stretch in self._stream.give(layer, wanted, reads_on=reads_on):
            self.counters.touched += len(stretch.bundles) * is_step
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
        if self._keeps_bits:
            # Other layers compute fewer.
            computed = self._neurons * self._sequences
            self.counters.predicted += computed
            self.counters.active += computed
            self.counters.possible += computed

    def _list_wanted(self, layer: int, others: range, chunks: int) -> list[range]:
        """Ranges of stored order, within ``others``, that the executor computes: all, or the chosen
        experts' neurons."""
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
        """Predict before ``layer``'s attention, from its input, and begin to read missing neurons;
        does nothing unless the plan looks ahead."""
        if self._look_ahead != "none" and self._wave is None:
            self._wave = self._begin_ahead(layer, layer)
        # Whatever takes its time is preceded by this: the drive has a queue, and it would run dry.
        self._reader.advance()

    def run_sparse(self, layer: int) -> None:
        """Compute the neurons of ``layer`` that the predictor names, for every token of a step."""
        executor = self._executor
        wave, self._wave = self._wave, None
        if wave is None:
            executor.begin_ffn(layer)
            owned = self._start_share(layer)
            waves = [self._find_named(layer, owned)]
        else:
            waves = [wave]
            try:
                if self._look_ahead == "layer" and layer + 1 < self._layers and not len(wave.rest):
                    if wave.in_phases:
                        # Their ups and downs are needed before the next layer's gates.
                        executor.begin_ffn(layer)
                        self._waves.open_gates(wave)
                    self._wave = self._begin_ahead(layer + 1, layer)
                else:
                    executor.begin_ffn(layer)
                owned = self._start_share(layer)
                late = self._list_unforeseen(wave)
                if any(map(len, late)):
                    if wave.in_phases and self._waves.tokens > 1:
                        # Another token may need a neuron of which only the gate was read.
                        self._compute_waves(layer, waves)
                    waves.append(self._find_named(layer, owned, late))
                if wave.owned > owned:
                    # A unit was lost after the prediction.
                    waves.append(self._find_named(layer, owned, end=wave.owned))
            except BaseException:
                for wave in waves:
                    self._waves.abandon(wave)
                raise
        self._compute_waves(layer, waves)
        for missed in self.shares.finish(self._jobs.pop()):
            # What a lost unit owned is predicted, and read, like any other neuron.
            lost = self._find_named(layer, missed.start, end=missed.stop)
            self._compute_waves(layer, [lost])
        executor.end_ffn(layer)

    def _start_share(self, layer: int) -> int:
        """Let the unit of ``layer``, which has its input, begin; return its number of neurons."""
        owned = self._count_owned(layer)
        self.counters.touched += owned
        self._jobs.append(self.shares.start(layer, owned, self._sequences))
        return owned

    def _find_named(
        self,
        layer: int,
        owned: int,
        late: list[I32] | None = None,
        end: int | None = None,
        *,
        is_foreseen: bool = False,
    ) -> Wave:
        """Begin with the predicted neurons after the ``owned`` ones and before ``end``, and with
        the neurons of ``late`` experts."""
        name = self._read_foreseen if is_foreseen else partial(self._name, layer, late)
        indices, by_token, scores = self._predict(layer, (owned, end), late, name)
        return self._waves.begin(layer, owned, indices, by_token, scores)

    @property
    def _sieves_apart(self) -> bool:
        """Whether left-out neurons must be known, so a look-up must not leave them out."""
        return self._waves.tokens > 1 or self._only_resident

    def _begin_ahead(self, following: int, layer: int) -> Wave:
        """Predict the layer ``following`` before its own input is known and begin the FFN of
        ``layer``; begin to read."""
        self._reader.advance()
        experts = self._predict_ahead(following, layer)
        wave = self._find_named(following, self._count_owned(following), is_foreseen=True)
        wave.experts = experts
        return wave

    def _predict_ahead(self, following: int, layer: int) -> list[I32]:
        """Predict the neurons of the layer ``following`` for all tokens of a step, from its input
        as of now, then begin the FFN of ``layer``; return experts of each token, if there are
        any."""
        executor = self._executor
        if executor.foresees:
            executor.foresee(following, layer, self._threshold)
            return []
        executor.begin_ffn(following)
        experts = self._list_experts()
        self._foreseen = [
            self._copy_named(following, token) for token in self._waves.select_tokens()
        ]
        if layer != following:
            executor.begin_ffn(layer)
        return experts

    def _copy_named(self, layer: int, token: int) -> tuple[I32, F32 | None]:
        named, scores = self._name(layer, None, token)
        if self._waves.tokens == 1:
            return named, scores
        # They are valid until the prediction of the next token.
        return named.copy(), None if scores is None else scores.copy()

    def _read_foreseen(self, token: int) -> tuple[I32, F32 | None]:
        """What was predicted ahead for ``token``, which is selected; valid until the next
        prediction."""
        if not self._executor.foresees:
            return self._foreseen[token]
        scores = None if self.sieve is None else self._executor.read_scores()
        return self._executor.list_foreseen(), scores

    def _list_experts(self) -> list[I32]:
        if self._experts is None:
            return []
        return [self._executor.list_experts().copy() for _ in self._waves.select_tokens()]

    def _list_unforeseen(self, wave: Wave) -> list[I32]:
        late = []
        for chosen, guessed in zip(self._list_experts(), wave.experts or (), strict=False):
            late.append(chosen[~mark_experts(chosen, guessed)])
            self.counters.routed += len(chosen)
            self.counters.foreseen += len(chosen) - len(late[-1])
        return late

    def _compute_waves(self, layer: int, waves: list[Wave]) -> None:
        """Compute ``waves`` and the neurons that they put off."""
        try:
            while waves:
                wave = waves.pop(0)
                self._waves.compute(wave)
                if not len(wave.rest):
                    continue
                if not waves and self._wave is not None and self.cache.free_capacity == 0:
                    # The next layer's neurons, guessed ahead, have taken all slots.
                    following, self._wave = self._wave, None
                    self._waves.abandon(following)
                waves.append(self._waves.begin(layer, wave.owned, wave.rest, wave.by_token))
        except BaseException:
            for wave in waves:
                self._waves.abandon(wave)
            raise

    def end_token(self) -> None:
        self.counters.active += self._executor.count_active()
        if self.sieve is not None and not self._only_resident:
            self.sieve.end_step()

    def _predict(
        self, layer: int, bounds: tuple[int, int | None], late: list[I32] | None, name: Namer
    ) -> tuple[I32, I64 | None, F32 | None]:
        """Neurons within ``bounds`` that ``name`` names for any token, the owners if there are
        several tokens (`HostLoops.unite_named`), and scores to leave some out by."""
        self._reader.advance()
        if self._waves.tokens == 1:
            indices, scores = self._take_named(layer, 0, bounds, late is None, name)
            return indices, None, None if self._sieves_apart else scores
        lists = []
        for token in self._waves.select_tokens():
            if late is not None and not len(late[token]):
                lists.append(late[token])
                continue
            # What a prediction returns is valid until the next one.
            indices, _ = self._take_named(layer, token, bounds, late is None, name)
            lists.append(indices.copy())
        return (*self.cache.loops.unite_named(lists, self.cache.neurons), None)

    def _name(self, layer: int, late: list[I32] | None, token: int) -> tuple[I32, F32 | None]:
        """The neurons that the predictor names for ``token``, of all its experts or of ``late``
        ones, and their scores if they are needed."""
        if self._predictor == "gate":
            return self._executor.predict_gate(layer), None
        own = None if late is None else late[token]
        named = self._executor.predict_low_rank(layer, self._threshold, own)
        return named, None if self.sieve is None else self._executor.read_scores()

    def _take_named(
        self, layer: int, token: int, bounds: tuple[int, int | None], is_whole: bool, name: Namer
    ) -> tuple[I32, F32 | None]:
        """Those neurons of ``token`` that ``name`` tells and that are computed, and their scores;
        ``is_whole``: whether all of its experts are asked for."""
        named, scores = name(token)
        indices = named = _cut(named, *bounds)
        is_sieved = self.sieve is not None and self._sieves_apart and not self._only_resident
        if is_sieved and scores is not None and self.sieve is not None:
            indices = self.cache.leave_out(layer, named, scores, self.sieve)
        if self._only_resident:
            indices = indices.compress(self.cache.locate(layer, indices) != ABSENT)
        self.counters.predicted += len(indices)
        self.counters.possible += self._token_neurons[layer] * (is_whole and bounds[1] is None)
        return indices, scores

    @property
    def waited_s(self) -> float:
        """Seconds that computing waited for neurons."""
        return self._reader.waited_s

    def count_work(self) -> dict[str, float | None]:
        """See `pi2.backends.units.SequenceModel.count_work`."""
        own, layers, sieve = self.counters, self.cache.counters, self.sieve
        return {
            "predicted_neurons": own.predicted,
            "active_neurons": own.active,
            "possible_neurons": own.possible,
            "dense_neurons": self.shares.computed,
            "cache_hits": sum(layer.hits for layer in layers),
            "cache_misses": sum(layer.misses for layer in layers),
            "cache_skips": sum(layer.skips for layer in layers),
            "cache_evictions": sum(layer.evictions for layer in layers),
            "routed_experts": own.routed,
            "foreseen_experts": own.foreseen,
            "score_mass": 0.0 if sieve is None else sieve.mass,
            "left_out_mass": 0.0 if sieve is None else sieve.left_out,
            "gate_reads": self._reader.gate_reads,
            "flash_saved_bytes": self._reader.saved_bytes,
        }

    def abandon(self) -> None:
        """Forget reads and jobs that are under way, after an error or an interrupt."""
        self._jobs.clear()
        self.shares.abandon()
        if self._wave is not None:
            wave, self._wave = self._wave, None
            self._waves.abandon(wave)
        self._stream.abandon()


def _cut(indices: I32, first: int, end: int | None) -> I32:
    """The ``indices`` [n] (ascending) that are at least ``first`` and below ``end``."""
    if first:
        indices = indices[int(indices.searchsorted(first)) :]
    return indices if end is None else indices[: int(indices.searchsorted(end))]
