"""Which neuron is in which slot."""

import mmap
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pi2.diagnostics import UserError
from pi2.memory.budget import Budget
from pi2.memory.cache import NeuronCache
from pi2.memory.policy import ABSENT, PolicyName
from tests.helpers.kernels import make_loops

LAYERS, NEURONS, COLD = 3, 20, 6


def make_cache(hot: tuple[int, ...] = (4, 0, 2), policy: PolicyName = "lru") -> NeuronCache:
    arena = np.zeros((sum(hot) + COLD, 8), np.uint8)
    return NeuronCache(arena, [*map(range, hot)], NEURONS, make_loops(), policy=policy)


def check_maps(cache: NeuronCache) -> None:
    """Neurons and slots name each other, and no slot beyond the cache is in use."""
    slot_of = cache._slot_of.reshape(-1)
    for slot, owner in enumerate(cache._tables.owner.tolist()):
        if owner != ABSENT:
            assert slot_of[owner] == cache._first_cold + slot
    hot = sum(len(slots) for slots in cache.hot_slots)
    used = slot_of[slot_of != ABSENT]
    assert len(set(used.tolist())) == len(used)
    assert len(used) == hot + np.count_nonzero(cache._tables.owner != ABSENT)
    assert len(used) <= len(cache.arena)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_a_missing_neuron_gets_a_cold_slot_and_is_found_there_afterwards() -> None:
    cache = make_cache()
    first = cache.look_up(0, ids(3, 9))
    assert first.resident_slots.tolist() == [3] and first.missing.tolist() == [9]
    assert cache.look_up(0, ids(9)).resident_slots.tolist() == first.missing_slots.tolist()
    assert (cache.counters[0].hits, cache.counters[0].misses) == (2, 1)
    assert cache.counters[0].read_bytes == 8


requests = st.lists(
    st.tuples(
        st.integers(0, LAYERS - 1), st.sets(st.integers(0, NEURONS - 1), max_size=COLD).map(sorted)
    ),
    max_size=50,
)


@pytest.mark.parametrize("policy", get_args(PolicyName))
@given(requests=requests, filled=st.booleans())
def test_no_two_neurons_share_a_slot_and_contents_stay_right(
    policy: PolicyName, requests: list[tuple[int, list[int]]], filled: bool
) -> None:
    cache = make_cache(policy=policy)
    for filling in cache.fill() if filled else ():
        for place, slot in enumerate(filling.slots):
            cache.arena[slot, :2] = filling.layer, filling.first + place
    for layer, slots in enumerate(cache.hot_slots):
        for index, slot in enumerate(slots):
            cache.arena[slot, :2] = layer, index
    for layer, wanted in requests:
        found = cache.look_up(layer, np.array(wanted, np.int32))
        for index, slot in zip(found.missing, found.missing_slots, strict=True):
            cache.arena[slot, :2] = layer, index  # what a read would do
        taken = [*found.resident_slots.tolist(), *found.missing_slots.tolist()]
        assert len(set(taken)) == len(wanted)
        contents = {(int(cache.arena[s, 0]), int(cache.arena[s, 1])) for s in taken}
        assert contents == {(layer, index) for index in wanted}
        check_maps(cache)


def test_of_what_was_filled_in_the_least_hot_goes_first() -> None:
    for policy in get_args(PolicyName):
        cache = make_cache(hot=(4, 4, 4), policy=policy)
        list(cache.fill())
        cache.look_up(0, ids(10, 11, 12))
        assert len(cache.look_up(0, ids(4)).missing) == 0, policy
        assert len(cache.look_up(1, ids(5)).missing) == 1, policy


def test_a_held_neuron_stays_until_all_have_released_it() -> None:
    cache = make_cache(hot=(0, 0, 0))
    held = [cache.look_up(0, ids(1, 2)), cache.look_up(0, ids(2, 3))]
    for found in held:
        cache.hold(found)
    for found, stay in zip(held, ([1, 2, 3], [2, 3]), strict=True):
        for turn in range(5):
            cache.look_up(1, ids(*range(4 * turn % 16, 4 * turn % 16 + 4)))
        assert len(cache.look_up(0, ids(*stay)).missing) == 0
        cache.release(found)
    assert cache.free_capacity == COLD
    cache.look_up(1, ids(*range(COLD)))
    assert cache.look_up(0, ids(1, 2)).missing.tolist() == [1, 2]


def test_memory_that_is_given_back_is_not_resident() -> None:
    budget = Budget({"hot": 1 << 22, "cold": 0})
    region = budget.allocate_spanning({"hot": 1 << 22, "cold": 0}, reserved_bytes=1 << 22)
    assert region.nbytes == 1 << 23
    region[:] = 7
    budget.give_back(region[100 : 1 << 22])
    assert region[:4096].all(), "only whole pages"
    assert region[1 << 22 :].all()
    if hasattr(mmap, "MADV_DONTNEED"):
        assert not region[4096 : 1 << 22].any()


def test_a_segment_gives_no_more_than_it_has() -> None:
    budget = Budget({"kv": 1000, "workspace": 64})
    array = budget.allocate("kv", 600)
    assert array.ctypes.data % 64 == 0
    assert not array.any()
    with pytest.raises(AssertionError, match=r"'kv': 1000 bytes are stated, 600 taken, 401 more"):
        budget.allocate("kv", 401)
    assert budget.used_bytes["kv"] == 600
    with pytest.raises(AssertionError, match="'state': 0 bytes are stated"):
        budget.allocate("state", 1)
    with pytest.raises(UserError, match="unit 'gpu' needs at least") as caught:
        Budget({"units.gpu": 1000}).charge("units.gpu", 1001)
    assert caught.value.diagnostics[0].code == "P610"


@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_the_cold_region_shrinks_and_grows_without_reading_what_stays(policy: PolicyName) -> None:
    arena = np.zeros((LAYERS * 2 + 12, 8), np.uint8)
    cache = NeuronCache(arena, [range(2)] * LAYERS, NEURONS, make_loops(), policy=policy)
    for _ in range(2):
        for layer in range(LAYERS):
            found = cache.look_up(layer, ids(3, 5, 7, 9))
            arena[found.missing_slots, 0] = 10 * layer + found.missing
    cache.look_up(1, ids(3, 5, 7, 9))
    cache.resize_cold(6)
    assert cache.cold_capacity == cache.free_capacity == 6
    found = cache.look_up(1, ids(3, 5, 7, 9))
    assert len(found.missing) == 0, "what was used last and most has stayed"
    assert sorted(arena[found.resident_slots, 0]) == [13, 15, 17, 19]
    cache.resize_cold(12)
    found = cache.look_up(1, ids(3, 5, 7, 9))
    assert len(found.missing) == 0
    assert sorted(arena[found.resident_slots, 0]) == [13, 15, 17, 19]
    assert len(cache.look_up(2, ids(10, 11, 12, 13, 14, 15)).missing) == 6
    assert len(cache.look_up(1, ids(3, 5, 7, 9)).missing) == 0, "they have found empty slots"


def test_a_segment_that_is_released_is_zeros() -> None:
    budget = Budget({"kv": 1 << 22, "cold": 1 << 12})
    kv, cold = budget.allocate("kv", 1 << 22), budget.allocate("cold", 1 << 12)
    kv[:] = 1
    cold[:] = 1
    budget.release("kv")
    if hasattr(mmap, "MADV_DONTNEED"):
        assert not kv.any()
    assert cold.all(), "other segments keep theirs"
    kv[:] = 2
    assert kv.all(), "it can be used again"
