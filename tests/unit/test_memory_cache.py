"""Which neuron is in which slot."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pi2.diagnostics import UserError
from pi2.memory.budget import Budget
from pi2.memory.cache import NeuronCache

LAYERS, NEURONS, COLD = 3, 20, 6


def make_cache(hot: tuple[int, ...] = (4, 0, 2)) -> NeuronCache:
    return NeuronCache(np.zeros((sum(hot) + COLD, 8), np.uint8), hot, NEURONS)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_hot_neurons_are_resident_from_the_start_and_contiguous() -> None:
    cache = make_cache()
    assert cache.look_up(2, ids(0, 1)).resident_slots.tolist() == [4, 5]
    assert len(cache.hot_bundles(0)) == 4
    assert len(cache.hot_bundles(1)) == 0


def test_a_missing_neuron_gets_a_cold_slot_and_is_found_there_afterwards() -> None:
    cache = make_cache()
    first = cache.look_up(0, ids(3, 9))
    assert first.resident_slots.tolist() == [3]
    assert first.missing.tolist() == [9]
    again = cache.look_up(0, ids(9))
    assert again.resident_slots.tolist() == first.missing_slots.tolist()
    assert cache.counters[0].hits == 2
    assert cache.counters[0].misses == 1
    assert cache.counters[0].read_bytes == 8


def test_the_same_index_in_two_layers_is_two_neurons() -> None:
    cache = make_cache()
    cache.look_up(0, ids(9))
    assert cache.look_up(1, ids(9)).missing.tolist() == [9]


def test_a_failed_read_is_forgotten() -> None:
    cache = make_cache()
    cache.look_up(0, ids(9, 10))
    cache.forget(0, ids(9))
    found = cache.look_up(0, ids(9, 10))
    assert found.missing.tolist() == [9]


requests = st.lists(
    st.tuples(
        st.integers(0, LAYERS - 1),
        st.sets(st.integers(0, NEURONS - 1), max_size=COLD).map(sorted),
    ),
    max_size=50,
)


@given(requests)
def test_no_two_neurons_share_a_slot_and_contents_stay_right(
    requests: list[tuple[int, list[int]]],
) -> None:
    cache = make_cache()
    for layer, slots in enumerate(cache.hot_slots):
        for index, slot in enumerate(slots):
            cache.arena[slot, :2] = layer, index
    for layer, wanted in requests:
        found = cache.look_up(layer, np.array(wanted, np.int32))
        for index, slot in zip(found.missing, found.missing_slots, strict=True):
            cache.arena[slot, :2] = layer, index  # what a read would do
        slots = [*found.resident_slots.tolist(), *found.missing_slots.tolist()]
        assert len(set(slots)) == len(wanted)
        contents = {(int(cache.arena[s, 0]), int(cache.arena[s, 1])) for s in slots}
        assert contents == {(layer, index) for index in wanted}


def test_a_segment_gives_no_more_than_it_has() -> None:
    budget = Budget({"kv": 1000, "workspace": 64})
    array = budget.allocate("kv", 600)
    assert array.ctypes.data % 64 == 0
    assert not array.any()
    with pytest.raises(UserError, match="needs at least") as caught:
        budget.allocate("kv", 401)
    assert caught.value.diagnostics[0].code == "P610"
    assert budget.remaining("kv") == 400
