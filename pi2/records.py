"""Dataclasses that write their methods when these are used first: to write all that a small model's
run imports takes longer than to load the model."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable
from dataclasses import MISSING, asdict, astuple, field, fields, is_dataclass, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from dataclasses import dataclass

__all__ = ["asdict", "astuple", "dataclass", "field", "fields", "is_dataclass", "replace"]


def _make_dataclass(
    own: type | None = None, /, *, frozen: bool = False, eq: bool = True, **layout: bool
) -> Any:
    """Do what `dataclasses.dataclass` does; ``layout``: ``slots`` and ``kw_only``."""
    if own is None:
        return partial(_make_dataclass, frozen=frozen, eq=eq, **layout)
    own.__doc__ = own.__doc__ or own.__name__  # else its signature is written
    made: Any = dataclasses.dataclass(init=False, repr=False, eq=False, **layout)(own)
    methods: dict[str, Any] = {"__init__": _begin(made, frozen), "__repr__": _show}
    if eq:
        methods |= _make_comparison(made, frozen)
    if frozen:
        methods |= _make_guards(made)
        if layout.get("slots"):
            methods |= {"__getstate__": _get_state, "__setstate__": _set_state}
    for name, method in methods.items():
        # A class with `__eq__` has no hash unless it says so.
        if name not in vars(made) or (name == "__hash__" and vars(made)[name] is None):
            setattr(made, name, method)
    return made


if not TYPE_CHECKING:
    dataclass = _make_dataclass


def _begin(made: Any, frozen: bool) -> Callable[..., None]:
    def __init__(self: object, *arguments: object, **named: object) -> None:
        made.__init__ = _write_init(made, frozen)
        made.__init__(self, *arguments, **named)

    return __init__


def _write_init(made: type, frozen: bool) -> Callable[..., None]:
    scope: dict[str, Any] = {"_set": object.__setattr__, "_missing": MISSING}
    parameters: dict[bool, list[str]] = {False: ["self"], True: []}
    body = []
    for own in fields(made):
        name, value = own.name, own.name
        if own.default_factory is not MISSING:
            scope[f"_make_{name}"], default = own.default_factory, "_missing"
            value = f"_make_{name}() if {name} is _missing else {name}" if own.init else ""
            value = value or f"_make_{name}()"
        elif own.default is not MISSING:
            scope[f"_default_{name}"] = own.default
            default = f"_default_{name}"
            value = name if own.init else default
        else:
            default = ""
        if own.init:
            parameters[own.kw_only is True].append(f"{name}={default}" if default else name)
        elif not default:
            continue
        body.append(f"_set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    if hasattr(made, "__post_init__"):
        body.append("self.__post_init__()")
    listed = parameters[False] + (["*", *parameters[True]] if parameters[True] else [])
    lines = "\n    ".join(body or ["pass"])
    exec(f"def __init__({', '.join(listed)}):\n    {lines}\n", scope)
    return cast("Callable[..., None]", scope["__init__"])


@reprlib.recursive_repr()
def _show(self: Any) -> str:
    parts = (f"{own.name}={getattr(self, own.name)!r}" for own in fields(self) if own.repr)
    return f"{type(self).__qualname__}({', '.join(parts)})"


def _make_comparison(made: type, frozen: bool) -> dict[str, Any]:
    names = [own.name for own in fields(made) if own.compare]
    # Two at least, so that a tuple comes: its equality begins with identity.
    take = attrgetter(*names, *names[: len(names) == 1]) if names else lambda own: ()

    def __eq__(self: object, other: object) -> bool:
        if other.__class__ is self.__class__:
            return bool(take(self) == take(other))
        return NotImplemented

    def __hash__(self: object) -> int:
        return hash(take(self))

    return {"__eq__": __eq__, "__hash__": __hash__ if frozen else None}


def _make_guards(made: Any) -> dict[str, Any]:
    names = frozenset(own.name for own in fields(made))

    def __setattr__(self: object, name: str, value: object) -> None:
        if type(self) is made or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(made, self).__setattr__(name, value)

    def __delattr__(self: object, name: str) -> None:
        if type(self) is made or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(made, self).__delattr__(name)

    return {"__setattr__": __setattr__, "__delattr__": __delattr__}


def _get_state(self: Any) -> list[Any]:
    return [getattr(self, own.name) for own in fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for own, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, own.name, value)
