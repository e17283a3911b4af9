"""What a replacement policy of the cold-neuron cache is, and the policies by their names."""

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np

from pi2.arrays import F32, I32, I64, Bits
from pi2.memory.host_loops import CacheTables, FoundNeurons, HostLoops, LayerPlace
from pi2.memory.read_sieve import ReadLimits


def unite_named(lists: Sequence[I32], neurons: int, loops: HostLoops | None) -> tuple[I32, I64]:
    """Return the neurons of at most 64 ``lists``, each once and ascending, and a number for each of
    all ``neurons``: its bit k is set if list k has the neuron."""
    named = np.empty(neurons, np.int64)
    if loops is not None:
        return loops.unite_named(lists, named), named
    named[:] = 0
    for number, own in enumerate(lists):
        named[own] |= np.left_shift(np.int64(1), number)
    return np.flatnonzero(named).astype(np.int32), named


ABSENT = -1

PolicyName = Literal["lfu", "lru"]


class Policy(Protocol):
    """Chooses slots for new neurons; a *key* is layer x neurons per layer + stored index."""

    def touch(self, slots: I32, keys: I64) -> None:
        """Begin a request that finds ``keys`` [n] (distinct) in ``slots`` [n]."""

    def replace(self, keys: I64, held: Bits) -> I32:
        """Distinct slots [n] for absent ``keys`` [n]; ``held`` and just used ones stay."""

    def adopt(self, keys: I64, order: I32) -> None:
        """Begin anew: slot i holds ``keys[i]`` (ABSENT: it is empty); ``order`` has all slots, the
        least needed neuron's first."""

    def drop(self, slots: I32) -> None:
        """``slots`` [n] are empty now."""

    def list_order(self) -> I32:
        """All slots, the least needed neuron's first."""

    def renumber(self, source: I32, keys: I64) -> None:
        """Slot i is from now on what slot ``source[i]`` was (ABSENT: a new one), and holds
        ``keys[i]`` (ABSENT: it is empty)."""


def carry_over(values: I64, source: I32, empty: int) -> I64:
    """``values[source]``, and ``empty`` where ``source`` is ABSENT."""
    result = np.full(len(source), empty, np.int64)
    known = source != ABSENT
    result[known] = values[source[known]]
    return result


def make_policy(name: PolicyName, capacity: int, keys: int, expected: F32 | None = None) -> Policy:
    """The policy of a plan with ``capacity`` empty slots; ``expected`` [keys]: uses per token."""
    # Imported here, because the policies share the types above.

    if name == "lru":
        return LeastRecentlyUsed(capacity)
    return LeastFrequentlyUsed(capacity, keys, expected)


class LeastRecentlyUsed:
    """LRU without a linked list: uses are appended to a queue, and an entry counts while its time
    is its slot's last; O(1) per use, amortised."""

    def __init__(self, capacity: int) -> None:
        assert capacity >= 0
        self._start(np.arange(capacity, dtype=np.int32))

    def _start(self, order: I32) -> None:
        """Begin with all slots in ``order``, the next to go first."""
        capacity = len(order)
        length = max(4 * capacity, 1024)
        self._slots = np.zeros(length, np.int32)
        self._times = np.zeros(length, np.int64)
        self._last_use = np.zeros(capacity, np.int64)
        self._last_use[order] = np.arange(capacity) - capacity
        self._slots[:capacity] = order
        self._times[:capacity] = np.arange(capacity) - capacity
        self._first_time = -capacity
        self._head, self._tail = 0, capacity
        self._clock = 0

    def adopt(self, keys: I64, order: I32) -> None:
        self._start(order)

    def touch(self, slots: I32, keys: I64) -> None:
        self._clock += 1
        self._append(slots)

    def _append(self, slots: I32) -> None:
        count = len(slots)
        if count == 0:
            return
        if self._tail + count > len(self._slots):
            self._compact()
        self._last_use[slots] = self._clock
        self._slots[self._tail : self._tail + count] = slots
        self._times[self._tail : self._tail + count] = self._clock
        self._tail += count

    def replace(self, keys: I64, held: Bits) -> I32:
        count = len(keys)
        taken = np.empty(0, np.int32)
        kept: list[I32] = []
        while len(taken) < count:
            assert self._head < self._tail, "more slots are wanted than may be given away"
            window = slice(self._head, min(self._head + 2 * count + 64, self._tail))
            slots, times = self._slots[window], self._times[window]
            valid = np.flatnonzero(self._last_use[slots] == times)
            free = valid[~held[slots[valid]]][: count - len(taken)]
            done = int(free[-1]) + 1 if len(taken) + len(free) == count else len(slots)
            taken = np.concatenate([taken, slots[free]])
            passed = slots[valid[valid < done]]
            kept.append(passed[held[passed]])
            self._head += done
        # What is held is in use: it goes to the end of the queue.
        self._append(np.concatenate([*kept, taken]) if kept else taken)
        return taken

    def drop(self, slots: I32) -> None:
        """Put ``slots`` at the head of the queue."""
        first = self._head - len(slots)
        if first >= 0:
            # Where others were taken from.  Times before all others, and no two alike.
            self._first_time -= len(slots)
            times = np.arange(self._first_time, self._first_time + len(slots))
            self._slots[first : self._head], self._times[first : self._head] = slots, times
            self._last_use[slots] = times
            self._head = first
            return
        order = self.list_order()
        dropped = np.zeros(len(self._last_use), bool)
        dropped[slots] = True
        self._start(np.concatenate([slots, order[~dropped[order]]]).astype(np.int32))

    def renumber(self, source: I32, keys: I64) -> None:
        new_of_old = np.full(len(self._last_use), ABSENT, np.int32)
        known = np.flatnonzero(source != ABSENT).astype(np.int32)
        new_of_old[source[known]] = known
        moved = new_of_old[self.list_order()]
        empty = np.flatnonzero(source == ABSENT).astype(np.int32)
        self._start(np.concatenate([empty, moved[moved != ABSENT]]))

    def list_order(self) -> I32:
        self._compact()
        return self._slots[: self._tail].copy()

    def _compact(self) -> None:
        slots = self._slots[self._head : self._tail]
        times = self._times[self._head : self._tail]
        valid = self._last_use[slots] == times
        count = int(np.count_nonzero(valid))
        self._slots[:count], self._times[:count] = slots[valid], times[valid]
        self._head, self._tail = 0, count


