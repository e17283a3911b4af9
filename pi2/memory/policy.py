"""Replacement policies of the cold-neuron cache, vectorised over neurons."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]


class LeastRecentlyUsed:
    """LRU over ``capacity`` slots without a linked list.

    Every use appends (slot, time) to a queue; an entry counts only while its time is the slot's
    last.  So each slot has exactly one valid entry, a batch of uses is one append, and a batch of
    evictions takes the first valid entries.  The queue is compacted when it is full; all is O(1)
    per use, amortised, and free of Python loops.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity >= 0
        self._capacity = capacity
        self._last_use = np.zeros(capacity, np.int64)
        length = max(4 * capacity, 1024)
        self._slots = np.zeros(length, np.int32)
        self._times = np.zeros(length, np.int64)
        self._slots[:capacity] = np.arange(capacity)
        self._head, self._tail = 0, capacity
        self._clock = 0

    def touch(self, slots: I32) -> None:
        """Make ``slots`` [n] (distinct, n <= capacity) the most recently used."""
        count = len(slots)
        if count == 0:
            return
        if self._tail + count > len(self._slots):
            self._compact()
        self._clock += 1
        self._last_use[slots] = self._clock
        self._slots[self._tail : self._tail + count] = slots
        self._times[self._tail : self._tail + count] = self._clock
        self._tail += count

    def evict(self, count: int) -> I32:
        """Return the ``count`` least recently used slots (<= capacity) and make them the most
        recently used."""
        assert count <= self._capacity
        taken = np.empty(0, np.int32)
        while len(taken) < count:
            window = slice(self._head, min(self._head + 2 * count + 64, self._tail))
            slots, times = self._slots[window], self._times[window]
            valid = np.flatnonzero(self._last_use[slots] == times)[: count - len(taken)]
            taken = np.concatenate([taken, slots[valid]])
            done = int(valid[-1]) + 1 if len(taken) == count else len(slots)
            self._head += done
        self.touch(taken)
        return taken

    def _compact(self) -> None:
        slots = self._slots[self._head : self._tail]
        times = self._times[self._head : self._tail]
        valid = self._last_use[slots] == times
        count = int(np.count_nonzero(valid))
        self._slots[:count], self._times[:count] = slots[valid], times[valid]
        self._head, self._tail = 0, count
