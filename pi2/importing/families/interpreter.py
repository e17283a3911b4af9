"""Computes a model document's tables from a configuration and its family's document."""

from collections.abc import Iterator, Mapping
from inspect import isfunction, signature
from pathlib import Path
from types import ModuleType
from typing import Any

from pi2.diagnostics import UserError
from pi2.fitting.check import check_file
from pi2.importing.config import Config
from pi2.plan.documents.common import find_type, flatten
from pi2.plan.documents.family import Family, Sections, Window
from pi2.plan.documents.model import Model
from pi2.plan.toml.expressions import MARK, evaluate, is_expression, list_names, parse_expression

Tables = dict[str, Any]
_LAYERS = ("num_hidden_layers", "n_layer")
_FAILURES = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
_SHOWN = 60
"""Characters of a value in a message."""
_PARTS = ("gate", "up", "down")
_WINDOW_KINDS = ("sliding_attention", "full_attention")


def expand_names(
    names: Mapping[str, str], layer: str, key_layer: str = ""
) -> Iterator[tuple[str, str]]:
    """The names that a document's ``names`` stand for, with their keys. Names that begin with a dot
    follow ``layer``, and such keys ``key_layer``."""
    for pair in names.items():
        key, name = (
            start + text if text.startswith(".") else text
            for start, text in zip((key_layer, layer), pair, strict=True)
        )
        for part in _PARTS if "{part}" in key else ("",):
            own, pattern = (text.replace("{part}", part) for text in (key, name))
            if not own.endswith(".*") and not pattern.endswith(".*"):
                yield own, pattern
                continue
            for end, bias in ((".weight", ""), (".bias", "_bias")):
                stated = own.replace(".*", end) if own.endswith(".*") else own + bias
                yield stated, pattern.replace(".*", end)


def read_family(file: Path) -> Family:
    """The document ``file``; `UserError` states its mistakes."""
    report = check_file(file)
    if not report.is_sound:
        raise report.make_error()
    assert isinstance(report.document, Family)
    return report.document


def show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


class Completed:
    """A configuration with its family's assumed and fixed keys; values are computed on demand."""

    def __init__(self, config: Config, sections: Sections, functions: ModuleType) -> None:
        self.config = self.raw = config
        self.functions = functions
        self.assume, self.fix = sections.assume, sections.fix
        self.known: dict[str, Any] = {}
        self.open = set[str]()

    @property
    def layers(self) -> int:
        stated = (key for key in _LAYERS if self.config.has(key))
        return self.config.read(next(stated, _LAYERS[0]), int)

    def find(self, name: str) -> Any:
        if name in self.known:
            return self.known[name]
        value = self.config.values.get(name)
        if name in self.fix and name not in self.open:
            self.open.add(name)
            value = self.resolve(self.fix[name])
            self.open.remove(name)
        elif value is None and name in self.assume:
            value = self.resolve(self.assume[name])
        if name not in self.open:
            self.known[name] = value
        return value

    def call(self, name: str, arguments: list[Any]) -> Any:
        function = vars(self.functions).get(name)
        if (
            not isfunction(function)
            or name.startswith("_")
            or (function.__module__ != self.functions.__name__)
        ):
            raise self.config.refuse(f"its family calls {name!r}, and pi2 has no such function")
        return function(self, *arguments)

    def resolve(self, value: Any) -> Any:
        return self.compute(value) if is_expression(value) else value

    def compute(self, text: str) -> Any:
        """The value of an expression; `UserError` P544 where there is none."""
        tree = parse_expression(text)
        try:
            value = evaluate(tree, self)
        except _FAILURES as error:
            raise self.refuse_values(text, f"cannot be computed: {error}") from None
        if isinstance(value, complex):
            raise self.refuse_values(text, "is no number")
        return value

    def judge(self, text: str) -> bool:
        """Whether a condition holds; one of a key that is not stated does not."""
        value = self.compute(text)
        if value is not None and not isinstance(value, bool):
            raise self.refuse_values(text, "is neither true nor false")
        return bool(value)

    def refuse_values(self, text: str, problem: str = "") -> UserError:
        """The refusal of an expression's values: ``problem`` is the fault; without one, the
        expression does not hold."""
        names = dict.fromkeys(list_names(parse_expression(text)))
        stated = [f"{name} is {show(self.find(name))}" for name in names]
        expression = text.removeprefix(MARK).strip()
        found = " and ".join(stated)
        if problem:
            return self.config.refuse(f"{found}, `{expression}` {problem}")
        return self.config.refuse(f"{found}; pi2 computes this family only if {expression}")

    def complete(self) -> Config:
        keys = [*self.fix, *(key for key in self.assume if not self.config.has(key))]
        return self.config.change({key: self.find(key) for key in keys})


