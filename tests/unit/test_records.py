"""`pi2.records.dataclass` makes what `dataclasses.dataclass` makes."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from pi2 import records


def make(dataclass: Callable[..., Any], **options: bool) -> Any:
    @dataclass(**options)
    class Own:
        """A class."""

        first: int
        second: list[int] = dataclasses.field(default_factory=list)
        third: str = dataclasses.field(default="x", compare=False, repr=False)
        fourth: int = dataclasses.field(default=7, init=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "third", self.third.upper())

    Own.__qualname__ = "Own"
    return Own


def describe(call: Callable[[], object]) -> object:
    """What a call gives, or the kind of its exception."""
    try:
        return call()
    except Exception as error:
        return type(error)


def list_steps(own: Any) -> list[Callable[[], object]]:
    """What is done with a class."""
    one, other = own(first=1), own(first=1, third="y")
    return [
        lambda: repr(one),
        lambda: one == other,
        lambda: one == dataclasses.replace(one, first=2),
        lambda: hash(one) != 0,
        lambda: repr(own(1, [2])),
        lambda: own(),
        lambda: own(first=1, fourth=2),
        lambda: setattr(one, "first", 3),
        lambda: delattr(one, "third"),
        lambda: repr(copy.copy(other)),
        lambda: dataclasses.asdict(other)["fourth"],
    ]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("kw_only", [False, True])
@pytest.mark.parametrize("eq", [False, True])
def test_it_is_like_the_standard_one(frozen: bool, slots: bool, kw_only: bool, eq: bool) -> None:
    found = []
    for dataclass in (dataclasses.dataclass, records.dataclass):
        own = make(dataclass, frozen=frozen, slots=slots, kw_only=kw_only, eq=eq)
        found.append([describe(step) for step in list_steps(own)])
    assert found[0] == found[1]


@records.dataclass(frozen=True, slots=True)
class Kept:
    """A class that can be found by its name."""

    value: int


@records.dataclass(frozen=True, slots=True)
class Derived(Kept):
    """One that begins with another's fields."""

    more: int = 2


def test_it_can_be_pickled_derived_and_a_key() -> None:
    assert pickle.loads(pickle.dumps(Derived(1))) == Derived(1, 2) != Kept(1)
    assert {Kept(1): "a"}[Kept(1)] == "a"
    with pytest.raises(TypeError):
        Kept()  # type: ignore[call-arg]
