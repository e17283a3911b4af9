"""The part of pydantic that reads validated documents, because pydantic-core has no build for
Android. Values get types, defaults and units; ranges, patterns and unknown keys are not checked."""

import inspect
import json
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, reduce
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin, get_type_hints

__all__ = [
    "AfterValidator",
    "BaseModel",
    "BeforeValidator",
    "ConfigDict",
    "Field",
    "PlainSerializer",
    "StringConstraints",
    "ValidationError",
    "WithJsonSchema",
    "model_validator",
]

Convert = Callable[[Any], Any]
_MISSING: Any = object()


class ValidationError(ValueError):
    """A value is not what its field says; the text says which."""

    def errors(self, **_options: bool) -> list[dict[str, Any]]:
        return [{"loc": (), "msg": str(self), "type": "value_error"}]


@dataclass(frozen=True)
class BeforeValidator:
    """Makes a value from text."""

    func: Convert
    json_schema_input_type: Any = None


@dataclass(frozen=True)
class AfterValidator:
    """Checks a value, or makes another of it."""

    func: Convert


class _Ignored:
    """Says something about a field that only matters where documents are written or checked."""

    def __init__(self, *_values: Any, **_options: Any) -> None:
        pass


PlainSerializer = StringConstraints = WithJsonSchema = _Ignored
ConfigDict = dict


@dataclass(frozen=True)
class FieldInfo:
    default: Any = _MISSING

    def is_required(self) -> bool:
        return self.default is _MISSING


def Field(default: Any = _MISSING, **_options: Any) -> Any:
    """A field with a default; what else it says is not looked at."""
    return FieldInfo(None if default is ... else default)


def model_validator(*, mode: str) -> Callable[[Convert], Convert]:
    def mark(method: Convert) -> Convert:
        method.__mode__ = mode  # type: ignore[attr-defined]
        return method

    return mark


class BaseModel:
    """A table of typed values."""

    model_fields: dict[str, FieldInfo] = {}
    __checks__: tuple[str, ...] = ()
    __readers__: tuple[str, ...] = ()

    def __init_subclass__(cls, **_options: Any) -> None:
        fields = dict(cls.model_fields)
        for name, kind in inspect.get_annotations(cls).items():
            if name == "model_config" or "ClassVar" in str(kind):
                continue
            given = cls.__dict__.get(name, _MISSING)
            fields[name] = given if isinstance(given, FieldInfo) else FieldInfo(given)
            if isinstance(given, FieldInfo):
                delattr(cls, name)
        cls.model_fields = fields
        modes = {key: getattr(own, "__mode__", None) for key, own in cls.__dict__.items()}
        cls.__checks__ += tuple(key for key, mode in modes.items() if mode == "after")
        cls.__readers__ += tuple(key for key, mode in modes.items() if mode == "before")

    def __init__(self, **values: Any) -> None:
        self._fill(values)
        self._check()

    def _fill(self, values: Mapping[str, Any]) -> None:
        for name, field in type(self).model_fields.items():
            value = values.get(name, field.default)
            if value is _MISSING:
                raise ValidationError(f"{type(self).__name__}.{name} is missing")
            self.__dict__[name] = value
        self.__dict__["model_fields_set"] = {name for name in values if name in self.__dict__}

    def _check(self) -> None:
        for name in self.__checks__:
            getattr(self, name)()

    @classmethod
    def model_construct(cls, **values: Any) -> Self:
        made = cls.__new__(cls)
        for name, field in cls.model_fields.items():
            if name in values or not field.is_required():
                made.__dict__[name] = values.get(name, field.default)
        made.__dict__["model_fields_set"] = set(values)
        return made

    @classmethod
    def model_validate(cls, values: Any) -> Self:
        """Read a model; raises `ValidationError`."""
        if isinstance(values, cls):
            return values
        if not isinstance(values, dict):
            raise ValidationError(f"{cls.__name__}: a table is expected, not {values!r:.80}")
        for name in cls.__readers__:
            values = getattr(cls, name)(values)
        converters = _find_converters(cls)  # type: ignore[arg-type]  # a class has a hash
        found = {}
        for name, value in values.items():
            if name in converters:
                try:
                    found[name] = converters[name](value)
                except (TypeError, ValueError) as error:
                    raise ValidationError(f"{name}: {error}") from None
        made = cls.__new__(cls)
        made._fill(found)
        made._check()
        return made

    @classmethod
    def model_validate_json(cls, text: str | bytes) -> Self:
        """Read a model's JSON; raises `ValidationError`."""
        return cls.model_validate(json.loads(text))

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__, **(update or {}))
        made.__dict__["model_fields_set"] = self.__dict__["model_fields_set"] | set(update or {})
        return made

    def model_dump(
        self,
        *,
        mode: str = "python",
        include: set[str] | None = None,
        exclude: set[str] | None = None,
        exclude_none: bool = False,
        exclude_defaults: bool = False,
    ) -> dict[str, Any]:
        """Values as plain data; sizes stay numbers."""
        del mode
        return {
            name: _dump(value, exclude_none, exclude_defaults)
            for name, value in self._list_values()
            if (include is None or name in include)
            and name not in (exclude or ())
            and not (exclude_none and value is None)
            and not (exclude_defaults and value == type(self).model_fields[name].default)
        }

    def _list_values(self) -> Iterator[tuple[str, Any]]:
        for name in type(self).model_fields:
            if name in self.__dict__:
                yield name, self.__dict__[name]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return self._list_values()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, type(self)):
            return NotImplemented
        return list(self._list_values()) == list(other._list_values())

    def __hash__(self) -> int:
        return hash((type(self), *map(repr, self._list_values())))

    def __setattr__(self, name: str, value: Any) -> None:
        raise TypeError(f"{type(self).__name__} is frozen: {name} cannot be set")

    def __repr__(self) -> str:
        inner = ", ".join(f"{name}={value!r}" for name, value in self._list_values())
        return f"{type(self).__name__}({inner})"


