"""Which rows of a checkpoint's tensors become which tensor of the store, and in which order."""

from __future__ import annotations

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
from pi2.plan.documents.model import Model
from pi2.plan.weights.layout import Precision

_KEPT_EXPERTS = 2 * (os.cpu_count() or 1) + 2
"""Experts that pieces which are packed at the same time may need."""


class ExpertMatrices:
    """Reads an expert's matrices when the first of its neurons is packed, and forgets those that
    were not asked for lately; several threads may ask."""

    def __init__(self, read: Callable[[int], list[Raw]]) -> None:
        self._read = read
        self._kept: OrderedDict[int, Future[list[Raw]]] = OrderedDict()
        self._lock = threading.Lock()

    def __getitem__(self, expert: int) -> list[Raw]:
        """Matrices of ``expert``; raises what reading them raises."""
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


_QKV = ("query", "key", "value")


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
        """Bytes that they take in the checkpoint."""
        return self.tensor.size_bytes * self.count // max(1, self.tensor.shape[0])

    def read_raw(self, start: int = 0, stop: int | None = None) -> Raw:
        """Rows ``start`` to ``stop`` as stored; raises as `SourceTensor.read_raw`."""
        if self.index is None:
            return self.tensor.read_raw(start, stop)
        wanted = self.index[start:stop]
        absent = len(range(self.count)[start:stop]) - len(wanted)
        if not len(wanted):
            return self._fill(self.tensor.read_raw(0, 1)[:0], absent)
        # Neighbours in the store are near each other in the checkpoint.
        first, last = int(wanted.min()), int(wanted.max())
        raw = self.tensor.read_raw(first, last + 1)
        is_all = len(wanted) == len(raw) and _ascends(wanted)
        return self._fill(raw if is_all else raw[wanted - first], absent)

    def read(self, start: int = 0, stop: int | None = None) -> F32:
        """Rows ``start`` to ``stop`` in float32."""
        return self.tensor.widen(self.read_raw(start, stop))

    def read_turned(self) -> Raw:
        """What `SourceTensor.read_turned` gives of a matrix whose columns are the rows here."""
        turned = self.tensor.read_turned()
        return turned if self.index is None else self._fill(turned[self.index], self.missing)

    @staticmethod
    def _fill(raw: Raw, missing: int) -> Raw:
        """``raw`` with rows of zeros after it."""
        if not missing:
            return raw
        return np.concatenate([raw, np.zeros((missing, *raw.shape[1:]), raw.dtype)])


def fill_name(pattern: str, layer: int, expert: int = 0, stream: int = 0, mixer: int = 0) -> str:
    """Put the numbers of layer, expert, residual stream and mixer into a name pattern of
    ``model.tensors``."""
    numbers = {"layer": layer, "expert": expert, "stream": stream, "mixer": mixer}
    for what, number in numbers.items():
        pattern = pattern.replace(f"{{{what}}}", str(number))
    return pattern


def name_source(model: Model, key: str) -> tuple[str, str]:
    """Key of ``model.tensors`` that names the tensor with the rows of ``key``, and its pattern."""
    names = model.tensors
    if key == "latent_value":
        return "latent_out", names.latent_out
    part, _, rest = key.partition("_")
    if part in _QKV and rest in ("", "bias"):
        fused = "fused_qkv_bias" if rest else "fused_qkv"
        if getattr(names, fused) is not None:
            return fused, getattr(names, fused)
    if part == "query" and rest in ("gate", "gate_bias") and names.query_gate is None:
        # Every query head is followed by its gates.
        own = "query" if rest == "gate" else "query_bias"
        return own, getattr(names, own)
    return key, getattr(names, key)


def find_rows(tensors: Mapping[str, SourceTensor], model: Model, key: str, layer: int = 0) -> Rows:
    """Rows of ``key`` (a key of ``model.tensors``) in a checkpoint that was checked; those of FFNs
    are found by `pi2.importing.dense_rows`."""
    source, pattern = name_source(model, key)
    if key == "value" and model.shares_key_rows(layer):
        pattern = model.tensors.key
    own = model.view_layer(layer)
    tensor = _fill_values(tensors[fill_name(pattern, layer)], own, key)
    return Rows(tensor=tensor, index=_choose_rows(own, key, source, layer))


