"""The policy ``lru``: what has not been used for longest goes."""

from __future__ import annotations

import numpy as np

from pi2.arrays import I32, I64, Bits
from pi2.memory.policy import ABSENT


class LeastRecentlyUsed:
    """LRU over ``capacity`` slots without a linked list.

    Every use appends (slot, time) to a queue; an entry counts only while its time is the slot's
    last.  So each slot has exactly one valid entry, a batch of uses is one append, and a batch of
    evictions takes the first valid entries.  The queue is compacted when it is full; all is O(1)
    per use, amortised, and free of Python loops.
    """

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
        """See `pi2.memory.policy.Policy`."""
        self._start(order)

    def touch(self, slots: I32, keys: I64) -> None:
        """See `pi2.memory.policy.Policy`."""
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
        """Return the least recently used slots and make them the most recently used."""
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
        """See `pi2.memory.policy.Policy`."""
        new_of_old = np.full(len(self._last_use), ABSENT, np.int32)
        known = np.flatnonzero(source != ABSENT).astype(np.int32)
        new_of_old[source[known]] = known
        moved = new_of_old[self.list_order()]
        empty = np.flatnonzero(source == ABSENT).astype(np.int32)
        self._start(np.concatenate([empty, moved[moved != ABSENT]]))

    def list_order(self) -> I32:
        """See `pi2.memory.policy.Policy`."""
        self._compact()
        return self._slots[: self._tail].copy()

    def _compact(self) -> None:
        slots = self._slots[self._head : self._tail]
        times = self._times[self._head : self._tail]
        valid = self._last_use[slots] == times
        count = int(np.count_nonzero(valid))
        self._slots[:count], self._times[:count] = slots[valid], times[valid]
        self._head, self._tail = 0, count
