"""Records behave as dataclasses of the standard library do."""

import copy
import dataclasses
import pickle
from functools import cached_property
from inspect import signature
from typing import Any, ClassVar, Generic, TypeVar

import pytest

from pi2 import records
from pi2.records import dataclass, field

Value = TypeVar("Value")


def define(make: Any, **options: Any) -> Any:
    @make(**options)
    class Base(Generic[Value]):
        kinds: ClassVar[int] = 3
        first: Value
        hidden: int = field(default=7, repr=False, compare=False)

    @make(**options)
    class Derived(Base[Any]):
        rest: list[int] = field(default_factory=list)
        made: int = field(default=0, init=False, compare=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "made", self.hidden + 1)

    return Derived


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float = 2.0

    def __repr__(self) -> str:
        return "a point"


@pytest.mark.parametrize("kw_only", [False, True])
@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_records_are_as_dataclasses(frozen: bool, slots: bool, kw_only: bool) -> None:
    options = {"frozen": frozen, "slots": slots, "kw_only": kw_only}
    ours, theirs = (define(make, **options) for make in (dataclass, dataclasses.dataclass))
    seen = []
    for kind in (ours, theirs):
        one, same = kind(first=1, rest=[2]), kind(first=1, hidden=8, rest=[2])
        seen.append(
            (repr(one), one.made, same.made, list(signature(kind).parameters), kind.__match_args__)
        )
        assert one == same
        assert one != kind(first=1, rest=[3])
        assert (one == 1) is False
        assert records.replace(one, first=5).first == 5
        assert records.asdict(one) == {"first": 1, "hidden": 7, "rest": [2], "made": 8}
        assert copy.deepcopy(one) == copy.copy(one) == one
        assert slots is not hasattr(one, "__dict__")
        assert kind(first=1).rest is not kind(first=1).rest
        if frozen:
            assert hash(kind(first=1, rest=())) == hash((1, ()))
            with pytest.raises(dataclasses.FrozenInstanceError):
                one.first = 2
            with pytest.raises(dataclasses.FrozenInstanceError):
                del one.first
        else:
            one.first = 2
            assert kind.__hash__ is None
        with pytest.raises(TypeError, match="missing 1 required"):
            kind()
        if kw_only:
            with pytest.raises(TypeError, match="positional"):
                kind(1)
    assert seen[0] == seen[1]


def test_records_keep_their_own_methods() -> None:
    @dataclass(frozen=True)
    class Named:
        name: str

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Named)

        @cached_property
        def length(self) -> int:
            return len(self.name)

    nan = float("nan")
    assert repr(Point(1.0)) == "a point"
    assert pickle.loads(pickle.dumps(Point(1.0, 3.0))) == Point(1.0, 3.0)
    assert Point(nan) == Point(nan)
    assert Named("ab") == Named("c")
    assert Named("ab").length == 2
    assert {Named("ab"): 1}[Named("ab")] == 1


def test_a_record_without_equality_is_only_itself() -> None:
    @dataclass(slots=True, eq=False)
    class Slot:
        place: int

    assert Slot(1) != Slot(1)
    assert len({Slot(1), Slot(1)}) == 2
