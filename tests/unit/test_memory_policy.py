"""The cold cache's replacement, against the textbook's LRU."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pi2.memory.policy import LeastRecentlyUsed

steps = st.lists(
    st.tuples(st.booleans(), st.lists(st.integers(0, 15), unique=True, max_size=12)), max_size=60
)


@given(steps)
def test_evicts_the_same_slots_as_an_ordered_dict(
    steps: list[tuple[bool, list[int]]],
) -> None:
    policy = LeastRecentlyUsed(16)
    model = OrderedDict.fromkeys(range(16))
    for evict, slots in steps:
        if evict:
            expected = [model.popitem(last=False)[0] for _ in slots]
            assert policy.evict(len(slots)).tolist() == expected
            model.update(dict.fromkeys(expected))
        else:
            policy.touch(np.array(slots, np.int32))
            for slot in slots:
                model.move_to_end(slot)


def test_survives_many_more_uses_than_its_queue_is_long() -> None:
    policy = LeastRecentlyUsed(8)
    for turn in range(10_000):
        policy.touch(np.array([turn % 7], np.int32))
    assert policy.evict(2).tolist() == [7, (10_000 - 7) % 7]


def test_no_slots_is_a_valid_capacity() -> None:
    assert len(LeastRecentlyUsed(0).evict(0)) == 0
