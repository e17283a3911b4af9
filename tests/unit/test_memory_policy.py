"""The cold cache's replacement: each policy against what a textbook says, all against the law."""

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pi2.memory.cache import NeuronCache
from pi2.memory.policy import ABSENT, PolicyName, expect_uses
from tests.helpers.kernels import make_loops

CAPACITY, KEYS = 16, 40

requests = st.lists(
    st.sets(st.integers(0, KEYS - 1), max_size=CAPACITY - 4).map(sorted), max_size=60
)


def make_cache(
    name: PolicyName, capacity: int = CAPACITY, expected: np.ndarray | None = None
) -> NeuronCache:
    arena = np.zeros((capacity, 8), np.uint8)
    return NeuronCache(arena, [range(0)], KEYS, make_loops(), policy=name, expected=expected)


def request(cache: NeuronCache, *keys: int) -> tuple[list[int], list[int]]:
    """Slots of what was there, and slots given to the rest."""
    found = cache.look_up(0, np.array(keys, np.int32))
    assert len(found.rest) == 0
    return found.resident_slots.tolist(), found.missing_slots.tolist()


def list_there(cache: NeuronCache) -> set[int]:
    return set(np.flatnonzero(cache.find_slots(0, 0, KEYS) != ABSENT).tolist())


@pytest.mark.parametrize("name", get_args(PolicyName))
@given(requests=requests, held=st.sets(st.integers(0, KEYS - 1), max_size=4).map(sorted))
def test_nothing_in_use_or_held_is_given_away(
    name: PolicyName, requests: list[list[int]], held: list[int]
) -> None:
    cache = make_cache(name)
    kept = cache.look_up(0, np.array(held, np.int32))
    cache.hold(kept)
    for keys in requests:
        hits, given = request(cache, *keys)
        assert len(set(hits) | set(given)) == len(keys)
        assert not set(kept.cold.tolist()) & set(given)
        assert list_there(cache) >= {*keys, *held}


@given(requests)
def test_lru_keeps_what_was_used_last(requests: list[list[int]]) -> None:
    cache, last = make_cache("lru"), dict[int, int]()
    for time, keys in enumerate(requests):
        request(cache, *keys)
        last |= dict.fromkeys(keys, time)
        there = list_there(cache)
        assert there <= set(last) and len(there) == min(len(last), CAPACITY)
        gone = {key: last[key] for key in set(last) - there}
        assert max(gone.values(), default=-1) <= min((last[key] for key in there), default=0)
        last = {key: last[key] for key in there}


def test_lfu_keeps_what_is_used_often_over_what_was_used_last() -> None:
    cache = make_cache("lfu", 4)
    for _ in range(5):
        request(cache, 0, 1, 2)
    for newcomer in range(10, 20):
        request(cache, newcomer)
    assert list_there(cache) == {0, 1, 2, 19}


def test_lfu_lets_old_uses_count_less_and_less() -> None:
    cache = make_cache("lfu", 2)
    for _ in range(20):
        request(cache, 0, 1)
    for _ in range(200):
        request(cache, 2, 3)
    request(cache, 4)
    assert not list_there(cache) & {0, 1}


def test_lfu_begins_with_what_it_is_told_to_expect() -> None:
    expected = np.arange(KEYS, dtype=np.float32)[None] / np.float32(KEYS)
    cache = make_cache("lfu", 3, expected)
    for key in [39, 38, 0, 1]:
        request(cache, key)
    assert list_there(cache) == {39, 38, 1}


def test_expected_uses_fall_with_the_place_and_add_up_to_the_share() -> None:
    uses = expect_uses(2, 1000, share=0.1)
    assert uses.shape == (2, 1000)
    assert (np.diff(uses[0]) <= 0).all()
    assert uses[0].mean() == pytest.approx(0.1, rel=0.05) and uses[0].max() <= 1