_HALF_LIFE_TOKENS = 64.0
"""Tokens after which a use counts half, if a token uses the expected number of neurons."""
_PRIOR_TOKENS = 16.0
"""How many tokens the expectation is worth."""
_UNKNOWN_USE = 0.1
"""Share of the neurons that a token uses, if nothing is known."""
_CANDIDATES = 64
"""One slot of so many is a candidate for the next evictions."""
_FEW_CANDIDATES = 16
"""Candidates of a small cache of experts; one slot of as many at most."""
_SAMPLE = 4096
"""Slots, at least, whose scores tell what a low one is."""
_MOST_WEIGHT = 1e6
_TRIFLE = 1e-3
_EMPTY = -1.0
"""Score of a slot without a neuron: it goes first."""
_NO_SLOTS = np.empty(0, np.int32)
_STEEPNESS = 0.6
"""Exponent of the power law of activations over stored places: 26 to 43 % of a layer's neurons make
80 % of its activations."""


def expect_uses(layers: int, neurons: int, *, share: float = _UNKNOWN_USE) -> F32:
    """Uses per token [layers, neurons], by hotness, if a token uses ``share`` of them."""
    places = ((np.arange(neurons) + 0.5) / neurons) ** -_STEEPNESS
    uses = np.minimum(places * (share / places.mean()), 1.0)
    return np.tile(uses.astype(np.float32), (layers, 1))


