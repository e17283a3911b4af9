"""What GGUF files state, what expressions of families' documents make of it, and the scaling of
positions that tensors tell."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from pi2.arrays import F32
from pi2.diagnostics import UserError
from pi2.importing.config import ROTATED_SHARE, TURN_FACTOR
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

    def has_read(self, name: str) -> bool:
        """Whether the value of a key after the architecture's name was requested."""
        return f"{self.architecture}.{name}" in self.used

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


_FREQUENCIES = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_LONG_FAMILIES = ("granite", "minicpm3", "phi3", "phimoe")
"""Families with LongRoPE; as Granite pi2 reads MiniCPM."""
POSITIONS = (_FREQUENCIES, _LONG, _SHORT)
"""Tensors that `scale_positions` reads."""


def scale_positions(
    config: dict[str, Any], metadata: Metadata, read: Callable[[str], F32 | None]
) -> None:
    """State the scaling in ``config``; ``read`` gives a tensor [pairs] or None. P544, P532."""
    divisors = read(_FREQUENCIES)
    stated = config.get("rope_scaling")
    if divisors is not None and not _scale(config, divisors):
        raise _refuse(metadata.file, _FREQUENCIES)
    if stated is not None and config["rope_scaling"] is not stated:
        raise _refuse_both(metadata, _FREQUENCIES)
    long, short = read(_LONG), read(_SHORT)
    if long is None and short is None:
        return
    if long is None or short is None or config["model_type"] not in _LONG_FAMILIES:
        raise _refuse(metadata.file, _SHORT if long is None else _LONG)
    if stated is not None and (stated["rope_type"], stated["factor"]) != ("longrope", 1.0):
        raise _refuse_both(metadata, _LONG)
    context = metadata.read_count("{arch}.rope.scaling.original_context_length")
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": context,
        # Files have 32 bits of what people wrote in decimals.
        "long_factor": [float(str(number)) for number in long],
        "short_factor": [float(str(number)) for number in short],
    }
    if metadata.has("{arch}.rope.scaling.attn_factor"):
        # It is all that they are multiplied by.
        scaling["attention_factor"] = config.pop(TURN_FACTOR)
    config |= {"rope_scaling": scaling, "original_max_position_embeddings": context}


def _refuse_both(metadata: Metadata, name: str) -> UserError:
    return metadata.refuse(
        f"{metadata.architecture}.rope.scaling scales positions, and so does tensor {name!r}"
    )


_STILL = 1e20
"""Divisors of frequencies from here on turn nothing."""


def _scale(config: dict[str, Any], divisors: F32) -> bool:
    """State in a configuration what divisors of frequencies [pairs] say; whether that is known."""
    full = config.get("rope_parameters", {}).get("full_attention", {})
    if full.get("rope_type") != "proportional":
        return scale_llama3(config, divisors)
    turning = int(np.count_nonzero(divisors == 1.0))
    is_known = turning > 0 and bool((divisors[:turning] == 1.0).all())
    full["partial_rotary_factor"] = turning / len(divisors)
    return is_known and bool((divisors[turning:] >= _STILL).all())


def scale_llama3(config: dict[str, Any], divisors: F32) -> bool:
    """State the llama3 scaling; whether it is one."""
    theta, size = config.get("rope_theta", 10000.0), config.get("head_dim", 1)
    full = config.get("rope_parameters", {}).get("full_attention", {})
    size = int(size * full.get("partial_rotary_factor", config.get(ROTATED_SHARE, 1.0)))
    # Elements that do not turn may have ones; what scales positions otherwise is no part of it.
    is_known = full.get("rope_type", "default") == "default"
    is_known &= bool((divisors[size // 2 :] == 1.0).all())
    scaling = _recover_llama3(divisors[: size // 2], theta, size) if is_known else None
    if scaling:
        config["rope_scaling"] = scaling
        full.update(scaling)
    return scaling is not None


def _recover_llama3(factors: F32, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The llama3 scaling with divisors ``factors`` [head_dim / 2] (``rope_freqs.weight``); {} for
    none, None if unknown."""
    if (factors == 1.0).all():
        return {}
    if theta <= 1.0 or not (np.isfinite(factors) & (factors >= 1.0)).all():
        return None
    factor = float(factors.max())
    wavelengths = 2 * np.pi * theta ** (np.arange(len(factors)) * 2 / head_dim)
    low = 1.0
    # Llama 4 has nothing between the two.
    for original, high in product((2**power for power in range(4, 20)), (4.0, 1.0, 32.0)):
        turns = original / wavelengths
        smooth = np.clip((turns - low) / (high - low), 0.0, 1.0) if high > low else turns >= low
        expected = 1 / ((1 - smooth) / factor + smooth)
        if np.allclose(expected, factors, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    return None


def _refuse(file: Path, name: str) -> UserError:
    return UserError.of(
        "P544",
        f"tensor {name!r} in {file} scales positions in a way that is unknown",
        help="convert the original checkpoint",
        file=str(file),
    )
