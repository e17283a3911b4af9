"""What GGUF files state, and what expressions of families' documents make of it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pi2.arrays import F32
from pi2.diagnostics import UserError
from pi2.importing.decoded_tensor import DecodedTensor, describe_decoded, refuse_shape
from pi2.importing.safetensors_file import SourceTensor
from pi2.plan.toml.expressions import evaluate, is_expression, list_names, parse_expression

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

    def read_count(self, key: str, default: int | None = None) -> int:
        """A whole number of 1 or more; raises as `read` does."""
        count: int = self.read(key, int, default)
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


@dataclass(frozen=True, slots=True)
class Scope:
    """What names mean in an expression: keys of a file, and of the configuration so far."""

    metadata: Metadata
    config: dict[str, Any]
    tensors: Mapping[str, SourceTensor]
    """By their names in the original."""
    layer: str
    """How names of a layer's tensors begin there."""

    @property
    def layers(self) -> int:
        layers: int = self.config["num_hidden_layers"]
        return layers

    def find(self, name: str) -> Any:
        start, _, own = name.partition(".")
        if start != "config":
            return self.metadata.find(name)
        found: Any = self.config
        for part in own.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    def call(self, name: str, arguments: list[Any]) -> Any:
        return _FUNCTIONS[name](self, *arguments)

    def compute(self, text: str) -> Any:
        """The value of a family's expression; `UserError` P532 where the file lacks a key of it."""
        tree, metadata = parse_expression(text), self.metadata
        try:
            return evaluate(tree, self)
        except (TypeError, ValueError, ArithmeticError, LookupError):
            own = [name for name in list_names(tree) if not name.startswith("config.")]
            values = {name: self.find(name) for name in own}
            stated = (f"{metadata.architecture}.{name} is {values[name]!r}" for name in values)
            missing = (
                f"it does not state {metadata.architecture}.{n}"
                for n in values
                if values[n] is None
            )
            problem = next(missing, f"{' and '.join(stated)}, which makes no {text.strip('= ')}")
            raise metadata.refuse(problem) from None

    def state(self, keys: Mapping[str, list[Any]]) -> None:
        """Put ``keys`` of a family's document into the configuration; one of a table that the
        configuration has not is left out.  Raises as `compute` and `Metadata.read`."""
        for name, (own, *default) in keys.items():
            place, _, key = name.rpartition(".")
            target = self.find(f"config.{place}") if place else self.config
            if target is not None:
                target[key] = self._read(own, *default)

    def _read(self, own: str, default: Any = None) -> Any:
        if is_expression(own):
            return self.compute(own)
        path = f"{{arch}}.{own}"
        if is_expression(default):
            default = self.compute(default)
        if default is None:
            return self.metadata.read_count(path)
        return self.metadata.read(path, type(default), default)


def _count(scope: Scope, whole: int, parts: int = 1) -> int:
    """A number of 1 or more, of each of ``parts``."""
    if whole < 1 or whole % parts:
        raise ValueError
    return whole // parts


def _list(scope: Scope, key: str, count: int | None = None) -> list[Any] | None:
    """What a key has for every layer, or ``count`` values; one counts for all layers."""
    path = key if key in scope.metadata.values else f"{{arch}}.{key}"
    found = scope.metadata.read_list(path, scope.layers if count is None else count, "biuf")
    one = scope.metadata.find(key) if found is None else None
    return found if one is None else [one] * scope.layers


def _has(scope: Scope, end: str, layer: int | None = None) -> bool:
    """Whether the name of a tensor ends so, or a ``layer`` has one of that name."""
    if layer is None:
        return any(name.endswith(end) for name in scope.tensors)
    return scope.layer.replace("{layer}", str(layer)) + end in scope.tensors


def _count_rows(scope: Scope, end: str) -> int | None:
    """Rows of the first tensor whose name ends so."""
    found = (own.shape[0] for name, own in scope.tensors.items() if name.endswith(end))
    return next(found, None)


def _find_share(scope: Scope, deviations: float) -> float:
    """The share of a normal distribution below so many standard deviations above its mean."""
    from statistics import NormalDist

    if not deviations < math.inf:
        raise ValueError
    # Files have 32 bits of what people wrote in decimals; below -infinity lies nothing.
    return round(NormalDist().cdf(deviations), 6)


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "count": _count,
    "first": lambda scope, *values: next((own for own in values if own is not None), None),
    "has": _has,
    "listed": _list,
    "rows": _count_rows,
    "share_below": _find_share,
    "softplus": lambda scope, number: float(np.logaddexp(number, 0)),
}
"""What expressions of `gguf` tables may call."""


_KEYS, _VALUES, _JOINED = (f".{name}_proj.weight" for name in ("k_b", "v_b", "kv_b"))


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedHeads(DecodedTensor):
    """The KV matrix [heads (plain + value), rank]."""

    keys: SourceTensor
    """Keys of one head after the other, turned [heads rank, plain]."""
    values: SourceTensor
    """Values of one head after the other [heads value, rank]."""

    def decode(self, start: int, stop: int) -> F32:
        plain, rank = self.keys.shape[1], self.shape[1]
        heads = self.keys.shape[0] // rank
        each, value = self.shape[0] // heads, self.values.shape[0] // heads
        first, last = start // each, -(-stop // each)
        joined = np.empty((last - first, each, rank), np.float32)
        turned = self.keys.read(first * rank, last * rank).reshape(-1, rank, plain)
        joined[:, :plain] = turned.swapaxes(1, 2)
        joined[:, plain:] = self.values.read(first * value, last * value).reshape(-1, value, rank)
        return joined.reshape(-1, rank)[start - first * each : stop - first * each]


def join_heads(tensors: dict[str, SourceTensor]) -> None:
    """Join separate key and value matrices; `UserError` P534 for shapes that do not fit."""
    for name in [name for name in tensors if name.endswith(_KEYS)]:
        keys, values = tensors[name], tensors.get(name.replace(_KEYS, _VALUES))
        if values is None:
            continue
        if len(keys.shape) != 3:
            raise refuse_shape(keys, (0, *values.shape[1:]))
        heads, rank, plain = keys.shape
        value = values.shape[1] if len(values.shape) == 3 else 0
        if values.shape != (heads, value, rank):
            raise refuse_shape(values, (heads, value, rank))
        del tensors[name], tensors[name.replace(_KEYS, _VALUES)]
        joined = name.replace(_KEYS, _JOINED)
        tensors[joined] = JoinedHeads(
            **describe_decoded(joined, (heads * (plain + value), rank), keys, values),
            keys=replace(keys, shape=(heads * rank, plain)),
            values=replace(values, shape=(heads * value, rank)),
        )