class LeastFrequentlyUsed:
    """LFU with ageing: requests take slots from a list of the lowest counts, made now and then."""

    def __init__(self, capacity: int, keys: int, expected: F32 | None = None) -> None:
        """``expected`` [keys]: uses of each neuron per token."""
        if expected is None:
            expected = np.zeros(0, np.float32)
        uses_per_token = float(expected.sum()) or _UNKNOWN_USE * keys
        counts = np.zeros(keys, np.float32)
        counts[: len(expected)] = expected * np.float32(_PRIOR_TOKENS)
        self.tables = CacheTables(
            counts=counts,
            scores=np.full(capacity, _EMPTY, np.float32),
            used_at=np.zeros(capacity, np.int64),
            growth=np.log(2.0) / (_HALF_LIFE_TOKENS * max(uses_per_token, 1.0)),
            slot_of=_NO_SLOTS,
            owner=np.empty(0, np.int64),
            held=np.empty(0, np.bool_),
            candidates=_NO_SLOTS,
        )

    def adopt(self, keys: I64, order: I32) -> None:
        full = keys != ABSENT
        self.tables.scores = np.full(len(keys), _EMPTY, np.float32)
        self.tables.scores[full] = self.tables.counts[keys[full]]
        # Neurons that are expected alike go in order.
        self.tables.scores[order] += np.arange(len(order)) * np.float32(
            _TRIFLE / max(1, len(order))
        )
        self.tables.candidates = np.empty(0, np.int32)

    def touch(self, slots: I32, keys: I64) -> None:
        self.tables.clock += 1
        self.tables.scores[slots] = self._count(keys)
        self.tables.used_at[slots] = self.tables.clock
        self._let_weight_grow(len(slots))

    def _count(self, keys: I64) -> F32:
        """Count a use of ``keys`` [n]; return their counts [n]."""
        counts = self.tables.counts.take(keys)
        counts += np.float32(self.tables.weight)
        self.tables.counts[keys] = counts
        return counts

    def _let_weight_grow(self, uses: int) -> None:
        """Let new uses count more than the last ``uses``."""
        self.tables.weight *= 1.0 + self.tables.growth * uses
        if self.tables.weight > _MOST_WEIGHT:
            scale = np.float32(1.0 / self.tables.weight)
            self.tables.counts *= scale
            self.tables.scores[self.tables.scores > 0] *= scale
            self.tables.weight = 1.0

    def replace(self, keys: I64, held: Bits) -> I32:
        count, counts = len(keys), self._count(keys)
        taken = self._take(count, held)
        self.tables.scores[taken] = counts[: len(taken)]
        if len(taken) < count:
            self._list_candidates(count - len(taken), held)
            others = self._take(count - len(taken), held)
            self.tables.scores[others] = counts[len(taken) :]
            taken = np.concatenate([taken, others])
        self._let_weight_grow(count)
        return taken

    def find(
        self,
        loops: HostLoops,
        place: LayerPlace,
        indices: I32,
        room: int,
        marks: F32 | None = None,
        limits: ReadLimits | None = None,
    ) -> FoundNeurons:
        """Find ``indices`` [n] (ascending) of a layer, and give slots to missing ones, as ``touch``
        and ``replace`` do; see `HostLoops.find_neurons`."""
        self.tables.clock += 1
        found = loops.find_neurons(self.tables, place, indices, room, marks, limits)
        self._let_weight_grow(found.present - found.hot)
        if not found.missing:
            return found
        self.tables.candidates = self.tables.candidates[found.seen :]
        left = found.left
        if found.placed < found.missing:
            count, placed = len(found.lists) // 4, found.placed
            missing, slots, cold = (
                found.lists[start + placed : start + found.missing]
                for start in (count, 2 * count, 3 * count + found.present - found.hot)
            )
            left += self._place(loops, place, missing, cold)
            np.add(cold, np.int32(place.first_cold), out=slots)
        self._let_weight_grow(found.missing)
        return found._replace(placed=found.missing, left=left)

    def _place(self, loops: HostLoops, place: LayerPlace, missing: I32, given: I32) -> int:
        """Give cold slots, ``given`` [m], to ``missing`` [m], of new lists of candidates; return
        how many neurons left."""
        placed = evicted = 0
        while placed < len(missing):
            self._list_candidates(len(missing) - placed, self.tables.held)
            more, seen, left = loops.place_neurons(
                self.tables, place, missing[placed:], given[placed:]
            )
            self.tables.candidates = self.tables.candidates[seen:]
            placed += more
            evicted += left
        return evicted

    def _take(self, count: int, held: Bits) -> I32:
        """Take up to ``count`` slots from the list."""
        parts = []
        while count and len(self.tables.candidates):
            window = self.tables.candidates[: 2 * count + 16]
            unused = self.tables.used_at.take(window) <= self.tables.listed_at
            (fit,) = np.greater(unused, held.take(window)).nonzero()
            fit = fit[:count]
            done = len(window) if len(fit) < count else int(fit[-1]) + 1
            self.tables.candidates = self.tables.candidates[done:]
            parts.append(window.take(fit))
            count -= len(fit)
        taken: I32 = parts[0] if len(parts) == 1 else np.concatenate([_NO_SLOTS, *parts])
        self.tables.used_at[taken] = self.tables.clock
        return taken

    def _list_candidates(self, least: int, held: Bits) -> None:
        """List the slots with the lowest counts, at least ``least`` that may be given away."""
        scores = self.tables.scores
        few = min(_FEW_CANDIDATES, len(scores) // _FEW_CANDIDATES)
        size = max(least, few, len(scores) // _CANDIDATES)
        # Where they end need not be known exactly: some of the slots tell.
        sample = scores[:: max(1, len(scores) // _SAMPLE)]
        while True:
            is_all = size >= len(scores)
            place = -(-min(size, len(scores)) * len(sample) // max(1, len(scores))) - 1
            limit = np.inf if is_all else np.partition(sample, place)[place]
            lowest = (scores <= limit).nonzero()[0].astype(np.int32)
            unused = self.tables.used_at.take(lowest) < self.tables.clock
            lowest = lowest.compress(np.greater(unused, held.take(lowest)))
            if len(lowest) >= least:
                break
            assert not is_all, "more slots are wanted than may be given away"
            size *= 4
        self.tables.candidates = lowest.take(np.argsort(scores.take(lowest), kind="stable"))
        self.tables.listed_at = self.tables.clock

    def drop(self, slots: I32) -> None:
        self.tables.scores[slots] = _EMPTY
        self.tables.used_at[slots] = 0
        others = self.tables.candidates[~np.isin(self.tables.candidates, slots)]
        self.tables.candidates = np.concatenate([slots, others])

    def list_order(self) -> I32:
        return np.argsort(self.tables.scores, kind="stable").astype(np.int32)

    def renumber(self, source: I32, keys: I64) -> None:
        full = keys != ABSENT
        self.tables.scores = np.full(len(source), _EMPTY, np.float32)
        self.tables.scores[full] = self.tables.counts[keys[full]]
        self.tables.used_at = carry_over(self.tables.used_at, source, 0)
        self.tables.candidates = np.empty(0, np.int32)
