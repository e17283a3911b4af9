"""Tensors that a checkpoint does not have as such: one expert's part of a tensor of all experts, a
matrix whose columns the file has as rows, heads that are filled up, zeros and ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pi2.arrays import F16, F32, U8, Raw
from pi2.importing.safetensors_file import SourceTensor
from pi2.plan.weights.layout import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTensor(SourceTensor):
    """What a tensor of all experts, [experts, ...], has of one of them; ``offset`` means nothing
    here."""

    whole: SourceTensor
    expert: int

    def read_raw(self, start: int = 0, stop: int | None = None) -> Raw:
        found: Raw = self.whole.read_raw(self.expert, self.expert + 1)[0]
        return found[start:stop]

    def widen(self, raw: Raw) -> F32:
        return self.whole.widen(raw)

    @property
    def is_mxfp4(self) -> bool:
        return self.whole.is_mxfp4


def take_expert(whole: SourceTensor, expert: int) -> SourceTensor:
    """The part of ``expert`` of a tensor of all experts."""
    return ExpertTensor(
        file=whole.file,
        name=f"{whole.name}[{expert}]",
        dtype=whole.dtype,
        shape=whole.shape[1:],
        offset=0,
        size_bytes=whole.size_bytes // whole.shape[0],
        whole=whole,
        expert=expert,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnedTensor(SourceTensor):
    """A matrix that the file has turned; ``offset`` means nothing here."""

    stored: SourceTensor

    def read_raw(self, start: int = 0, stop: int | None = None) -> Raw:
        return self.stored.read_turned()[start:stop]

    def read_turned(self) -> Raw:
        return self.stored.read_raw()

    def widen(self, raw: Raw) -> F32:
        return self.stored.widen(raw)

    @property
    def is_mxfp4(self) -> bool:
        return self.stored.is_mxfp4


def turn_tensor(stored: SourceTensor) -> SourceTensor:
    """The transpose of a matrix."""
    return TurnedTensor(
        file=stored.file,
        name=stored.name,
        dtype=stored.dtype,
        shape=stored.shape[::-1],
        offset=0,
        size_bytes=stored.size_bytes,
        stored=stored,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsTensor(SourceTensor):
    """Rows or columns of heads, each of which zeros follow; ``offset`` means nothing here."""

    stored: SourceTensor
    heads: int
    by_columns: bool

    def read_raw(self, start: int = 0, stop: int | None = None) -> Raw:
        """Rows ``start`` to ``stop`` in float32."""
        axis = 1 if self.by_columns else 0
        count, size = self.stored.shape[axis] // self.heads, self.shape[axis] // self.heads
        if self.by_columns:
            rows = self.stored.read(start, stop).reshape((-1, self.heads, count))
            filled = np.zeros((len(rows), self.heads, size), np.float32)
            filled[..., :count] = rows
            return filled.reshape((len(rows), -1))
        places = np.arange(self.shape[0])[start:stop]
        found = np.zeros((len(places), *self.shape[1:]), np.float32)
        is_there = places % size < count
        if is_there.any():
            wanted = places[is_there] // size * count + places[is_there] % size
            first = int(wanted[0])
            rows = self.stored.read(first, int(wanted[-1]) + 1)
            found[is_there] = rows[wanted - first]
        return found


def fill_heads(
    stored: SourceTensor, heads: int, size: int, *, by_columns: bool = False
) -> SourceTensor:
    """A tensor of ``heads``, of which each has as many rows, or columns, filled up with zeros to
    ``size`` of them."""
    shape = (stored.shape[0], heads * size) if by_columns else (heads * size, *stored.shape[1:])
    return HeadsTensor(
        file=stored.file,
        name=stored.name,
        dtype="F32",
        shape=shape,
        offset=0,
        size_bytes=stored.size_bytes,
        stored=stored,
        heads=heads,
        by_columns=by_columns,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroTensor(SourceTensor):
    """Zeros, which no file has; ``offset`` means nothing here."""

    def read_raw(self, start: int = 0, stop: int | None = None) -> Raw:
        return np.zeros((len(range(self.shape[0])[start:stop]), *self.shape[1:]), np.float16)

    def read_turned(self) -> Raw:
        return np.zeros(self.shape[::-1], np.float16)

    def take_codes(self, raw: Raw, precision: Precision) -> tuple[U8, F16 | None] | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SameTensor(SourceTensor):
    """A vector of one number, which no file has; ``offset`` means nothing here."""

    number: float

    def read_raw(self, start: int = 0, stop: int | None = None) -> Raw:
        count = len(range(self.shape[0])[start:stop])
        return np.full(count, self.number, np.float32)


def make_same(length: int, number: float) -> SourceTensor:
    """A vector of one number."""
    file, shape = Path(), (length,)
    return SameTensor(
        file=file, name="same", dtype="F32", shape=shape, offset=0, size_bytes=0, number=number
    )


def make_ones(length: int) -> SourceTensor:
    """A vector of ones."""
    return make_same(length, 1.0)


def make_zeros(*shape: int) -> SourceTensor:
    """Zeros of a shape."""
    return ZeroTensor(file=Path(), name="zeros", dtype="F16", shape=shape, offset=0, size_bytes=0)
