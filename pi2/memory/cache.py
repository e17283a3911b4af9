"""The neuron cache: which neurons are in memory, and in which slot of the arena.

One arena [slots, stride] holds them all. The hot neurons of layer 0, 1, ... come first, contiguous
for each layer and in stored order, as dense kernels need them; they leave only when the hot region
is made smaller. If a dense unit owns a layer's first neurons, the hot ones here follow them; the
owned ones are needed only if the unit is lost. The slots behind them are the cold cache, shared by
all layers, one neuron a slot."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from pi2.arrays import F32, I32, U8
from pi2.memory.host_loops import HostLoops, LayerPlace
from pi2.memory.policy import ABSENT, PolicyName, Replacement
from pi2.memory.read_sieve import ReadSieve


@dataclass(slots=True)
class LayerCounters:
    """What happened to the neurons that a layer asked for."""

    hits: int = 0
    misses: int = 0
    skips: int = 0
    """Neurons that were missing and not worth a read."""
    evictions: int = 0
    read_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class Lookup:
    """Slots of the neurons of one request. Not frozen: one is made per layer and token."""

    resident_slots: I32
    """Slots [h] of those in memory."""
    missing: I32
    """Stored indices [m] of those to be read."""
    missing_slots: I32
    """Slots [m] that they have been given."""
    cold: I32
    """Cold slots among all, counted from the first cold one."""
    rest: I32
    """Stored indices of the request's last neurons, for which no slot was free."""
    skipped: int = 0
    """Neurons that were missing and not worth a read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """Neurons of a layer, next to each other in the store, that go to slots next to each other."""

    layer: int
    first: int
    """Stored index of the first."""
    slots: range


class NeuronCache:
    """Maps (layer, stored index) to slots of ``arena`` [slots, stride]."""

    def __init__(
        self,
        arena: U8,
        hot: Sequence[range],
        neurons: int,
        loops: HostLoops,
        *,
        policy: PolicyName = "lru",
        expected: F32 | None = None,
        give_back: Callable[[U8], None] = lambda unused: None,
    ) -> None:
        """``neurons`` of a layer; ``hot``: indices of its hot ones; ``loops`` look them up;
        ``expected`` [layers, neurons]: uses per token; ``give_back`` gets unused arena parts."""
        self.arena, self.neurons, self.loops = arena, neurons, loops
        self._give_back = give_back
        layers = len(hot)
        self._first = [own.start for own in hot]
        bases = [0, *accumulate(map(len, hot))]
        self.hot_slots = [range(*bounds) for bounds in pairwise(bases)]
        self._first_cold = bases[-1]
        self.cold_capacity = len(arena) - bases[-1]
        assert self.cold_capacity >= 0, (bases[-1], len(arena))
        self._slot_of = np.full((layers, neurons), ABSENT, np.int32)
        # Views of one layer, and take and compress, are twice as fast as general indexing.
        self._rows = list(self._slot_of)
        self._keys = self._slot_of.reshape(-1)
        for layer, slots in enumerate(self.hot_slots):
            self._slot_of[layer, self.hot_range(layer)] = np.arange(slots.start, slots.stop)
        self._held_count = 0
        self._replacement = Replacement(
            policy,
            loops,
            self._keys,
            self.cold_capacity,
            None if expected is None else expected.reshape(-1),
        )
        self._tables = self._replacement.tables
        self._places = [
            LayerPlace(
                row, self.hot_range(i), self.hot_slots[i].start, i * neurons, self._first_cold
            )
            for i, row in enumerate(self._rows)
        ]
        self.counters = [LayerCounters() for _ in range(layers)]

    def hot_range(self, layer: int) -> slice:
        first = self._first[layer]
        return slice(first, first + len(self.hot_slots[layer]))

    def is_whole(self, layer: int) -> bool:
        return len(self.hot_slots[layer]) == self.neurons

    def is_all_hot(self, layer: int, indices: I32) -> bool:
        """Whether ``indices`` [n] (ascending) are hot because all later neurons are."""
        hot = self.hot_range(layer)
        if hot.stop < self.neurons:
            return False
        return hot.start == 0 or len(indices) == 0 or int(indices[0]) >= hot.start

    @property
    def absent_capacity(self) -> int:
        """Cold slots that all neurons but the hot ones would take."""
        return self._slot_of.size - sum(len(slots) for slots in self.hot_slots)

    def find_slots(self, layer: int, first: int, count: int) -> I32:
        """Return where the neurons ``first``, ``first + 1``, ... of ``layer`` are, [count]; ABSENT
        for those on flash only."""
        return self._slot_of[layer, first : first + count]

    def locate(self, layer: int, indices: I32) -> I32:
        """Return the slots of the neurons ``indices`` [n] of ``layer``, in their order; ABSENT for
        those on flash only."""
        return self._rows[layer].take(indices)

    def find_indices(self, layer: int, slots: I32) -> I32:
        hot = slots - np.int32(self.hot_slots[layer].start - self._first[layer])
        if self.cold_capacity == 0 or self.is_whole(layer):
            return hot
        cold = slots - np.int32(self._first_cold)
        owners = self._tables.owner[np.maximum(cold, 0)] - layer * self.neurons
        return np.where(cold < 0, hot, owners).astype(np.int32)

    @property
    def free_capacity(self) -> int:
        return self.cold_capacity - self._held_count

    def leave_out(self, layer: int, indices: I32, scores: F32, sieve: ReadSieve) -> I32:
        """Return ``indices`` [n] (ascending) without missing neurons whose ``scores`` [neurons] are
        not worth a read to ``sieve``."""
        first = int(indices.searchsorted(self.hot_range(layer).stop))
        others = indices[first:]
        missing = self._rows[layer].take(others) == ABSENT
        named = scores.take(indices)
        kept, tried = sieve.choose(others, missing, named[first:])
        sieve.note(named, named[first:].compress(~kept), tried)
        skips = len(others) - int(np.count_nonzero(kept))
        self.counters[layer].skips += skips
        return np.concatenate([indices[:first], others.compress(kept)]) if skips else indices

    def look_up(
        self, layer: int, indices: I32, scores: F32 | None = None, sieve: ReadSieve | None = None
    ) -> Lookup:
        """Find ``indices`` [n] and give slots to missing ones, with ``scores`` and ``sieve`` only
        to those worth it. Ends before a cold one without a slot (``Lookup.rest``); the caller reads
        the missing ones."""
        counters = self.counters[layer]
        hot, start = self.hot_range(layer), self.hot_slots[layer].start
        if len(indices) == 0 or self.is_all_hot(layer, indices):
            counters.hits += len(indices)
            none = indices[:0]
            resident = indices + np.int32(start - hot.start)
            return Lookup(
                resident_slots=resident, missing=none, missing_slots=none, cold=none, rest=none
            )
        skipped, limits = 0, None if sieve is None else sieve.limits
        # Where there may be too little room, what is left for later is of those worth a read.
        if scores is not None and sieve is not None and len(indices) > self.free_capacity:
            wanted = self.leave_out(layer, indices, scores, sieve)
            indices, scores, skipped = wanted, None, len(indices) - len(wanted)
        found = self._replacement.find(
            self._places[layer], indices, self.free_capacity, scores, limits
        )
        if scores is not None and sieve is not None:
            sieve.count(len(indices), found.mass, found.left_out_mass, found.tried_mass)
        lists, count, missing = found.lists, len(indices), found.missing
        cold = 3 * count
        counters.skips += found.skipped
        counters.hits += found.present
        counters.misses += missing
        counters.evictions += found.left
        counters.read_bytes += missing * self.arena.shape[1]
        return Lookup(
            resident_slots=lists[: found.present],
            missing=lists[count : count + missing],
            missing_slots=lists[2 * count : 2 * count + missing],
            cold=lists[cold : cold + found.present - found.hot + missing],
            rest=indices[found.taken :].copy(),
            skipped=skipped + found.skipped,
        )

    def count_taken(self, layer: int, indices: I32) -> int:
        """Return how many of ``indices`` [n] (ascending) may be looked for without more cold ones
        among them than free slots."""
        end, free = len(indices), self.free_capacity
        if end <= free:
            return end
        hot = self.hot_range(layer)
        below, above = np.searchsorted(indices, (hot.start, hot.stop)).tolist()
        return int(min(above + free - below, end) if below <= free else free)

    def resize_cold(self, capacity: int) -> None:
        """Set the number of cold slots between tokens; the policy chooses what goes."""
        assert not self._held_count, "neurons are in use"
        assert self._first_cold + capacity <= len(self.arena), "the arena has no more cold slots"
        if capacity < self.cold_capacity:
            self._shrink_cold(self.cold_capacity - capacity)
        elif capacity > self.cold_capacity:
            source = np.full(capacity, ABSENT, np.int32)
            source[: self.cold_capacity] = np.arange(self.cold_capacity)
            self._renumber(source)

    def _shrink_cold(self, fewer: int) -> None:
        """Give up the last ``fewer`` cold slots."""
        capacity = self.cold_capacity - fewer
        order = self._replacement.list_order()
        owner = self._tables.owner
        kept = np.sort(order[owner[order] != ABSENT][-capacity:] if capacity else order[:0])
        source = np.full(capacity, ABSENT, np.int32)
        stay = kept[kept < capacity]
        source[stay] = stay
        moved = kept[kept >= capacity]
        source[np.flatnonzero(source == ABSENT)[: len(moved)]] = moved
        # Not `setdiff1d`, which takes seconds for millions of slots.
        goes = owner != ABSENT
        goes[kept] = False
        gone = np.flatnonzero(goes)
        lost = np.bincount(owner[gone] // self.neurons, minlength=len(self.counters))
        for counters, count in zip(self.counters, lost.tolist(), strict=True):
            counters.evictions += count
        self._keys[owner[gone]] = ABSENT
        targets = np.flatnonzero(source >= capacity)
        first = self._first_cold
        self.arena[first + targets] = self.arena[first + moved]
        self._renumber(source)
        self._give_back(self.arena[first + capacity : first + capacity + fewer])

    def _renumber(self, source: I32) -> None:
        """Cold slot i is what slot ``source[i]`` was."""
        self._replacement.renumber(source)
        owner = self._tables.owner
        self.cold_capacity = len(source)
        taken = np.flatnonzero(owner != ABSENT)
        self._keys[owner[taken]] = taken + self._first_cold

    def hold(self, found: Lookup) -> None:
        """Keep neurons until all who hold them have released them: they are in use, or on their
        way from flash."""
        if len(found.cold):  # numpy takes long over nothing
            held = self._tables.held
            held.put(found.cold, held.take(found.cold) + 1)
            self._held_count += len(found.cold)

    def release(self, found: Lookup) -> None:
        """Undo ``hold``, before any of them is forgotten."""
        if len(found.cold):
            held = self._tables.held
            held.put(found.cold, held.take(found.cold) - 1)
            self._held_count -= len(found.cold)

    def forget(self, layer: int, missing: I32, *, unread_bytes: int = 0) -> None:
        """Drop ``missing`` [m] neurons that were not read, or not the last ``unread_bytes`` of
        each: nothing may compute with them."""
        self.counters[layer].read_bytes -= len(missing) * unread_bytes
        slots = self._slot_of[layer, missing] - self._first_cold
        self._tables.owner[slots] = ABSENT
        self._slot_of[layer, missing] = ABSENT
        self._replacement.drop(slots)

    def fill(self, layers: Collection[int] | None = None) -> Iterator[Filling]:
        """Give cold slots of an empty cache to neurons behind the hot ones, equally per layer."""
        assert (self._tables.owner == ABSENT).all(), "only an empty cache is filled"
        firsts = np.array([self.hot_range(layer).stop for layer in range(len(self.hot_slots))])
        rest = self.neurons - firsts
        if layers is not None:
            rest[[layer for layer in range(len(rest)) if layer not in layers]] = 0
        room = min(self.cold_capacity, int(rest.sum()))
        ends = np.cumsum(rest) * room // max(1, int(rest.sum()))
        places = np.full(self.cold_capacity, self.neurons, np.int64)
        start = 0
        for layer, (first, end) in enumerate(zip(firsts.tolist(), ends.tolist(), strict=True)):
            count = end - start
            indices = np.arange(first, first + count)
            slots = range(self._first_cold + start, self._first_cold + end)
            places[start:end] = indices
            self._tables.owner[start:end] = indices + layer * self.neurons
            self._slot_of[layer, first : first + count] = np.arange(slots.start, slots.stop)
            start = end
            if count:
                yield Filling(layer=layer, first=first, slots=slots)
        # Least needed: empty slots, then the neurons that are last in the stored order.
        self._replacement.adopt(np.argsort(-places, kind="stable").astype(np.int32))
