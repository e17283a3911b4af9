"""The FFN of an MoE model whose tokens compute whole experts (``predictor = "router"``)."""

import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from pi2.arrays import I32, I64, Bits
from pi2.backends.protocol import InputReader, PartAdder, PartGroup
from pi2.engine.experts import DialCounters, RoutingDials, count_common, unite_experts
from pi2.engine.feed_forward import FeedForward
from pi2.engine.waves import Wave
from pi2.memory.expert_slots import ReadAhead
from pi2.memory.granules import PARTS, count_part_neurons
from pi2.memory.policy import ABSENT, unite_named


class NeuronParts:
    """Stored indices [n] (ascending) in parts of ``size``; computed parts are dropped."""

    def __init__(self, indices: I32, size: int) -> None:
        self.indices = indices
        """Of the parts that are left."""
        self.size = size
        self._bounds = [*range(0, len(indices), size), len(indices)]
        self.is_even = True
        """Whether none has been cut in two."""

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def take(self, number: int) -> I32:
        """The part ``number`` of the remaining ones."""
        return self.indices[self._bounds[number] : self._bounds[number + 1]]

    def join(self, numbers: Sequence[int]) -> I32:
        """The parts ``numbers`` (ascending, at least one), one after the other."""
        first, last = numbers[0], numbers[-1]
        if last - first == len(numbers) - 1:
            return self.indices[self._bounds[first] : self._bounds[last + 1]]
        return np.concatenate([self.take(number) for number in numbers])

    def count_before(self, some: I32) -> list[int]:
        """How many of ``some`` [m] (ascending) come before each part."""
        before: list[int] = some.searchsorted(self.indices.take(self._bounds[:-1])).tolist()
        return before

    def find_any(self, marks: Bits, count: int) -> list[bool]:
        """Whether any neuron of each of the first ``count`` parts is in ``marks`` [neurons]."""
        end = self._bounds[count]
        own = marks.take(self.indices[:end])
        found: list[bool] = np.logical_or.reduceat(own, self._bounds[:count]).tolist()
        return found

    def cut(self) -> None:
        """Cut the first part in two, of more than one neuron."""
        half = self._bounds[1] // 2
        assert half, "a part of one neuron"
        self._bounds.insert(1, half)
        self.is_even = False

    def drop(self, count: int) -> None:
        start = self._bounds[count]
        self.indices = self.indices[start:]
        self._bounds = [bound - start for bound in self._bounds[count:]]


