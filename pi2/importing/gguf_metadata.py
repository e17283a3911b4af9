"""The metadata of a GGUF file, checked as it is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pi2.diagnostics import UserError

_MOST_FLOAT32 = float(np.finfo(np.float32).max)


class Metadata:
    """Metadata whose values are checked as they are read."""

    def __init__(self, file: Path, values: Mapping[str, Any]) -> None:
        self.file = file
        self.values = values
        self.used = set[str]()
        """Keys whose values somebody asked for."""
        self.architecture: str = self.read("general.architecture", str)

    def read(self, key: str, kind: type[object], default: Any = None) -> Any:
        """Value of ``key``; ``{arch}`` in it stands for the architecture.

        `UserError` P532 if it is missing without default, or of another type; a number for every
        layer counts as one number if they are all equal.
        """
        key = key.replace("{arch}", self.architecture) if "{arch}" in key else key
        value: Any = self._take(key)
        if isinstance(value, np.ndarray) and kind in (int, float) and len(value):
            if key.endswith((".head_count_kv", ".feed_forward_length")) and value.any():
                # Layers that keep a state have no keys, and blocks that mix tokens no FFN.
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
            name = key.replace("{arch}", self.architecture)
            raise self.refuse(f"{name} is {count}, expected 1 or more")
        return count

    def read_counts(self, key: str, layers: int) -> list[int]:
        """A whole number of 1 or more for each of ``layers`` layers, of which a file states one or
        all; raises as `read_flags` and `read_count` do."""
        value = self._take(key.replace("{arch}", self.architecture))
        if not isinstance(value, np.ndarray | list):
            return [self.read_count(key)] * layers
        counts = np.asarray(value)
        is_whole = counts.ndim == 1 and counts.dtype.kind in "iu" and len(counts) >= layers
        if not is_whole or not (counts[:layers] >= 1).all():
            raise self.refuse(f"{key} is no list of {layers} numbers of 1 or more")
        return [int(count) for count in counts[:layers]]

    def read_flags(self, key: str, layers: int) -> list[bool] | None:
        """One flag for each of ``layers`` layers; None where ``key`` is not stated, or is no list.

        `UserError` P532 for a list of another length, or of text.
        """
        value = self._take(key.replace("{arch}", self.architecture))
        if not isinstance(value, np.ndarray | list):
            return None
        if len(value) < layers:
            raise self.refuse(f"{key} is a list of {len(value)}, expected one of {layers}")
        if np.asarray(value[:layers]).dtype.kind not in "biu":
            raise self.refuse(f"{key} is a list of {value[0]!r} and the like, expected flags")
        return [bool(flag) for flag in value[:layers]]

    def read_numbers(self, key: str, layers: int) -> list[float] | None:
        """One number for each of ``layers`` layers; None where ``key`` is not stated.

        `UserError` P532 for what is no list of numbers, or one of another length.
        """
        if not self.has(key):
            return None
        value = self._take(key.replace("{arch}", self.architecture))
        numbers = np.asarray(value)
        if numbers.ndim != 1 or numbers.dtype.kind not in "iuf" or len(numbers) < layers:
            raise self.refuse(f"{key} is not a list of {layers} numbers")
        return [float(number) for number in numbers[:layers]]

    def has(self, key: str) -> bool:
        """Whether ``key`` is stated."""
        return key.replace("{arch}", self.architecture) in self.values

    def _take(self, key: str) -> Any:
        self.used.add(key)
        return self.values.get(key)

    def refuse(self, problem: str) -> UserError:
        return UserError.of(
            "P532",
            f"cannot read {self.file}: {problem}",
            help="export the file again, or convert the original checkpoint",
        )