def _fill_values(tensor: SourceTensor, model: Model, key: str) -> SourceTensor:
    width, shape = model.attention.value_width, model.shape
    if width is None or width == shape.head_dim:
        return tensor
    if key in ("value", "value_bias"):
        return fill_heads(tensor, shape.kv_heads, shape.head_dim)
    if key == "output":
        return fill_heads(tensor, shape.heads, shape.head_dim, by_columns=True)
    return tensor


def _choose_rows(model: Model, key: str, source: str, layer: int) -> I64 | None:
    shape = model.shape
    if key == "positions":
        assert model.positions is not None
        return np.arange(shape.context) + model.positions.offset
    if model.attention.latent is not None and key in LATENT_KEYS:
        return choose_latent_rows(model, key, layer)
    part, _, rest = key.partition("_")
    if part not in _QKV:
        return None
    if key == "query_gate" and model.tensors.query_gate is not None:
        is_whole = model.attention.output_gate_of == "element" or model.attention.latent is not None
        return None if is_whole else np.repeat(np.arange(shape.heads), shape.head_dim)
    has_gates = model.attention.output_gate and model.tensors.query_gate is None
    if part == "query" and rest != "norm" and has_gates:
        inside = np.arange(shape.head_dim)
        if rest.startswith("gate"):
            inside = inside + shape.head_dim
        elif (order := order_head(model, layer)) is not None:
            inside = order
        heads_first = np.arange(shape.heads) * (2 * shape.head_dim)
        return np.asarray((heads_first[:, None] + inside).reshape(-1))
    turned = order_head(model, layer) if part != "value" else None
    heads = shape.heads if part == "query" else shape.kv_heads
    if rest == "norm" and model.attention.head_norm_of == "head":
        return turned
    if source == key:
        places = np.arange(heads) * shape.head_dim if turned is not None else None
    else:
        places = _find_fused_heads(model, part)
    if places is None:
        return None
    inside = np.arange(shape.head_dim) if turned is None else turned
    return (places[:, None] + inside).reshape(-1)


def order_head(model: Model, layer: int = 0) -> I64 | None:
    """Element of the checkpoint's head at every place of the store's, or of the part of it that is
    rotated; None if they are equal."""
    size, rope = model.turned_width, model.find_rope(layer)
    rotated = rope.count_rotated(size)
    if rotated == 0 or (rotated == size and rope.pairs == "halves"):
        return None
    pairs = np.arange(rotated).reshape((2, -1))
    if rope.pairs == "swapped":
        pairs = pairs[::-1]
    elif rope.pairs == "neighbours":
        pairs = np.arange(rotated).reshape((-1, 2)).T
    rest = np.arange(rotated, size).reshape((2, -1))
    return np.concatenate([pairs, rest], axis=1).reshape(-1)


LATENT_KEYS = frozenset({"query", "latent", "latent_bias", "latent_query_out", "latent_value"})
"""Keys whose rows latent attention has in an order of its own."""


def choose_latent_rows(model: Model, key: str, layer: int) -> I64 | None:
    """Rows of a projection of latent attention; None means all as they are."""
    shape, latent = model.shape, model.attention.latent
    assert latent is not None
    turned = order_head(model, layer)
    if key == "latent_value":
        # Each head has the rows of its keys first.
        size, inside = latent.plain + shape.head_dim, latent.plain + np.arange(shape.head_dim)
        return (np.arange(shape.heads)[:, None] * size + inside).reshape(-1)
    if turned is None:
        return None
    if key in ("latent", "latent_bias"):
        return np.concatenate([np.arange(latent.rank), latent.rank + turned])
    inside = np.concatenate([np.arange(latent.plain), latent.plain + turned])
    return (np.arange(shape.heads)[:, None] * latent.key + inside).reshape(-1)


def _find_fused_heads(model: Model, part: str) -> I64:
    """First row of every head of ``part`` in a tensor of query, key and value [heads]."""
    shape = model.shape
    if model.tensors.fused_order == "stacked":
        first = {"query": 0, "key": shape.heads, "value": shape.heads + shape.kv_heads}[part]
        count = shape.heads if part == "query" else shape.kv_heads
        return (first + np.arange(count)) * shape.head_dim
    together = shape.heads // shape.kv_heads
    groups = np.arange(shape.kv_heads) * (together + 2)
    if part == "query":
        return (groups[:, None] + np.arange(together)).reshape(-1) * shape.head_dim
    return (groups + together + (part == "value")) * shape.head_dim


def _ascends(index: I64) -> bool:
    return bool((np.diff(index) == 1).all())