class RoutedFeedForward(FeedForward):
    """Computes FFN layers of MoE models, in each the chosen experts."""

    def __init__(self, *arguments: Any, dials: RoutingDials | None = None, **named: Any) -> None:
        """See `FeedForward`; ``experts`` are given. ``dials`` change the router's choice, if the
        executor shows it."""
        super().__init__(*arguments, **named)
        self._dials = dials
        assert self._experts is not None, "the model has no experts"
        self._groups = self._experts.divide(self._cache.granule)
        stride = self._single.arena.shape[1]
        executor = self._executor
        self._adder = executor if isinstance(executor, PartAdder) and executor.parts > 1 else None
        """What computes parts in any order, of a single token."""
        count = partial(count_part_neurons, max(self._token_neurons), self._experts.size, stride)
        self._part_neurons = count()
        """Of one of the parts that are computed in their order."""
        self._most_parts = PARTS if self._adder is None else self._adder.parts
        self._small_part_neurons = count(self._most_parts)
        # Dials ask what is in memory: if times decided that, a prompt would give other texts.
        self.read_ahead = ReadAhead(is_measured=dials is None)
        self._may_look_far = dials is None
        """Whether two layers may be looked ahead at."""
        self._start_s = 0.0
        self._begun: dict[int, list[Wave]] = {}
        """Work that was begun ahead, by layer."""

    _ahead: Sequence[Wave] = ()
    """Work that was begun ahead of the current layer."""
    _now: Wave | None = None
    """Work that was begun since its routing was known."""

    def _begin_ffn(self, layer: int, *, is_guess: bool = False) -> None:
        """Give the FFN of ``layer`` its input, and let the plan's settings change its routing."""
        executor, dials = self._executor, self._dials
        executor.begin_ffn(layer)
        if dials is None or not isinstance(executor, InputReader):
            return
        counters = DialCounters() if is_guess else self.dial_counters
        there, begun = self._find_there(layer), 0 if is_guess else self._count_begun(layer)
        inputs, routes = executor.read_router_input(), executor.read_routes()
        dials.apply(layer, inputs, routes, there, counters, begun=begun)

    def _find_there(self, layer: int) -> Bits:
        """Which experts [experts] are in memory, or on their way, with all of their neurons."""
        slots = self._cache.find_slots(layer, 0, self._cache.neurons)
        present = self._groups.list_all(layer, slots) != ABSENT
        there: Bits = present.all(axis=1)
        return there

    def _count_begun(self, layer: int) -> int:
        """Experts of ``layer`` that have been read ahead, or a part of them."""
        if not self._ahead:
            return 0
        missing = np.zeros(self._cache.neurons, np.int32)
        for wave in self._ahead:
            missing[wave.found.missing] = 1
        return int(self._groups.list_all(layer, missing).any(axis=1).sum())

    def begin_step(self, tokens: int) -> None:
        """Let what follows be about so many tokens, each of another sequence."""
        super().begin_step(tokens)
        self._start_s = time.perf_counter()

    def end_token(self) -> None:
        """Count what a token activated, and whether looking ahead pays."""
        super().end_token()
        if self._look_ahead != "none" and not self._only_resident:
            self.read_ahead.end_token(time.perf_counter() - self._start_s)
            self.counters.without_ahead = self.read_ahead.idle_tokens

    def prepare_sparse(self, layer: int) -> None:
        """Begin to read what the layer's router would choose now, if the plan looks ahead and
        nothing has been begun."""
        if layer not in self._begun and self._looks_ahead(layer):
            self._prefetch(layer, self._guess(layer))
        self._reader.advance()

    def _looks_ahead(self, layer: int) -> bool:
        """Whether reads of ``layer`` begin before its routing is known."""
        if self._look_ahead == "none" or layer >= self._layers or self._only_resident:
            return False
        return self.read_ahead.is_on and not self._cache.is_whole(layer)

    def _guess(self, layer: int) -> list[I32]:
        """The experts of each token that the router of ``layer`` would choose now."""
        self._begin_ffn(layer, is_guess=True)
        return self._list_experts()

    def _guess_following(self, layer: int) -> dict[int, list[I32]]:
        """What the routers of the layers after ``layer`` would choose now: of the next one, and of
        the one after it if the drive has nothing to do."""
        if self._look_ahead != "layer":
            return {}
        following = [layer + 1]
        if self._may_look_far and self._reader.is_idle():
            following.append(layer + 2)
        return {later: self._guess(later) for later in following if self._looks_ahead(later)}

    def _prefetch(self, layer: int, guessed: list[I32]) -> None:
        owned, united = self._count_owned(layer), unite_experts(guessed)
        begun = self._begun.setdefault(layer, [])
        indices = self._leave_begun(self._groups.list_neurons(layer, united, owned), begun)
        wave = self._begin_wave(layer, owned, indices)
        wave.named, wave.rest = indices[: len(indices) - len(wave.rest)], indices[:0]
        wave.experts = guessed
        begun.append(wave)

    def run_sparse(self, layer: int) -> None:
        """Compute the neurons of the experts that the router chose, for every token of a step."""
        executor = self._executor
        self._ahead = self._begun.pop(layer, ())
        guessed = self._guess_following(layer)
        owned = self._begin_layer(layer)
        chosen = self._list_experts()
        if self._ahead:
            self._count_foreseen(chosen, self._ahead)
        self.counters.possible += self._token_neurons[layer] * len(chosen)
        self._compute_chosen(layer, chosen, range(owned, self._cache.neurons), guessed)
        for missed in self.shares.finish(self._jobs.pop()):
            # What a lost unit owned is read like any other neuron.
            self._compute_chosen(layer, chosen, missed)
        executor.end_ffn(layer)

    def _compute_chosen(
        self,
        layer: int,
        chosen: Sequence[I32],
        bounds: range,
        guessed: dict[int, list[I32]] | None = None,
    ) -> None:
        """Compute the neurons of each token's ``chosen`` experts whose stored indices are within
        ``bounds``; meanwhile begin with the neurons that later layers are ``guessed`` to need."""
        cache, by_token = self._cache, None
        adder = self._adder if len(chosen) == 1 else None
        found = [self._list_own(layer, own, bounds) for own in chosen]
        indices = found[0]
        if len(chosen) == 1:
            self.counters.predicted += len(indices) * cache.granule
        else:
            indices, by_token = unite_named(found, cache.neurons, cache.loops)
            self.counters.predicted += sum(map(len, found)) * cache.granule
        whole = self._part_neurons if adder is None else self._small_part_neurons
        parts = NeuronParts(indices, max(1, -(-whole // cache.granule)))
        while len(parts):
            count = self._begin_parts(layer, bounds.start, parts, by_token)
            if count == len(parts) and guessed:
                # This layer's reads come first.
                for later, experts in guessed.items():
                    self._prefetch(later, experts)
                guessed = None
            if adder is not None and parts.is_even:
                self._compute_parts(adder, parts, count)
            else:
                for number in range(count):
                    self._compute_part(parts.take(number))
            parts.drop(count)
            wave, self._now = self._now, None
            assert wave is not None
            if wave.held:
                cache.release(wave.found)
        self._end_ahead()

    def _list_own(self, layer: int, experts: I32, bounds: range) -> I32:
        """The granules of ``experts``, or those in memory."""
        found = self._groups.list_neurons(layer, experts, bounds.start, bounds.stop)
        return self._keep_resident(layer, found) if self._only_resident else found

    def _begin_parts(self, layer: int, owned: int, parts: NeuronParts, by_token: I64 | None) -> int:
        """Begin with as many ``parts`` as the cache has room for, and return how many; one is cut
        in two if a lost unit's neurons leave no room."""
        cache, new = self._cache, parts.indices
        count = most = min(len(parts), self._most_parts)
        while not cache.is_whole(layer):
            new = self._leave_begun(parts.indices, self._ahead)
            if len(new) <= cache.free_capacity:
                count = most
                break
            starts = [*parts.count_before(new), len(new)]
            cold = np.cumsum([cache.count_cold(layer, new[a:b]) for a, b in pairwise(starts)])
            fitting = np.searchsorted(cold, cache.free_capacity, side="right")
            count = min(int(fitting), most)
            if count:
                break
            if self._begun:
                # Neurons of later layers, guessed ahead, have taken the slots.
                farthest = max(self._begun)
                while self._begun[farthest]:
                    self._abandon_wave(self._begun[farthest].pop())
                del self._begun[farthest]
            elif self._ahead:
                self._end_ahead()
            else:
                assert any(unit.lost for unit in self.shares.units.values()), (
                    "the cache has no room for a part"
                )
                parts.cut()
        if count < len(parts):
            new = new[: parts.count_before(new)[count]]
        self._now = self._begin_wave(layer, owned, new, by_token)
        return count

    def _leave_begun(self, indices: I32, begun: Sequence[Wave]) -> I32:
        """``indices`` without those neurons that ``begun`` have found or begun."""
        if not begun:
            return indices
        is_new = np.ones(self._cache.neurons, np.bool_)
        for wave in begun:
            if wave.named is not None:
                is_new[wave.named] = False
        return indices.compress(is_new.take(indices))

    def _compute_part(self, part: I32) -> None:
        assert self._now is not None
        self._wait_for_part(part)
        slots = self._cache.locate(self._now.layer, part)
        self._add_neurons(self._now, slots, part)

    def _compute_parts(self, adder: PartAdder, parts: NeuronParts, count: int) -> None:
        """Compute the first ``count`` of ``parts``, and add them up in their order: first the
        resident ones, then the read ones, of which the last is computed by itself."""
        missing = self._find_missing(parts, count)
        groups = [[number for number in range(count) if not missing[number]]]
        groups += _split_last([number for number in range(count) if missing[number]])
        groups = [group for group in groups if group]
        assert self._now is not None
        cache, layer = self._cache, self._now.layer
        for turn, group in enumerate(groups):
            if missing[group[0]]:
                self._wait_for_part(parts.take(group[-1]))
            self._reader.advance()
            indices = parts.join(group)
            slots = cache.locate(layer, indices)
            finished = count if turn == len(groups) - 1 else 0
            own = PartGroup(group, parts.size, finished)
            adder.add_parts(layer, self._single.arena, slots, indices, cache.granule, own)

    def _find_missing(self, parts: NeuronParts, count: int) -> list[bool]:
        """Whether something of each of the first ``count`` of ``parts`` is on its way."""
        pending = [
            wave.pending.indices
            for wave in (*self._ahead, self._now)
            if wave is not None and wave.pending is not None
        ]
        if not pending:
            return [False] * count
        is_missing = np.zeros(self._cache.neurons, np.bool_)
        for indices in pending:
            is_missing[indices] = True
        return parts.find_any(is_missing, count)

    def _wait_for_part(self, part: I32) -> None:
        """Wait until all neurons of ``part``, and all earlier requests, have arrived."""
        last = int(part[-1])
        for wave in (*self._ahead, self._now):
            if wave is not None:
                self._wait(wave, last)

    def _wait(self, wave: Wave, last: int) -> None:
        """Wait for the clusters that begin at or before the stored index ``last``."""
        pending = wave.pending
        if pending is None:
            return
        end, clusters = wave.taken, pending.clusters
        while end < len(clusters):
            start = clusters[end].start
            if start < len(pending.indices) and int(pending.indices[start]) > last:
                break
            end += 1
        if end > wave.taken:
            self._reader.finish(pending, wave.taken, end - wave.taken)
            wave.taken = end

    def _end_ahead(self) -> None:
        for wave in self._ahead:
            self._wait(wave, self._cache.neurons)
        ahead, self._ahead = self._ahead, ()
        for wave in ahead:
            if wave.held:
                self._cache.release(wave.found)

    def _count_foreseen(self, chosen: Sequence[I32], ahead: Sequence[Wave]) -> None:
        for token, own in enumerate(chosen):
            guessed = unite_experts([wave.experts[token] for wave in ahead if wave.experts])
            self.counters.routed += len(own)
            self.counters.foreseen += count_common(own, guessed)

    def abandon(self) -> None:
        """Forget reads and jobs that are under way, after an error or an interrupt."""
        later = [wave for waves in self._begun.values() for wave in waves]
        for wave in (self._now, *self._ahead, *later):
            if wave is not None:
                self._abandon_wave(wave)
        self._now, self._ahead = None, ()
        self._begun.clear()
        super().abandon()


def _split_last(numbers: list[int]) -> list[list[int]]:
    """All of ``numbers`` but the last, and that one."""
    return [numbers[:-1], numbers[-1:]]
