"""Which tokens a prompt gives to guess, and when guessing pays."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pi2.engine.speculation import (
    FIRST_REST,
    PLAIN_STEPS,
    REFRESH_STEPS,
    TRIAL_STEPS,
    Payback,
    PromptLookup,
    Touched,
)


def propose(ids: Sequence[int], match: int = 2, most: int = 3) -> list[int]:
    return PromptLookup(match).propose(0, np.array(ids, np.int64), most)


def test_what_came_after_the_last_tokens_is_guessed() -> None:
    assert propose([1, 2, 3, 4, 5, 9, 1, 2]) == [3, 4, 5]
    assert propose([1, 2, 3, 4, 5, 9, 1]) == []
    assert propose([1]) == []
    assert propose([7, 7, 7]) == [7]
    # The longest match counts, then the latest.
    assert propose([8, 1, 2, 3, 5, 1, 2, 4, 8, 1, 2]) == [3, 5, 1]
    assert propose([5, 1, 2, 3, 6, 1, 2, 4, 7, 1, 2]) == [4, 7, 1]


def test_an_index_that_grows_finds_what_a_new_one_finds() -> None:
    draw = np.random.default_rng(3)
    ids = draw.integers(0, 4, 200)
    growing = PromptLookup(3)
    for end in range(1, 200, 3):
        known = ids[:end]
        assert growing.propose(0, known, 5) == PromptLookup(3).propose(0, known, 5)
    growing.forget(0)
    assert growing.propose(0, np.array([1, 2, 3]), 4) == []


def feed(
    payback: Payback, steps: int, *, kept: int, size: int, seconds: float, flash: int = 0
) -> list[bool]:
    """Steps as they are wanted, of which those with guesses keep ``kept`` tokens, touch ``size``
    bytes in memory and ``flash`` on flash, and take ``seconds``; those without touch 90 and 10, and
    take a second."""
    found = []
    for _ in range(steps):
        drafted = payback.wants_draft()
        found.append(drafted)
        touched = Touched(size, flash or 10 * kept) if drafted else Touched(90, 10)
        tokens, taken_s = (kept, seconds) if drafted else (1, 1.0)
        payback.note(drafted=drafted, tokens=tokens, touched=touched, seconds=taken_s)
    return found


def test_guessing_goes_on_while_it_saves_bytes_and_time() -> None:
    found = feed(Payback(), 200, kept=3, size=200, seconds=2.0)
    assert found[:PLAIN_STEPS] == [False] * PLAIN_STEPS
    assert found[PLAIN_STEPS : PLAIN_STEPS + REFRESH_STEPS] == [True] * REFRESH_STEPS
    assert not found[PLAIN_STEPS + REFRESH_STEPS], "steps without guesses stay known"
    assert sum(found) > 180


@pytest.mark.parametrize(("kept", "size", "seconds"), [(1, 140, 0.5), (2, 230, 1.0), (2, 130, 2.5)])
def test_guessing_rests_where_it_saves_no_bytes_or_no_time(
    kept: int, size: int, seconds: float
) -> None:
    payback = Payback()
    found = feed(payback, 1000, kept=kept, size=size, seconds=seconds)
    first = PLAIN_STEPS + TRIAL_STEPS
    assert all(found[PLAIN_STEPS:first])
    assert not any(found[first : first + FIRST_REST])
    assert all(found[first + FIRST_REST : first + FIRST_REST + TRIAL_STEPS])
    assert sum(found) <= 6 * TRIAL_STEPS, "each rest is longer than the one before"


def test_what_rests_is_taken_up_only_for_more_than_it_takes_to_go_on() -> None:
    slight: dict[str, Any] = {"kept": 2, "size": 176, "seconds": 1.5}
    assert sum(feed(Payback(), 400, **slight)) > 350
    payback = Payback()
    feed(payback, PLAIN_STEPS + TRIAL_STEPS, kept=1, size=300, seconds=3.0)
    assert not payback.is_on
    assert sum(feed(payback, 400, **slight)) < 50
    feed(payback, 600, kept=4, size=200, seconds=2.0)
    assert payback.is_on