class Description(Completed):
    """What functions of families work with: the completed configuration, and the tables so far."""

    def __init__(self, config: Config, family: Family, functions: ModuleType) -> None:
        plain = Completed(config, family, functions)
        sections: Sections = family
        for when in family.when.values():
            if plain.judge(when.test):
                sections = _overlay(sections, when)
        completed = Completed(config, sections, functions).complete()
        super().__init__(completed, Sections(), functions)
        self.raw, self.sections, self.family = config, sections, family
        read, fixed = dict(flatten(sections.read)), dict(flatten(sections.set))
        self.stated = {
            **read,
            **fixed,
            **{f"tensors.{k}": v for k, v in expand_names(sections.names, family.layer)},
        }
        self.reads = read.keys() - fixed.keys()
        self.tables: dict[str, Any] = {}
        self.windowed: list[int] = []

    @property
    def layers(self) -> int:
        layers: int = self.find("shape.layers")
        return layers

    def find(self, name: str) -> Any:
        """A key of the configuration, or, with dots, of the model document."""
        return self.value(name) if "." in name else super().find(name)

    def value(self, name: str) -> Any:
        if name not in self.tables and name in self.stated:
            value = self.stated[name]
            self.tables[name] = self.read(name) if name in self.reads else self.resolve(value)
        return self.tables.get(name)

    def read(self, name: str) -> Any:
        stated = self.stated[name]
        keys = [key for key in stated if isinstance(key, str)]
        default = stated[-1] if len(keys) < len(stated) else None
        if keys[-1].endswith("?"):
            keys[-1] = keys[-1][:-1]
            if not any(self.config.has(key) for key in keys):
                return None
        kind = find_type(Model, name.split("."))
        kind = kind if kind in (int, float, bool) else str
        key = next((key for key in keys if self.config.has(key)), keys[0])
        return self.config.read(key, kind, default)

    def put(self, name: str, value: Any) -> None:
        """State a key of the model document, unless the family's document does; a table whole."""
        if isinstance(value, Mapping):
            for key, item in value.items():
                self.put(f"{name}.{key}", item)
        elif name not in self.stated:
            self.tables[name] = value

    def replace(self, name: str, table: Mapping[str, Any]) -> None:
        for key in [key for key in self.tables if key.startswith(f"{name}.")]:
            del self.tables[key]
        self.put(name, table)

    def describe(self) -> Tables:
        """The tables; `UserError` P544 for what no model document can state."""
        for key, wanted in self.sections.only.items():
            self.config.demand(key, wanted, wanted)
        for text in self.sections.require.values():
            if not self.compute(text):
                raise self.refuse_values(text)
        if self.sections.window is not None:
            self.put_window(self.sections.window)
        if self.find("rope.kind") is None:
            self.call("rope", [])
        for name in self.sections.functions:
            function = vars(self.functions).get(name)
            if isfunction(function) and len(signature(function).parameters) > 1:
                raise self.config.refuse(f"its family names {name!r}, a function of expressions")
            self.call(name, [])
        for name in self.stated:
            self.value(name)
        return _nest(self.tables)

    def put_window(self, window: Window) -> None:
        config, layers, width = self.config, self.layers, window.width
        if not config.has("sliding_window"):
            if width is None or (window.needs_width and "sliding_window" in config.values):
                return
        width = config.read("sliding_window", int, width)
        kinds = config.read_list("layer_types")
        if not kinds:
            flags = self.compute(f"each({window.layers})")
            kinds = [_WINDOW_KINDS[not flag] for flag in flags]
        if len(kinds) != layers or not all(kind in _WINDOW_KINDS for kind in kinds):
            raise config.refuse(f"layer_types is not a list of {layers} kinds of attention")
        self.windowed = [n for n, kind in enumerate(kinds) if kind == _WINDOW_KINDS[0]]
        if self.windowed:
            self.put("attention.sliding_window", width)
        if 0 < len(self.windowed) < layers:
            self.put("attention.window_layers", self.windowed)
        still = [layer for layer in range(layers) if layer not in self.windowed]
        if window.still and still:
            self.put("other_rope", {"kind": "none", "layers": still})


def _overlay(base: Sections, other: Sections) -> Sections:
    changes: dict[str, Any] = {}
    for name in other.model_fields_set & Sections.model_fields.keys():
        value = getattr(other, name)
        changes[name] = _merge(getattr(base, name), value) if isinstance(value, dict) else value
    return base.model_copy(update=changes)


def _merge(base: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in other.items():
        own = merged.get(key)
        if isinstance(own, Mapping) and isinstance(value, Mapping):
            value = _merge(own, value)
        merged[key] = value
    return merged


def _nest(tables: Mapping[str, Any]) -> Tables:
    """Tables of dotted keys, without keys that have no value."""
    nested: Tables = {"attention": {}, "tensors": {}}
    for name, value in tables.items():
        if value is None or (isinstance(value, list) and not value):
            continue
        *way, key = name.split(".")
        table = nested
        for part in way:
            table = table.setdefault(part, {})
        table[key] = value
    return nested
