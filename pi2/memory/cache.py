"""The neuron cache: which neurons are in memory, and in which slot of the arena.

One arena [slots, stride] holds them all.  The hot neurons of layer 0, 1, ... come first, each
layer's contiguous and in stored order, so that dense kernels can run over them; they never leave.
The slots behind them are the cold cache, shared by all layers, one neuron a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pi2.memory.policy import LeastRecentlyUsed

I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]

ABSENT = -1


@dataclass(slots=True)
class LayerCounters:
    """What happened to the neurons that a layer asked for."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    read_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """Where the neurons of one request are."""

    resident_slots: I32
    """Slots [h] of those in memory."""
    missing: I32
    """Stored indices [m] of those to be read."""
    missing_slots: I32
    """Slots [m] that they have been given."""


class NeuronCache:
    """Maps (layer, stored index) to slots of ``arena`` [slots, stride]."""

    def __init__(self, arena: U8, hot: Sequence[int], neurons: int) -> None:
        """``hot``: hot neurons of each layer; ``neurons``: FFN neurons per layer."""
        self.arena = arena
        self.neurons = neurons
        layers = len(hot)
        bases = np.concatenate([[0], np.cumsum(hot)]).astype(np.int64)
        assert bases[-1] <= len(arena), (bases[-1], len(arena))
        self.hot_slots = [range(int(bases[i]), int(bases[i + 1])) for i in range(layers)]
        self._first_cold = int(bases[-1])
        self.cold_capacity = len(arena) - self._first_cold
        self._slot_of = np.full((layers, neurons), ABSENT, np.int32)
        for layer, slots in enumerate(self.hot_slots):
            self._slot_of[layer, : len(slots)] = np.arange(slots.start, slots.stop)
        self._owner = np.full(self.cold_capacity, ABSENT, np.int64)
        self._policy = LeastRecentlyUsed(self.cold_capacity)
        self.counters = [LayerCounters() for _ in range(layers)]

    def hot_bundles(self, layer: int) -> U8:
        """The hot neurons of ``layer``, [hot, stride], a view."""
        slots = self.hot_slots[layer]
        return self.arena[slots.start : slots.stop]

    def look_up(self, layer: int, indices: I32) -> Lookup:
        """Find ``indices`` [n] (ascending, distinct), and give slots to those that are missing.

        At most ``cold_capacity`` of them may be cold.  The caller reads the missing ones into
        their slots before the next call.
        """
        counters = self.counters[layer]
        hot = self.hot_slots[layer]
        if len(hot) == self.neurons:
            counters.hits += len(indices)
            none = indices[:0]
            return Lookup(
                resident_slots=indices + np.int32(hot.start), missing=none, missing_slots=none
            )
        slots = self._slot_of[layer, indices]
        absent = slots == ABSENT
        resident, missing = slots[~absent], indices[absent]
        counters.hits += len(resident)
        counters.misses += len(missing)
        self._policy.touch(resident[resident >= self._first_cold] - self._first_cold)
        if len(missing) == 0:
            return Lookup(resident_slots=resident, missing=missing, missing_slots=missing)
        cold = self._policy.evict(len(missing))
        owners = self._owner[cold]
        evicted = owners[owners != ABSENT]
        self._slot_of.reshape(-1)[evicted] = ABSENT
        counters.evictions += len(evicted)
        counters.read_bytes += len(missing) * self.arena.shape[1]
        self._owner[cold] = missing.astype(np.int64) + layer * self.neurons
        given = cold + np.int32(self._first_cold)
        self._slot_of[layer, missing] = given
        return Lookup(resident_slots=resident, missing=missing, missing_slots=given)

    def forget(self, layer: int, missing: I32) -> None:
        """Drop ``missing`` [m] after their read failed, so that nobody computes with them."""
        slots = self._slot_of[layer, missing] - self._first_cold
        self._owner[slots] = ABSENT
        self._slot_of[layer, missing] = ABSENT
