"""Neurons that are cached and read together, and what single neurons are to those who ask."""

from collections.abc import Sequence

import numpy as np

from pi2.arrays import I32, U8
from pi2.memory.cache import NeuronCache
from pi2.memory.policy import ABSENT
from pi2.plan.arithmetic.sizes import MOST_GRANULE_BYTES

PARTS = 2
"""Parts of what a token computes in a layer of chosen experts: the last one is computed when
nothing is left to read, and every call takes its time."""


def choose_granule(layers: Sequence[I32], experts: int, stride: int) -> int:
    """Most neurons, up to `MOST_GRANULE_BYTES`, that divide every expert's range; 1 if experts are
    scattered. ``layers``: stored indices by expert, ascending in each."""
    for layer in layers:
        groups = layer.reshape(experts, -1)
        size = groups.shape[1]
        starts = groups[:, 0]
        if (groups[:, -1] - starts != size - 1).any() or (starts % size).any():
            return 1
    return find_granule(len(layers[0]) // experts, stride)


def find_granule(size: int, stride: int) -> int:
    """The most neurons, up to `MOST_GRANULE_BYTES`, that divide an expert of ``size`` neurons."""
    most = max(1, MOST_GRANULE_BYTES // stride)
    return max(part for part in range(1, min(size, most) + 1) if size % part == 0)


def count_part_neurons(token_neurons: int, size: int, stride: int, parts: int = PARTS) -> int:
    """Neurons of one of ``parts`` parts of a token's layer; equal with and without granules, since
    the order of additions depends on it."""
    granule = find_granule(size, stride)
    return -(-token_neurons // (parts * granule)) * granule


def divide_slots(arena: U8, granule: int) -> U8:
    """``arena`` [slots, bytes] by single neurons, [slots granule, bytes / granule]."""
    slots, size = arena.shape
    return arena.reshape(slots * granule, size // granule)


class SingleNeurons:
    """A cache's content by single neurons, for reading only."""

    def __init__(self, cache: NeuronCache) -> None:
        self._cache = cache
        self.granule = cache.granule
        """Neurons that share a slot, side by side."""
        self.neurons = cache.neurons * cache.granule
        self.arena: U8 = divide_slots(cache.arena, cache.granule)
        """The neurons [slots, stride]."""

    @property
    def hot_slots(self) -> list[range]:
        size = self.granule
        return [range(slots.start * size, slots.stop * size) for slots in self._cache.hot_slots]

    def hot_range(self, layer: int) -> slice:
        hot = self._cache.hot_range(layer)
        return slice(hot.start * self.granule, hot.stop * self.granule)

    def find_slots(self, layer: int, first: int, count: int) -> I32:
        """Return where the neurons ``first``, ``first + 1``, ... of ``layer`` are, [count]; ABSENT
        for those on flash only."""
        size = self.granule
        if size == 1:
            return self._cache.find_slots(layer, first, count)
        start = first // size
        entries = self._cache.find_slots(layer, start, -(-(first + count) // size) - start)
        slots = expand_stretches(entries, size)
        slots[np.repeat(entries == ABSENT, size)] = ABSENT
        return slots[first - start * size :][:count]


def expand_stretches(numbers: I32, stretch: int) -> I32:
    """Numbers of the neurons in the ranges ``numbers`` [n], in order within each."""
    if stretch == 1:
        return numbers
    first: I32 = np.multiply(numbers, stretch, dtype=np.int32)[:, None]
    return np.add(first, np.arange(stretch, dtype=np.int32)).reshape(-1)
