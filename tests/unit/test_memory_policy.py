"""The cold cache's replacement policies: each against what a textbook says, all against the law."""

from collections import OrderedDict
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pi2.memory.policy import (
    ABSENT,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    Policy,
    PolicyName,
    expect_uses,
    make_policy,
)

CAPACITY, KEYS = 16, 40

requests = st.lists(
    st.lists(st.integers(0, KEYS - 1), unique=True, max_size=CAPACITY - 4), max_size=60
)


class Simulation:
    """A policy with what a cache keeps beside it."""

    def __init__(self, policy: Policy, capacity: int = CAPACITY) -> None:
        self.policy = policy
        self.owners = np.full(capacity, ABSENT, np.int64)
        self.held = np.zeros(capacity, bool)

    def request(self, keys: list[int]) -> tuple[list[int], list[int]]:
        """Slots of what was there, and slots given to the rest."""
        places = {int(key): slot for slot, key in enumerate(self.owners) if key != ABSENT}
        there = [key for key in keys if key in places]
        missing = [key for key in keys if key not in places]
        hits = [places[key] for key in there]
        self.policy.touch(np.array(hits, np.int32), np.array(there, np.int64))
        given = self.policy.replace(np.array(missing, np.int64), self.held).tolist()
        self.owners[given] = missing
        return hits, given


@pytest.mark.parametrize("name", get_args(PolicyName))
@given(requests=requests, held=st.sets(st.integers(0, CAPACITY - 1), max_size=4))
def test_nothing_in_use_or_held_is_given_away(
    name: PolicyName, requests: list[list[int]], held: set[int]
) -> None:
    simulation = Simulation(make_policy(name, CAPACITY, KEYS))
    simulation.held[list(held)] = True
    for keys in requests:
        hits, given = simulation.request(keys)
        assert len(set(hits) | set(given)) == len(keys)
        assert not held & set(given)


@pytest.mark.parametrize("name", get_args(PolicyName))
@given(requests=requests, order=st.permutations(range(CAPACITY)), removed=st.integers(0, 8))
def test_slots_may_be_renumbered(
    name: PolicyName, requests: list[list[int]], order: list[int], removed: int
) -> None:
    simulation = Simulation(make_policy(name, CAPACITY, KEYS))
    for keys in requests:
        simulation.request(keys)
    source = np.array([ABSENT, *order[removed:], ABSENT], np.int32)
    simulation.owners = np.where(source == ABSENT, ABSENT, simulation.owners[source])
    simulation.policy.renumber(source, simulation.owners)
    assert sorted(simulation.policy.list_order().tolist()) == list(range(len(source)))
    simulation.held = np.zeros(len(source), bool)
    empty = np.flatnonzero(simulation.owners == ABSENT).tolist()
    new = [key for key in range(KEYS) if key not in simulation.owners]
    _, given = simulation.request(new[: len(empty)])
    assert sorted(given) == empty
    simulation.request(list(range(len(source))))


@given(requests)
def test_lru_evicts_the_same_slots_as_an_ordered_dict(requests: list[list[int]]) -> None:
    simulation = Simulation(LeastRecentlyUsed(CAPACITY))
    model = OrderedDict.fromkeys(range(CAPACITY))
    for keys in requests:
        hits, given = simulation.request(keys)
        for slot in hits:
            model.move_to_end(slot)
        expected = [model.popitem(last=False)[0] for _ in given]
        assert given == expected
        model.update(dict.fromkeys(expected))


def test_lfu_keeps_what_is_used_often_over_what_was_used_last() -> None:
    simulation = Simulation(LeastFrequentlyUsed(4, KEYS), 4)
    for _ in range(5):
        simulation.request([0, 1, 2])
    for newcomer in range(10, 20):
        simulation.request([newcomer])
    assert set(simulation.owners.tolist()) == {0, 1, 2, 19}


def test_lfu_lets_old_uses_count_less_and_less() -> None:
    simulation = Simulation(LeastFrequentlyUsed(2, KEYS), 2)
    for _ in range(20):
        simulation.request([0, 1])
    for _ in range(200):
        simulation.request([2, 3])
    simulation.request([4])
    assert 0 not in simulation.owners and 1 not in simulation.owners


def test_lfu_begins_with_what_it_is_told_to_expect() -> None:
    expected = np.arange(KEYS, dtype=np.float32) / np.float32(KEYS)
    simulation = Simulation(LeastFrequentlyUsed(3, KEYS, expected), 3)
    for key in [39, 38, 0, 1]:
        simulation.request([key])
    assert set(simulation.owners.tolist()) == {39, 38, 1}


def test_expected_uses_fall_with_the_place_and_add_up_to_the_share() -> None:
    uses = expect_uses(2, 1000, share=0.1)
    assert uses.shape == (2, 1000)
    assert (np.diff(uses[0]) <= 0).all()
    assert uses[0].mean() == pytest.approx(0.1, rel=0.05) and uses[0].max() <= 1
