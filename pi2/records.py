"""`dataclass` for what a start imports: no method is compiled before it is called.

The standard one compiles up to six functions a class, a fifth of the time to load a small model."""

from __future__ import annotations

from dataclasses import MISSING, FrozenInstanceError, asdict, field, fields, is_dataclass, replace
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from dataclasses import dataclass
else:
    from dataclasses import dataclass as describe

    def dataclass(kind=None, /, *, frozen=False, eq=True, slots=False, kw_only=False):
        """The standard decorator without `InitVar`; its other settings are as usual."""

        def finish(kind):
            kind.__doc__ = kind.__doc__ or kind.__name__  # else its signature would be written
            made = describe(init=False, repr=False, eq=False, slots=slots, kw_only=kw_only)(kind)
            methods = {"__init__": _postpone_init(made, frozen), "__repr__": _show}
            if eq:
                methods |= _make_comparisons(made) | ({} if frozen else {"__hash__": None})
            if frozen:
                methods |= {"__setattr__": _refuse, "__delattr__": _refuse}
                methods |= {"__setstate__": _set_state} if slots else {}
            own = dict(vars(kind))
            if "__eq__" in own and own["__hash__"] is None:
                del own["__hash__"]  # Python's, not the class's
            for name in methods.keys() - own.keys():
                setattr(made, name, methods[name])
            return made

        return finish if kind is None else finish(kind)


__all__ = ["asdict", "dataclass", "field", "fields", "is_dataclass", "replace"]


def _postpone_init(kind: Any, frozen: bool) -> Callable[..., None]:
    def __init__(self: Any, *values: Any, **named: Any) -> None:
        kind.__init__ = _make_init(kind, frozen)
        kind.__init__(self, *values, **named)

    return __init__


def _make_init(kind: Any, frozen: bool) -> Callable[..., None]:
    scope: dict[str, Any] = {"_given": object(), "_set": object.__setattr__}
    positional, named, body = ["self"], ["*"], []
    for own in fields(kind):
        name = value = own.name
        parameter, default = name, f"_default_{name}"
        if own.default_factory is not MISSING:
            scope[default] = own.default_factory
            value = f"{default}() if {name} is _given else {name}" if own.init else f"{default}()"
            parameter = f"{name}=_given"
        elif own.default is not MISSING:
            scope[default] = own.default
            value = name if own.init else default
            parameter = f"{name}={default}"
        if own.init:
            (named if own.kw_only else positional).append(parameter)
        if own.init or default in scope:
            body.append(f"_set(self, '{name}', {value})" if frozen else f"self.{name} = {value}")
    if hasattr(kind, "__post_init__"):
        body.append("self.__post_init__()")
    parameters = ", ".join(positional + (named if len(named) > 1 else []))
    exec(f"def __init__({parameters}):\n " + "\n ".join(body or ["pass"]), scope)
    init: Callable[..., None] = scope["__init__"]
    init.__qualname__ = f"{kind.__qualname__}.__init__"
    return init


def _make_comparisons(kind: Any) -> dict[str, Any]:
    names = [own.name for own in fields(kind) if own.compare]
    get: Callable[[Any], tuple[Any, ...]] = (
        attrgetter(*names)
        if len(names) > 1
        else lambda record: tuple(getattr(record, name) for name in names)
    )

    def __eq__(self: Any, other: object) -> Any:
        return get(self) == get(other) if type(other) is type(self) else NotImplemented

    return {"__eq__": __eq__, "__hash__": lambda self: hash(get(self))}


@recursive_repr()
def _show(record: Any) -> str:
    shown = (f"{own.name}={getattr(record, own.name)!r}" for own in fields(record) if own.repr)
    return f"{type(record).__qualname__}({', '.join(shown)})"


def _refuse(record: Any, name: str, *value: object) -> None:
    """Set or delete an attribute that is no field, of a class derived from a record."""
    if "__dataclass_params__" in vars(type(record)) or name in record.__dataclass_fields__:
        raise FrozenInstanceError(f"cannot {'assign to' if value else 'delete'} field {name!r}")
    (object.__setattr__ if value else object.__delattr__)(record, name, *value)


def _set_state(record: Any, state: tuple[dict[str, object] | None, dict[str, object]]) -> None:
    for name, value in {**(state[0] or {}), **state[1]}.items():
        object.__setattr__(record, name, value)
