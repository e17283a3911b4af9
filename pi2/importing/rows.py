"""Which rows of a checkpoint's tensors become which tensor of the store, and in which order.

A checkpoint may keep query, key and value (or gate and up) in one tensor, and pairs of elements
that are rotated together elsewhere than a store does (`pi2.plan.weights.tensor_names`).  Here both
are numbers of rows, so that weights are still read and quantised piece by piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pi2.arrays import F32, I64, Raw
from pi2.importing.safetensors_file import SourceTensor
from pi2.plan.documents.model import Model

_QKV = ("query", "key", "value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of a tensor; nothing of it is in memory."""

    tensor: SourceTensor
    index: I64 | None = None
    """Numbers of the rows, in the order of the store; None means all as they are."""

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.tensor.shape[0] if self.index is None else len(self.index)

    @property
    def size_bytes(self) -> int:
        """Bytes that they take in the checkpoint."""
        return self.tensor.size_bytes * self.count // max(1, self.tensor.shape[0])

    def read_raw(self, start: int = 0, stop: int | None = None) -> Raw:
        """Rows ``start`` to ``stop`` as stored; raises as `SourceTensor.read_raw`."""
        if self.index is None:
            return self.tensor.read_raw(start, stop)
        wanted = self.index[start:stop]
        # Neighbours in the store are near each other in the checkpoint.
        first, last = int(wanted.min()), int(wanted.max())
        raw = self.tensor.read_raw(first, last + 1)
        return raw if len(wanted) == len(raw) and _ascends(wanted) else raw[wanted - first]

    def read(self, start: int = 0, stop: int | None = None) -> F32:
        """Rows ``start`` to ``stop`` in float32."""
        return self.tensor.widen(self.read_raw(start, stop))

    def read_turned(self) -> Raw:
        """What `SourceTensor.read_turned` gives of a matrix whose columns are the rows here."""
        turned = self.tensor.read_turned()
        return turned if self.index is None else turned[self.index]


def fill_name(pattern: str, layer: int, expert: int = 0) -> str:
    """Put the numbers of layer and expert into a name pattern of ``model.tensors``."""
    return pattern.replace("{layer}", str(layer)).replace("{expert}", str(expert))


def name_source(model: Model, key: str) -> tuple[str, str]:
    """Key of ``model.tensors`` that names the tensor with the rows of ``key``, and its pattern."""
    names = model.tensors
    part, _, rest = key.partition("_")
    if part in _QKV and rest in ("", "bias"):
        fused = "fused_qkv_bias" if rest else "fused_qkv"
        if getattr(names, fused) is not None:
            return fused, getattr(names, fused)
    if part == "query" and rest in ("gate", "gate_bias"):
        # Every query head is followed by its gates.
        own = "query" if rest == "gate" else "query_bias"
        return own, getattr(names, own)
    if key in ("gate", "up") and names.fused_gate_up is not None:
        return "fused_gate_up", names.fused_gate_up
    return key, getattr(names, key)


def name_shared(model: Model, key: str, expert: int) -> str | None:
    """Key of ``model.tensors`` for the FFN matrix ``key`` of a shared expert; None for others."""
    if model.moe is None or expert < model.moe.experts:
        return None
    return f"shared_{key}"


def find_rows(
    tensors: Mapping[str, SourceTensor], model: Model, key: str, layer: int = 0, expert: int = 0
) -> Rows:
    """Rows of ``key`` (a key of ``model.tensors``) in a checkpoint that was checked."""
    shared = name_shared(model, key, expert)
    if shared is not None:
        assert model.moe is not None
        ffn, first = model.shape.ffn, expert - model.moe.experts
        fused = model.tensors.fused_shared
        if fused is not None and key in ("gate", "up"):
            shared, first = "fused_shared", first + model.moe.shared_experts * (key == "up")
        name = fill_name(getattr(model.tensors, shared), layer)
        return Rows(tensor=tensors[name], index=np.arange(first * ffn, (first + 1) * ffn))
    source, pattern = name_source(model, key)
    return Rows(
        tensor=tensors[fill_name(pattern, layer, expert)],
        index=_choose_rows(model, key, source, layer),
    )


def _choose_rows(model: Model, key: str, source: str, layer: int) -> I64 | None:
    shape = model.shape
    if key == "positions":
        assert model.positions is not None
        return np.arange(shape.context) + model.positions.offset
    if source == "fused_gate_up":
        return np.arange(shape.ffn) + (shape.ffn if key == "up" else 0)
    part, _, rest = key.partition("_")
    if part not in _QKV:
        return None
    if part == "query" and rest != "norm" and model.attention.output_gate:
        inside = np.arange(shape.head_dim)
        if rest.startswith("gate"):
            inside = inside + shape.head_dim
        elif (order := order_head(model, layer)) is not None:
            inside = order
        heads_first = np.arange(shape.heads) * (2 * shape.head_dim)
        return np.asarray((heads_first[:, None] + inside).reshape(-1))
    turned = order_head(model, layer) if part != "value" else None
    if rest == "norm":
        return turned
    heads = shape.heads if part == "query" else shape.kv_heads
    if source == key:
        places = np.arange(heads) * shape.head_dim if turned is not None else None
    else:
        places = _find_fused_heads(model, part)
    if places is None:
        return None
    inside = np.arange(shape.head_dim) if turned is None else turned
    return (places[:, None] + inside).reshape(-1)


def order_head(model: Model, layer: int = 0) -> I64 | None:
    """Element of the checkpoint's head at every place of the store's; None if they are equal."""
    size, rope = model.shape.head_dim, model.find_rope(layer)
    rotated = rope.count_rotated(size)
    if rotated == 0 or (rotated == size and rope.pairs == "halves"):
        return None
    pairs = np.arange(rotated).reshape((2, -1))
    if rope.pairs == "neighbours":
        pairs = np.arange(rotated).reshape((-1, 2)).T
    rest = np.arange(rotated, size).reshape((2, -1))
    return np.concatenate([pairs, rest], axis=1).reshape(-1)


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
