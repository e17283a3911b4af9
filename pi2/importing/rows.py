"""Which rows of a checkpoint's tensors become which tensor of the store, and in which order."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pi2.arrays import F16, F32, I32, I64, U8, Raw
from pi2.importing.safetensors_file import SourceTensor
from pi2.model.tensor import Source
from pi2.plan.documents.model import Model
from pi2.plan.weights.layout import Precision

_KEPT_EXPERTS = 2 * (os.cpu_count() or 1) + 2
"""Experts that pieces which are packed at the same time may need."""


class ExpertMatrices:
    """Reads an expert's matrices when the first of its neurons is packed, and forgets the ones not
    used lately; several threads may ask."""

    def __init__(self, read: Callable[[int], list[Raw]]) -> None:
        self._read = read
        self._kept: OrderedDict[int, Future[list[Raw]]] = OrderedDict()
        self._lock = threading.Lock()

    def __getitem__(self, expert: int) -> list[Raw]:
        with self._lock:
            found = self._kept.get(expert)
            is_mine = found is None
            if found is None:
                found = self._kept[expert] = Future()
            self._kept.move_to_end(expert)
            while len(self._kept) > _KEPT_EXPERTS:
                self._kept.popitem(last=False)
        if is_mine:
            try:
                found.set_result(self._read(expert))
            except BaseException as error:
                found.set_exception(error)
        return found.result()


def is_by_expert(order: I32, neurons: int) -> bool:
    """Whether the neurons of an expert, ``neurons`` of each, follow each other in ``order``."""
    owners = order // neurons
    return bool((owners[1:] >= owners[:-1]).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTensor(SourceTensor):
    """One expert's part of a tensor of all experts, [experts, ...]; ``offset`` is unused."""

    whole: SourceTensor
    expert: int

    def read_raw(self, start: int = 0, stop: int | None = None) -> Raw:
        found: Raw = self.whole.read_raw(self.expert, self.expert + 1)[0]
        return found[start:stop]

    def widen(self, raw: Raw) -> F32:
        return self.whole.widen(raw)

    @property
    def is_stored(self) -> bool:
        return self.whole.is_stored

    @property
    def is_mxfp4(self) -> bool:
        return self.whole.is_mxfp4


def take_expert(whole: SourceTensor, expert: int) -> SourceTensor:
    size = whole.size_bytes // whole.shape[0]
    own = {"name": f"{whole.name}[{expert}]", "shape": whole.shape[1:], "size_bytes": size}
    return ExpertTensor.made_of(whole, **own, whole=whole, expert=expert)


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
    def is_stored(self) -> bool:
        return self.stored.is_stored

    @property
    def is_mxfp4(self) -> bool:
        return self.stored.is_mxfp4


def turn_tensor(stored: SourceTensor) -> SourceTensor:
    """The transpose of a matrix."""
    return TurnedTensor.made_of(stored, shape=stored.shape[::-1], stored=stored)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsTensor(SourceTensor):
    """Rows or columns of heads, each of which zeros follow; ``offset`` means nothing here."""

    stored: SourceTensor
    heads: int
    by_columns: bool

    def read_raw(self, start: int = 0, stop: int | None = None) -> Raw:
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
    own = {"dtype": "F32", "shape": shape, "heads": heads, "by_columns": by_columns}
    return HeadsTensor.made_of(stored, stored=stored, **own)


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
    file, shape = Path(), (length,)
    return SameTensor(
        file=file, name="same", dtype="F32", shape=shape, offset=0, size_bytes=0, number=number
    )


def make_zeros(*shape: int) -> SourceTensor:
    return ZeroTensor(file=Path(), name="zeros", dtype="F16", shape=shape, offset=0, size_bytes=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of a tensor; nothing of it is in memory."""

    tensor: SourceTensor
    index: I64 | None = None
    """Numbers of the rows, in the order of the store; None means all as they are."""
    missing: int = 0
    """Rows of zeros that follow them; only where ``index`` says which rows there are."""

    @property
    def count(self) -> int:
        return self.tensor.shape[0] if self.index is None else len(self.index) + self.missing

    @property
    def size_bytes(self) -> int:
        return self.tensor.size_bytes * self.count // max(1, self.tensor.shape[0])

    def read_raw(self, start: int = 0, stop: int | None = None) -> Raw:
        if self.index is None:
            return self.tensor.read_raw(start, stop)
        wanted = self.index[start:stop]
        absent = len(range(self.count)[start:stop]) - len(wanted)
        if not len(wanted):
            return self._fill(self.tensor.read_raw(0, 1)[:0], absent)
        # Neighbours in the store are near each other in the checkpoint.
        first, last = int(wanted.min()), int(wanted.max())
        raw = self.tensor.read_raw(first, last + 1)
        is_all = len(wanted) == len(raw) and (np.diff(wanted) == 1).all()
        return self._fill(raw if is_all else raw[wanted - first], absent)

    def read(self, start: int = 0, stop: int | None = None) -> F32:
        return self.tensor.widen(self.read_raw(start, stop))

    def read_turned(self) -> Raw:
        """What `SourceTensor.read_turned` gives of a matrix whose columns are the rows here."""
        turned = self.tensor.read_turned()
        return turned if self.index is None else self._fill(turned[self.index], self.missing)

    @staticmethod
    def _fill(raw: Raw, missing: int) -> Raw:
        if not missing:
            return raw
        return np.concatenate([raw, np.zeros((missing, *raw.shape[1:]), raw.dtype)])


def find_rows(tensors: Mapping[str, SourceTensor], model: Model, source: Source) -> Rows:
    """What ``source`` takes of a checkpoint that was checked."""
    if not source.key:
        is_zero = source.value == 0.0
        constant = (
            make_zeros(*source.shape) if is_zero else make_same(source.shape[0], source.value)
        )
        return Rows(tensor=constant)
    tensor = tensors[source.name(model.tensors)]
    if source.is_stacked:
        tensor = take_expert(tensor, source.expert)
    if source.is_turned:
        tensor = turn_tensor(tensor)
    if source.heads is not None:
        heads, size, by_columns = source.heads
        tensor = fill_heads(tensor, heads, size, by_columns=by_columns)
    index = None if source.rows is None else np.asarray(source.rows(), np.int64)
    return Rows(tensor=tensor, index=index, missing=source.missing)
