"""The neuron cache: which neurons are in memory, and in which slot of the arena.

One arena [slots, stride] holds them all.  The hot neurons of layer 0, 1, ... come first, each
layer's contiguous and in stored order, so that dense kernels can run over them; they never leave.
The slots behind them are the cold cache, shared by all layers, one neuron a slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pi2.memory.policy import ABSENT, PolicyName, make_policy

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


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
        hot: Sequence[int],
        neurons: int,
        *,
        policy: PolicyName = "lru",
        expected: F32 | None = None,
    ) -> None:
        """``hot``: hot neurons of each layer; ``neurons``: FFN neurons per layer; ``expected``
        [layers, neurons]: how often a token uses each, where statistics tell."""
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
        self._held = np.zeros(self.cold_capacity, bool)
        self._policy = make_policy(
            policy,
            self.cold_capacity,
            layers * neurons,
            None if expected is None else expected.reshape(-1),
        )
        self.counters = [LayerCounters() for _ in range(layers)]

    def hot_bundles(self, layer: int) -> U8:
        """The hot neurons of ``layer``, [hot, stride], a view."""
        slots = self.hot_slots[layer]
        return self.arena[slots.start : slots.stop]

    @property
    def free_capacity(self) -> int:
        """Cold slots that are not held."""
        return self.cold_capacity - int(np.count_nonzero(self._held))

    def look_up(self, layer: int, indices: I32) -> Lookup:
        """Find ``indices`` [n] (distinct), and give slots to those that are missing.

        At most ``free_capacity`` of them may be cold.  The caller reads the missing ones into
        their slots before anybody computes with them.
        """
        counters = self.counters[layer]
        hot = self.hot_slots[layer]
        if len(hot) == self.neurons:
            counters.hits += len(indices)
            none = indices[:0]
            resident = indices + np.int32(hot.start)
            return Lookup(resident_slots=resident, missing=none, missing_slots=none)
        slots = self._slot_of[layer, indices]
        absent = slots == ABSENT
        resident, missing = slots[~absent], indices[absent]
        counters.hits += len(resident)
        counters.misses += len(missing)
        cold = resident[resident >= self._first_cold] - self._first_cold
        self._policy.touch(cold, self._owner[cold])
        if len(missing) == 0:
            return Lookup(resident_slots=resident, missing=missing, missing_slots=missing)
        given, evicted = self._place(layer, missing)
        counters.evictions += evicted
        counters.read_bytes += len(missing) * self.arena.shape[1]
        return Lookup(resident_slots=resident, missing=missing, missing_slots=given)

    def _place(self, layer: int, missing: I32) -> tuple[I32, int]:
        """Give slots to ``missing`` [m]: the slots, and how many neurons left for them."""
        keys = missing.astype(np.int64) + layer * self.neurons
        cold = self._policy.replace(keys, self._held)
        owners = self._owner[cold]
        evicted = owners[owners != ABSENT]
        self._slot_of.reshape(-1)[evicted] = ABSENT
        self._owner[cold] = keys
        given = cold + np.int32(self._first_cold)
        self._slot_of[layer, missing] = given
        return given, len(evicted)

    def hold(self, slots: I32) -> None:
        """Keep the neurons in ``slots`` [n] until they are released: they are being computed
        with, or on their way from flash."""
        self._held[slots[slots >= self._first_cold] - self._first_cold] = True

    def release(self, slots: I32) -> None:
        """Undo ``hold``."""
        self._held[slots[slots >= self._first_cold] - self._first_cold] = False

    def forget(self, layer: int, missing: I32) -> None:
        """Drop ``missing`` [m] after their read failed, so that nobody computes with them."""
        slots = self._slot_of[layer, missing] - self._first_cold
        self._owner[slots] = ABSENT
        self._held[slots] = False
        self._slot_of[layer, missing] = ABSENT
        self._policy.drop(slots)

    def fill(self) -> Iterator[Filling]:
        """Give the cold slots to the neurons that follow the hot ones in stored order, the same
        share of every layer; the caller reads them.  Only for a cache that is empty."""
        assert (self._owner == ABSENT).all(), "only an empty cache is filled"
        firsts = np.array([len(slots) for slots in self.hot_slots])
        rest = self.neurons - firsts
        room = min(self.cold_capacity, int(rest.sum()))
        ends = np.cumsum(rest) * room // max(1, int(rest.sum()))
        places = np.full(self.cold_capacity, self.neurons, np.int64)
        start = 0
        for layer, (first, end) in enumerate(zip(firsts.tolist(), ends.tolist(), strict=True)):
            count = end - start
            indices = np.arange(first, first + count)
            slots = range(self._first_cold + start, self._first_cold + end)
            places[start:end] = indices
            self._owner[start:end] = indices + layer * self.neurons
            self._slot_of[layer, first : first + count] = np.arange(slots.start, slots.stop)
            start = end
            if count:
                yield Filling(layer=layer, first=first, slots=slots)
        # Least needed: empty slots, then the neurons that are last in the stored order.
        self._policy.adopt(self._owner, np.argsort(-places, kind="stable").astype(np.int32))
