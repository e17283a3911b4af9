"""Neurons for prompts: each once, and only those read that are not in memory."""

from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pi2.engine.neuron_stream import NeuronStream
from pi2.memory.cache import NeuronCache
from tests.helpers.kernels import make_loops

NEURONS, LAYERS, STRIDE = 40, 3, 4096


class FakeReader:
    """Reads bundles whose bytes are their layer and their index."""

    def __init__(self) -> None:
        self.runs: list[tuple[int, int, int]] = []
        self.broken = False
        self.reads = self.engine = self

    def plan_run(self, layer: int, first: int, room: np.ndarray, parts: list[slice]) -> Any:
        return SimpleNamespace(batch=(layer, first, room, parts))

    def submit(self, batch: tuple[int, int, np.ndarray, list[slice]]) -> None:
        layer, first, room, parts = batch
        for part in parts:
            self.runs.append((layer, first + part.start, part.stop - part.start))
            room[part, 0] = layer
            room[part, 1] = np.arange(first + part.start, first + part.stop)

    def finish(self, pending: Any, number: int) -> None:
        if self.broken:
            raise OSError("cut")

    def abandon(self, batch: object) -> None:
        """Nothing is under way."""


def make_cache(hot: int, cold: int) -> NeuronCache:
    arena = np.zeros((LAYERS * hot + cold, STRIDE), np.uint8)
    cache = NeuronCache(arena, [range(hot)] * LAYERS, NEURONS, make_loops())
    for layer in range(LAYERS):
        arena[layer * hot : (layer + 1) * hot, 0] = layer
        arena[layer * hot : (layer + 1) * hot, 1] = np.arange(hot)
    return cache


def bring_in(cache: NeuronCache, layer: int, *indices: int) -> None:
    found = cache.look_up(layer, np.array(indices, np.int32))
    cache.arena[found.missing_slots, 0] = layer
    cache.arena[found.missing_slots, 1] = found.missing


def make_stream(cache: NeuronCache, size: int = 16) -> tuple[NeuronStream, FakeReader]:
    reader = FakeReader()
    staging = np.full((2, size, STRIDE), 255, np.uint8)
    stream = NeuronStream(cache, reader, staging, LAYERS)  # type: ignore[arg-type]
    stream.shortest_gap = 1
    return stream, reader


def take_all(stream: NeuronStream) -> None:
    for layer in range(LAYERS):
        stream.begin(layer)
        pieces = [piece.bundles[:, :2].copy() for piece in stream.give(layer)]
        got = np.concatenate(pieces)
        assert got[:, 0].tolist() == [layer] * NEURONS
        assert sorted(got[:, 1].tolist()) == list(range(NEURONS))


@pytest.mark.parametrize("hot", [0, 8, NEURONS])
def test_every_neuron_comes_once(hot: int) -> None:
    cache = make_cache(hot, 0 if hot == NEURONS else 30)
    stream, reader = make_stream(cache)
    take_all(stream)
    assert sum(count for _, _, count in reader.runs) == LAYERS * (NEURONS - hot)
    if hot < NEURONS:
        bring_in(cache, 0, *range(hot, 24))
        bring_in(cache, 1, 35, 9, 12, 13)
        bring_in(cache, 2, 39, 20)
        reader.runs.clear()
        take_all(stream)
        resident = sum((cache.find_slots(layer, hot, 40) >= 0).sum() for layer in range(LAYERS))
        assert sum(count for _, _, count in reader.runs) == LAYERS * (NEURONS - hot) - resident
        take_all(stream)


@pytest.mark.parametrize("hot", [0, 8, NEURONS])
def test_who_looks_at_neurons_gets_them_in_stored_order(hot: int) -> None:
    cache = make_cache(hot, 0 if hot == NEURONS else 30)
    if hot < NEURONS:
        bring_in(cache, 0, *range(24, 40))
        bring_in(cache, 1, 35, 9, 12, 13)
    reader, staging = FakeReader(), np.full((2, 8, STRIDE), 255, np.uint8)
    stream = NeuronStream(cache, reader, staging, LAYERS, order="stored")  # type: ignore[arg-type]
    stream.shortest_gap = 1
    for layer in range(LAYERS):
        stream.begin(layer)
        got = np.concatenate([piece.bundles[:, :2].copy() for piece in stream.give(layer)])
        assert got[:, 0].tolist() == [layer] * NEURONS
        assert got[:, 1].tolist() == list(range(NEURONS))


def give_experts(there: range) -> tuple[list[int], list[bool], FakeReader]:
    """The numbers of a layer's experts of four neurons as they are given, and which of them came
    from flash, where those of ``there`` are in the cache."""
    arena = np.zeros((NEURONS, STRIDE), np.uint8)
    cache = NeuronCache(arena, [range(0)] * LAYERS, NEURONS, make_loops())
    if there:
        cache.look_up(0, np.arange(4 * there.stop, dtype=np.int32))
    reader = FakeReader()
    staging = np.zeros((2, 6, STRIDE), np.uint8)
    reading: Any = reader
    stream = NeuronStream(cache, reading, staging, LAYERS, order="spread", piece=4)
    stream.shortest_gap = 1
    numbers, from_flash = [], []
    for stretch in stream.give(0, reads_on=0):
        assert len(stretch.bundles) == 4
        numbers.append(stretch.first // 4)
        from_flash.append(not np.shares_memory(stretch.bundles, arena))
        if from_flash[-1]:
            assert stretch.bundles[:, 1].tolist() == list(range(stretch.first, stretch.first + 4))
    return numbers, from_flash, reader


def test_experts_come_one_by_one_in_an_order_that_does_not_depend_on_the_cache() -> None:
    orders = [give_experts(range(count))[0] for count in (0, 3, 5, 10)]
    assert all(order == orders[0] for order in orders)
    assert sorted(orders[0]) == list(range(10))


def test_the_first_experts_in_memory_are_computed_between_reads_of_others() -> None:
    _, from_flash, reader = give_experts(range(5))
    assert reader.runs and all(first >= 20 and count == 4 for _, first, count in reader.runs)
    assert sum(from_flash) == 5
    longest = max(len(list(run)) for _, run in groupby(from_flash))
    assert longest <= 2, "neither the drive nor the processor waits long for the other"


def test_after_a_failed_read_the_next_prompt_begins_anew() -> None:
    stream, reader = make_stream(make_cache(8, 4))
    reader.broken = True
    with pytest.raises(OSError, match="cut"):
        take_all(stream)
    stream.abandon()
    reader.broken = False
    take_all(stream)
