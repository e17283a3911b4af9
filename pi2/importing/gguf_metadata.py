"""What GGUF files state, read with care and held against the model that was made of it."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tomli

from pi2.diagnostics import Diagnostic, UserError
from pi2.importing.config import ACTIVATIONS
from pi2.model.blocks import list_turns
from pi2.plan.documents.model import Model
from pi2.plan.toml.expressions import evaluate, parse_expression

_MOST_FLOAT32 = float(np.finfo(np.float32).max)


class Metadata:
    """Metadata whose values are checked as they are read."""

    def __init__(self, file: Path, values: Mapping[str, Any]) -> None:
        self.file = file
        self.values = values
        self.used = set[str]()
        """Keys whose values were requested."""
        self.architecture = ""
        self.architecture = self.read("general.architecture", str)

    def read(self, key: str, kind: type[object], default: Any = None) -> Any:
        """Value of ``key`` with ``{arch}``; equal numbers of layers as one. `UserError` P532."""
        key = self._complete(key)
        value: Any = self._take(key)
        if isinstance(value, np.ndarray) and kind in (int, float) and len(value):
            if key.endswith((".head_count", ".head_count_kv")):
                # Layers that keep a state have none; shapes contradict other wrong numbers.
                value = value[:1] * 0 + value.max()
            if key.endswith(".feed_forward_length") and value.any():
                # Blocks that mix tokens have no FFN.
                value = value[value != 0]
            if not (value == value[0]).all():
                raise self.refuse(f"{key} differs between layers, which pi2 cannot compute")
            value = value[0].item()
        if value is None:
            if default is None:
                raise self.refuse(f"it does not state {key}")
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise self.refuse(f"{key} is {value!r}, expected {kind.__name__}")
        if isinstance(value, float):
            if not abs(value) <= _MOST_FLOAT32:
                raise self.refuse(f"{key} is {value!r}")
            # Files have 32 bits of what people wrote in decimals: 1e-5 and not 9.99999975e-6.
            value = float(str(np.float32(value)))
        return value

    def read_count(self, key: str) -> int:
        """A whole number of 1 or more; raises as `read` does."""
        count: int = self.read(key, int)
        if count < 1:
            raise self.refuse(f"{self._complete(key)} is {count}, expected 1 or more")
        return count

    def read_list(self, key: str, layers: int, kinds: str) -> list[Any] | None:
        """A value of numpy's ``kinds`` for each layer; None if no list is stated; `UserError` P532
        for a wrong one."""
        value = self._take(self._complete(key))
        if not isinstance(value, np.ndarray | list):
            return None
        found = np.asarray(value)
        if found.ndim != 1 or found.dtype.kind not in kinds or len(found) < layers:
            raise self.refuse(f"{self._complete(key)} is no list of {layers} such values")
        values: list[Any] = found[:layers].tolist()
        return values

    def read_layer(self, key: str, layer: int) -> int:
        """A layer's whole number, of which a file states one or all; 0 where it states none."""
        counts = self.read_list(key, layer + 1, "iu")
        number: int = self.read(key, int, 0) if counts is None else counts[layer]
        return number

    def read_layer_types(self, layers: int, every: int) -> list[str]:
        """Kinds of attention: a file may state them by layers, or that the last of so many layers
        sees all tokens (0: none does); without that, the last of ``every`` does. The first instead
        of the last where ``every`` is negative."""
        key = "{arch}.attention.sliding_window_pattern"
        flags = self.read_list(key, layers, "biu")
        if flags is None:
            period = self.read(key, int, abs(every))
            if period < 0:
                raise self.refuse(f"{self._complete(key)} is {period}")
            whole = 0 if every < 0 else period - 1
            flags = [period == 0 or layer % period != whole for layer in range(layers)]
        return [("full_attention", "sliding_attention")[bool(flag)] for flag in flags]

    def find(self, name: str) -> Any:
        """The value of a key after the architecture's name, of any type; None if not stated."""
        key = f"{{arch}}.{name}"
        value = self.values.get(self._complete(key))
        if isinstance(value, np.ndarray):
            return self.read(key, float if value.dtype.kind == "f" else int)
        return None if value is None else self.read(key, type(value))

    def has(self, key: str) -> bool:
        return self._complete(key) in self.values

    def _complete(self, key: str) -> str:
        return key.replace("{arch}", self.architecture)

    def _take(self, key: str) -> Any:
        self.used.add(key)
        return self.values.get(key)

    def refuse(self, problem: str) -> UserError:
        return UserError.of(
            "P532",
            f"cannot read {self.file}: {problem}",
            help="export the file again, or convert the original checkpoint",
        )


_PATTERN = "attention.sliding_window_pattern"


@cache
def read_statements() -> Mapping[str, Any]:
    """What gguf_metadata.toml says of keys."""
    return tomli.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def list_idle(metadata: Metadata, model: Model) -> dict[str, str]:
    """Keys after the architecture's name that change nothing in ``model``, with the reasons."""
    said, names = read_statements(), _name_value(metadata, model)
    known = {key.removeprefix(f"{metadata.architecture}.") for key in metadata.used}
    known |= {*said["compared"], "expert_feed_forward_length"}
    idle: dict[str, str] = dict(said["idle"])
    for table in said["idle_if"]:
        if _hold(names, table["test"]):
            begins = tuple(table.get("begins", ()))
            keys = {*table.get("keys", ()), *(key for key in known if key.startswith(begins))}
            idle |= dict.fromkeys(keys.difference(table.get("except", ())), table["reason"])
    return idle


def _states_no_window(metadata: Metadata) -> bool:
    width, pattern = (
        metadata.values.get(f"{metadata.architecture}.{key}")
        for key in ("attention.sliding_window", _PATTERN)
    )
    if isinstance(pattern, np.ndarray):
        return width == 0 or not pattern.any()
    return width == 0 or pattern == 1


