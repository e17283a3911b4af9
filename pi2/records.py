"""Dataclasses that are quick to make: a start of pi2 makes 320 classes.

The standard library compiles six functions for each class, which took a quarter of a start.
Here a class compiles ``__init__`` when it is first needed, and shares all others.
``InitVar`` and ``hash=`` are unknown.
"""

import dataclasses
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, asdict, astuple, field, fields, is_dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn

__all__ = ["MISSING", "Field", "asdict", "astuple", "dataclass", "field", "fields"]
__all__ += ["is_dataclass", "replace"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, slots=False, kw_only=False, eq=True):
        def make(cls):
            cls.__doc__ = cls.__doc__ or cls.__name__  # or the library writes a signature
            library = dataclasses.dataclass(
                init=False, repr=False, eq=False, slots=slots, kw_only=kw_only
            )
            return _add_methods(library(cls), frozen=frozen, slots=slots, eq=eq)

        return make if cls is None else make(cls)


def _add_methods(cls: Any, *, frozen: bool, slots: bool, eq: bool) -> Any:
    methods: dict[str, Any] = {"__repr__": _show, "__init__": _LateInit(cls, frozen)}
    if frozen:
        methods |= {"__setattr__": _refuse_change, "__delattr__": _refuse_change}
        if slots:
            methods |= {"__getstate__": _list_values, "__setstate__": _set_values}
    if eq:
        compared = _make_key([item.name for item in fields(cls) if item.compare])
        methods["__eq__"] = _make_equal(compared)
        methods["__hash__"] = (lambda self: hash(compared(self))) if frozen else None
    own = vars(cls)
    for name, method in methods.items():
        # Python itself puts None for __hash__ beside an __eq__
        if name not in own or (name == "__hash__" and own[name] is None):
            setattr(cls, name, method)
    return cls


class _LateInit:
    """``__init__`` of a class until somebody asks for it."""

    def __init__(self, cls: Any, frozen: bool) -> None:
        self.cls, self.frozen = cls, frozen

    def __get__(self, item: object, owner: object = None) -> Any:
        self.cls.__init__ = init = _compile_init(self.cls, self.frozen)
        return init if item is None else init.__get__(item)


def _make_key(names: Sequence[str]) -> Callable[[Any], Any]:
    """A tuple, since tuples take what is the same object as equal: arrays, NaN."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda item: tuple(getattr(item, name) for name in names)


def _make_equal(key: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: (
        key(self) == key(other) if other.__class__ is self.__class__ else NotImplemented
    )


def _compile_init(cls: Any, frozen: bool) -> Any:
    every = fields(cls)
    known: dict[str, Any] = {"__name__": cls.__module__, "__set": object.__setattr__}
    known["__absent"] = MISSING
    parameters: tuple[list[str], list[str]] = ["self"], []
    lines = ["pass"]
    for item in every:
        name, value, default = item.name, item.name, ""
        if item.default_factory is not MISSING:
            known[f"__make_{name}"] = item.default_factory
            default = "=__absent"
            value = f"__make_{name}()" + f" if {name} is __absent else {name}" * item.init
        elif item.default is not MISSING:
            known[f"__default_{name}"] = item.default
            default = f"=__default_{name}"
            value = name if item.init else f"__default_{name}"
        elif not item.init:
            continue
        if item.init:
            parameters[bool(item.kw_only)].append(name + default)
        lines.append(f"__set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    named = ", ".join([*parameters[0], *["*"][: len(parameters[1])], *parameters[1]])
    exec(f"def __init__({named}):\n " + "\n ".join(lines), known)
    init = known["__init__"]
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    init.__annotations__ = {item.name: item.type for item in every if item.init} | {"return": None}
    return init


@reprlib.recursive_repr()
def _show(self: Any) -> str:
    shown = (f"{item.name}={getattr(self, item.name)!r}" for item in fields(self) if item.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _refuse_change(self: Any, name: str, *value: object) -> NoReturn:
    raise dataclasses.FrozenInstanceError(f"{type(self).__name__} is frozen: {name} cannot change")


def _list_values(self: Any) -> list[Any]:
    return [getattr(self, item.name) for item in fields(self)]


def _set_values(self: Any, values: Sequence[Any]) -> None:
    for item, value in zip(fields(self), values, strict=True):
        object.__setattr__(self, item.name, value)
