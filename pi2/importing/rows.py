"""Which rows of a checkpoint's tensors become which tensor of the store, and in which order."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from pi2.arrays import F32, I32, I64, Raw
from pi2.importing.decoded_tensor import compute_tensor
from pi2.importing.safetensors_file import SourceTensor, ViewTensor
from pi2.model.tensor import Source
from pi2.plan.documents.model import Model

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
class ExpertTensor(ViewTensor):
    """One expert's part of a tensor of all experts, [experts, ...]."""

    expert: int

    def read_raw(self, start: int = 0, stop: int | None = None) -> Raw:
        found: Raw = self.stored.read_raw(self.expert, self.expert + 1)[0]
        return found[start:stop]


def take_expert(whole: SourceTensor, expert: int) -> SourceTensor:
    size, name = whole.size_bytes // whole.shape[0], f"{whole.name}[{expert}]"
    return ExpertTensor.of(whole, name=name, shape=whole.shape[1:], size_bytes=size, expert=expert)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnedTensor(ViewTensor):
    """A matrix that the file has turned."""

    def read_raw(self, start: int = 0, stop: int | None = None) -> Raw:
        return self.stored.read_turned()[start:stop]

    def read_turned(self) -> Raw:
        return self.stored.read_raw()


def fill_heads(
    stored: SourceTensor, heads: int, size: int, *, by_columns: bool = False
) -> SourceTensor:
    """A tensor of ``heads``, of which each has as many rows, or columns, filled up with zeros to
    ``size`` of them."""
    shape = (stored.shape[0], heads * size) if by_columns else (heads * size, *stored.shape[1:])
    count = stored.shape[by_columns] // heads

    def fill_columns(start: int, stop: int) -> F32:
        filled = np.zeros((stop - start, heads, size), np.float32)
        filled[..., :count] = stored.read(start, stop).reshape((-1, heads, count))
        return filled.reshape((stop - start, -1))

    def fill_rows(start: int, stop: int) -> F32:
        places = np.arange(start, stop)
        found = np.zeros((len(places), *shape[1:]), np.float32)
        is_there = places % size < count
        if is_there.any():
            wanted = places[is_there] // size * count + places[is_there] % size
            first = int(wanted[0])
            found[is_there] = stored.read(first, int(wanted[-1]) + 1)[wanted - first]
        return found

    fill = fill_columns if by_columns else fill_rows
    return compute_tensor(stored.name, shape, fill, stored, dtype="F32")


def make_same(*shape: int, number: float) -> SourceTensor:
    """A tensor of one number, which no file has."""

    def fill(start: int, stop: int) -> F32:
        return np.full((stop - start, *shape[1:]), number, np.float32)

    return compute_tensor("same", shape, fill, dtype="F32")


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
        return Rows(tensor=make_same(*source.shape, number=source.value))
    tensor = tensors[source.name(model.tensors)]
    if source.is_stacked:
        tensor = take_expert(tensor, source.expert)
    if source.is_turned:
        tensor = TurnedTensor.of(tensor, shape=tensor.shape[::-1])
    if source.heads is not None:
        heads, size, by_columns = source.heads
        tensor = fill_heads(tensor, heads, size, by_columns=by_columns)
    index = None if source.rows is None else np.asarray(source.rows(), np.int64)
    return Rows(tensor=tensor, index=index, missing=source.missing)