def _dump(value: Any, exclude_none: bool, exclude_defaults: bool) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_none=exclude_none, exclude_defaults=exclude_defaults)
    if isinstance(value, dict):
        return {key: _dump(item, exclude_none, exclude_defaults) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_dump(item, exclude_none, exclude_defaults) for item in value]
    return value


@cache
def _find_converters(model: type[BaseModel]) -> dict[str, Convert]:
    names = vars(sys.modules[model.__module__]) | {model.__name__: model}
    hints = get_type_hints(model, localns=names, include_extras=True)
    return {name: _make_converter(hints[name]) for name in model.model_fields}


def _make_converter(kind: Any) -> Convert:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        # Quantities are read, paths are checked.
        before, after = (
            [note.func for note in inner[1:] if isinstance(note, own)]
            for own in (BeforeValidator, AfterValidator)
        )
        steps = [*before, _make_converter(inner[0]), *after]
        return lambda value: reduce(lambda found, step: step(found), steps, value)
    if kind is Any:
        return lambda value: value
    if origin in (Union, types.UnionType):
        options = [_make_converter(item) for item in inner if item is not type(None)]
        return lambda value: _choose(options, type(None) in inner, value)
    if origin is Literal:
        return lambda value: _check_choice(inner, value)
    if origin is tuple:
        assert len(inner) == 2 and inner[1] is ..., kind
        convert = _make_converter(inner[0])
        return lambda value: tuple(map(convert, _expect(value, (list, tuple))))
    if origin is dict:
        convert = _make_converter(inner[1])
        return lambda value: {key: convert(item) for key, item in _expect(value, (dict,)).items()}
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind.model_validate
    if kind is float:
        return lambda value: float(_expect(value, (int, float)))
    assert kind in (int, str, bool), kind
    return lambda value: _expect(value, (kind,))


def _choose(options: list[Convert], optional: bool, value: Any) -> Any:
    if value is None and optional:
        return None
    problems = []
    for convert in options:
        try:
            return convert(value)
        except (TypeError, ValueError) as error:
            problems.append(str(error))
    raise ValidationError("; ".join(problems))


def _check_choice(choices: tuple[Any, ...], value: Any) -> Any:
    if not isinstance(value, tuple({type(item) for item in choices})):
        raise ValidationError(f"{value!r:.80} is none of {choices}")
    return value


def _expect(value: Any, kinds: tuple[type, ...]) -> Any:
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise ValidationError(f"{names} is expected, not {value!r:.80}")
    return value