_OTHERS = ("adapter.", "xielu.")
"""Prefixes of keys, outside of the architecture's, that belong to its computation."""


@dataclass(frozen=True, slots=True)
class ModelNames:
    """What names mean in expressions of a model: keys of its document, and ``own`` ones."""

    model: Model
    own: Mapping[str, Any]
    functions: Mapping[str, Callable[..., Any]]
    """What expressions may call: these names come before the arguments."""

    @property
    def layers(self) -> int:
        return self.model.shape.layers

    def compute(self, text: str) -> Any:
        return evaluate(parse_expression(text), self)

    def find(self, name: str) -> Any:
        start, *rest = name.split(".")
        found: Any = self.own[start] if start in self.own else getattr(self.model, start, None)
        for part in rest:
            found = found.get(part) if isinstance(found, Mapping) else getattr(found, part, None)
        return found

    def call(self, name: str, arguments: list[Any]) -> Any:
        return self.functions[name](self, *arguments)


def _name_value(metadata: Metadata, model: Model, value: Any = None) -> ModelNames:
    """What names mean in gguf_metadata.toml."""
    return ModelNames(model, {"metadata": metadata, "value": value}, _FUNCTIONS)


def _hold(names: ModelNames, test: str) -> bool:
    try:
        return bool(names.compute(test))
    except TypeError:  # a value of another type
        return False


def _list_bases(names: ModelNames) -> list[float]:
    # Of the model's own positions no layer may be left.
    return [names.model.rope.theta, *(rope.theta for rope, _ in list_turns(names.model))]


def _was_read(names: ModelNames, key: str) -> bool:
    """Whether the value of a key after the architecture's name was requested."""
    metadata: Metadata = names.own["metadata"]
    return f"{metadata.architecture}.{key}" in metadata.used


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "bases": _list_bases,
    "has_router": lambda names, layer: names.model.blocks[layer].ffn.has_router,
    "is_one_of": lambda names, value, known: any(_is_same(own, value) for own in known),
    "is_stated": lambda names, key: names.own["metadata"].has(f"{{arch}}.{key}"),
    "name_activation": lambda names, value: ACTIVATIONS.get(value),
    "rotated": lambda names: [rope.count_rotated(width) for rope, width in list_turns(names.model)],
    "same": lambda names, found, stated: _is_same(found, stated),
    "states": lambda names, key, value: names.own["metadata"].find(key) == value,
    "states_no_window": lambda names: _states_no_window(names.own["metadata"]),
    "turns_nothing": lambda names: all(r.kind == "none" for r, _ in list_turns(names.model)),
    "was_read": _was_read,
    "scales": lambda names: [width**-0.5 for _, width in list_turns(names.model)],
}


def find_unread(metadata: Metadata, model: Model) -> Iterator[Diagnostic]:
    """P537 for every key whose value ``model`` does not have, and P544 for every key that is not
    read and may change results."""
    kind = metadata.values.get("general.type", "model")
    if kind != "model":
        yield _refuse(metadata, "general.type", kind)
    idle, said = list_idle(metadata, model), read_statements()
    for key, value in metadata.values.items():
        own = key.removeprefix(f"{metadata.architecture}.")
        if own == key:
            if key.startswith(_OTHERS) and key not in metadata.used:
                yield _refuse(metadata, key, value)
            continue
        if own in idle:
            continue
        is_nothing = type(value) in (int, float) and value == 0
        if own in said["compared"] and not is_nothing:
            path, *tests = said["compared"][own]
            test = tests[0] if tests else f"same({path}, value)"
            items = (_name_value(metadata, model, item) for item in _list_values(value))
            if not all(_hold(names, test) for names in items):
                yield _contradict(metadata, model, key, value, path)
        elif own in said["compared"] or key in metadata.used:
            continue
        elif not all(
            any(_is_same(item, n) for n in said["neutral"].get(own, ()))
            for item in _list_values(value)
        ):
            yield _refuse(metadata, key, value)


def _contradict(metadata: Metadata, model: Model, key: str, value: Any, path: str) -> Diagnostic:
    has = _name_value(metadata, model).find(path)
    return Diagnostic(
        code="P537",
        message=(
            f"{key} is {_show(value)} in {metadata.file}, but {path} is {has!r} in the model that "
            "pi2 knows by this architecture"
        ),
        help="convert the original checkpoint, or write the model document by hand and give "
        "--model",
    )


def _refuse(metadata: Metadata, key: str, value: Any) -> Diagnostic:
    return Diagnostic(
        code="P544",
        message=(
            f"{metadata.file} states {key} = {_show(value)}, which pi2 does not compute for the "
            f"architecture {metadata.architecture!r}"
        ),
        help="convert the original checkpoint, or write the model document by hand and give "
        "--model: the key is then left out",
    )


def _list_values(value: Any) -> list[Any]:
    """The values of all layers; one where it is no list."""
    return value.tolist() if isinstance(value, np.ndarray) else [value]


def _is_same(found: object, stated: object) -> bool:
    """Whether two values are the same, but for what 32 bits leave of a number."""
    if isinstance(found, bool) or isinstance(stated, bool):
        return found is stated
    if isinstance(found, int | float) and isinstance(stated, int | float):
        return math.isclose(found, stated, rel_tol=1e-5, abs_tol=1e-12)
    return bool(np.array_equal(np.asarray(found), np.asarray(stated)))


def _show(value: Any) -> str:
    values: Mapping[str, Any] | str = repr(
        value.tolist()[:8] if isinstance(value, np.ndarray) else value
    )
    return str(values)[:80]
