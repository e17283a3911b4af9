"""What a number format is: how blocks of it are decoded and checked."""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar


class _Late:
    """A module that is imported when a name of it is first asked for: reading a plan asks formats
    for sizes only."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        found = getattr(importlib.import_module(self._name), name)
        setattr(self, name, found)
        return found


if TYPE_CHECKING:
    import numpy as np

    from pi2.arrays import F32, U8, Bits
else:
    np = _Late("numpy")

Activations = Literal["float", "q8_0", "q8_k"]
"""What weights are multiplied with: float32, or 8 bits with a scale for each 32 (``q8_0``) or 256
(``q8_k``) elements."""


MOST_FLOAT16 = 65504.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A number format: ``block`` elements of a row take ``block_bytes`` together."""

    name: str
    number: int
    """What GGUF files call it."""
    block: int
    block_bytes: int
    activations: Activations
    halves: tuple[int, ...] = ()
    """Places of fp16 scales in a block, in bytes."""
    can_encode: bool = False
    """Whether `encode` makes blocks."""
    is_kept: bool = False
    """Whether stores keep its blocks as a file has them, unless integers of theirs are the same."""
    keeps_signs: bool = False
    """Whether -1, 0 and 1 times a number have one magnitude in it: Q4_0 and its like round one of
    the signs."""
    fits_bytes: bool = False
    """Whether 8-bit integers, with powers of two as scales, hold its numbers."""
    file_type: int = 1
    """What ``general.file_type`` of GGUF files calls files most of whose weights have it."""

    @property
    def is_plain(self) -> bool:
        """Whether every element stands for itself."""
        return self.block == 1

    def count_bytes(self, elements: int) -> int:
        """Return the bytes of a row of ``elements``, a multiple of ``block``."""
        assert elements % self.block == 0, f"{elements} elements are no whole blocks of {self.name}"
        return elements // self.block * self.block_bytes

    def decode(self, raw: U8) -> F32:
        """Return the numbers [..., n x block] of blocks uint8 [..., n x block_bytes]."""
        raw = np.ascontiguousarray(raw)
        if self.name == "f32":
            return raw.view(np.float32)
        from gguf import quants
        from gguf.constants import GGMLQuantizationType

        with np.errstate(all="ignore"):
            found = quants.dequantize(raw, GGMLQuantizationType(self.number))
        return np.ascontiguousarray(found, np.float32)

    def encode(self, rows: F32, importance: F32 | None = None) -> U8:
        """Return blocks uint8 [n, m x block_bytes] of ``rows`` float32 [n, m x block].

        ``importance`` float32 [m x block]: what squared errors of each column count, by default
        the same.  Raises `ValueError` for weights that are not finite or do not fit."""
        raise NotImplementedError

    def find_faults(self, raw: U8) -> Bits:
        """Return which blocks [..., n] of uint8 [..., n x block_bytes] have a scale, or a number,
        that is not finite."""
        blocks = np.ascontiguousarray(raw).reshape(*raw.shape[:-1], -1, self.block_bytes)
        found: Bits = np.zeros(blocks.shape[:-1], np.bool_)
        for place in self.halves:
            bits = blocks[..., place].astype(np.uint16) | (
                blocks[..., place + 1].astype(np.uint16) << 8
            )
            found |= (bits & 0x7C00) == 0x7C00
        return found


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_Made = TypeVar("_Made")


def list_tables(
    module: str, kinds: Mapping[str, Callable[..., _Made]], *, table: str = ""
) -> tuple[_Made, ...]:
    """What format.toml lists of ``module``, or of its ``table``, as the classes ``kinds``; formats
    without a kind have the one called ""."""
    values = _TABLES[module.rpartition(".")[2]]
    listed = values[table] if table else values
    shared = {key: value for key, value in listed.items() if not isinstance(value, dict)}
    found = {key: shared | own for key, own in listed.items() if isinstance(own, dict)}
    return tuple(
        kinds[own.pop("kind", "")](name=name, **{key: _freeze(own[key]) for key in own})
        for name, own in found.items()
        if name != "packings"
    )


def _freeze(value: Any) -> Any:
    """A value of a table as fields have it."""
    return tuple(value) if isinstance(value, list) else value


def check_finite(rows: F32, most: float | None = MOST_FLOAT16) -> None:
    """`ValueError` if a weight is not finite, or larger than ``most``, by default what fp16 has."""
    if not np.isfinite(rows).all():
        raise ValueError("a weight is not a finite number")
    peak = float(np.abs(rows).max(initial=0))
    if most is not None and peak > most:
        raise ValueError(f"a weight of magnitude {peak:.4g} does not fit into fp16")
