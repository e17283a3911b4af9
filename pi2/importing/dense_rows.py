"""Which rows of a checkpoint's tensors become the dense tensors of a store."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pi2.arrays import F32, F64, I64, Raw
from pi2.importing.rows import (
    Rows,
    fill_name,
    find_rows,
    make_ones,
    make_same,
    make_zeros,
    take_expert,
    turn_tensor,
)
from pi2.importing.safetensors_file import SourceTensor
from pi2.plan.documents.model import Model
from pi2.plan.weights.projections import (
    GATE_CUTOFF,
    STREAM_IN,
    STREAM_OUT,
    has_remainders,
    list_cutoff_matrices,
    list_side_matrices,
    split_mixer_kind,
)

FFN_KEYS = frozenset({"gate", "up", "down", "gate_bias", "up_bias", "down_bias"})
"""Keys of ``model.tensors`` that name parts of an FFN."""


def is_stacked(model: Model, pattern: str) -> bool:
    """Whether a name of the FFN is that of a tensor of all experts."""
    return model.moe is not None and "{expert}" not in pattern


def name_ffn_source(model: Model, key: str) -> str:
    """Key of ``model.tensors`` that names the tensor with the part ``key`` of an FFN."""
    names = model.tensors
    if key in ("gate", "up") and names.fused_gate_up is not None:
        return "fused_gate_up"
    if key in ("gate_bias", "up_bias") and names.fused_gate_up_bias is not None:
        return "fused_gate_up_bias"
    return key


def find_ffn_rows(
    tensors: Mapping[str, SourceTensor], model: Model, key: str, layer: int, expert: int
) -> Rows:
    """Rows of a part of an FFN, one of `FFN_KEYS`, in a checkpoint that was checked; of ``down``
    the columns."""
    ffn, moe, names = model.shape.ffn, model.moe, model.tensors
    if layer in model.ffn.absent_layers or (
        moe is not None and moe.latent is not None and not model.has_router(layer)
    ):
        return Rows(tensor=_make_zeros(model, key, ffn))
    if moe is not None and not model.has_router(layer):
        total = moe.find_dense_width(layer, ffn)
        source, first = name_part(names.fused_dense, f"dense_{key}", model, total)
        tensor = tensors[fill_name(source, layer)]
        return _take_part(tensor, model, key, total, expert, first)
    if moe is not None and expert >= moe.experts + moe.shared_experts:
        return Rows(tensor=_make_zeros(model, key, ffn))
    if moe is not None and expert >= moe.experts:
        total = moe.shared_ffn or moe.shared_experts * ffn
        source, first = name_part(names.fused_shared, f"shared_{key}", model, total)
        tensor = tensors[fill_name(source, layer)]
        return _take_part(tensor, model, key, total, expert - moe.experts, first)
    chosen = name_ffn_source(model, key)
    pattern = getattr(names, chosen)
    tensor = tensors[fill_name(pattern, layer, expert)]
    is_turned = names.experts_turned and not key.endswith("bias")
    if is_stacked(model, pattern):
        tensor = take_expert(tensor, expert)
    if moe is not None and is_turned:
        tensor = turn_tensor(tensor)
    return Rows(tensor=tensor, index=_choose_fused(model, key, chosen))


def read_factors(tensors: Mapping[str, SourceTensor], model: Model, layer: int) -> F32:
    """Weights of the norm of a layer's activations, float32 [neurons]."""
    tensor = tensors[fill_name(model.tensors.ffn_sub_norm, layer)]
    return tensor.read() + np.float32(model.norm.weight_offset)


def _choose_fused(model: Model, key: str, source: str) -> I64 | None:
    """Rows of gates or ups in a tensor that has both; None where it has nothing else."""
    if source == key:
        return None
    ffn, is_up = model.shape.ffn, key.startswith("up")
    if model.tensors.gate_up_order == "neighbours":
        return np.arange(ffn) * 2 + is_up
    return np.arange(ffn) + ffn * is_up


def name_part(fused: str | None, name: str, model: Model, total: int) -> tuple[str, int]:
    """Name of the tensor with a part of an FFN of ``total`` neurons, the key ``name`` of
    ``model.tensors`` if gates and ups are not ``fused``; and the part's first row in it."""
    if fused is None or name.endswith("_down"):
        return str(getattr(model.tensors, name)), 0
    return fused, total if name.endswith("_up") else 0


def _take_part(
    tensor: SourceTensor, model: Model, key: str, total: int, part: int, first: int = 0
) -> Rows:
    """Rows of the ``part``-th `shape.ffn` neurons of ``total``, the first of which has row
    ``first``; zeros where there are not so many."""
    ffn = model.shape.ffn
    index = np.arange(min(part * ffn, total), min((part + 1) * ffn, total))
    if not len(index):
        return Rows(tensor=_make_zeros(model, key, ffn))
    return Rows(tensor=tensor, index=index + first, missing=ffn - len(index))


def _make_zeros(model: Model, key: str, count: int) -> SourceTensor:
    hidden = model.neuron_width
    if key.endswith("_bias"):
        return make_zeros(hidden if key == "down_bias" else count)
    return make_zeros(hidden, count) if key == "down" else make_zeros(count, hidden)


_BLOCK = 4096
"""Gates that are in memory at once."""


class CutoffMaker:
    """Makes the matrix when it is first asked for; several threads may ask."""

    def __init__(self, gates: Rows, deviations: float, has_remainders: bool) -> None:
        """``deviations``: how many of them the cutoff is above the mean of ``gates``.
        ``has_remainders``: whether rows follow that have what fp16 leaves of the first."""
        self._gates = gates
        self._deviations = deviations
        self._has_remainders = has_remainders
        self._made: F32 | None = None
        self._lock = threading.Lock()

    def make(self) -> F32:
        """The mean gate row, and rows whose products with an input are, as a vector, as long as
        the deviations: float32 [1 + min(n, hidden), hidden], or twice as many rows."""
        with self._lock:
            if self._made is None:
                self._made = self._compute()
            return self._made

    def _compute(self) -> F32:
        count = self._gates.count
        mean, factor = _factor_products(self._gates)
        scale = abs(self._deviations) / math.sqrt(count)
        matrix = np.concatenate([mean[None], scale * factor])
        if self._has_remainders:
            matrix = np.concatenate([matrix, matrix - matrix.astype(np.float16)])
        return matrix.astype(np.float32)


def _factor_products(gates: Rows) -> tuple[F64, F64]:
    """The mean [hidden] of ``gates``, and a matrix F [min(n, hidden), hidden] of which the product
    F^T F is that of what is left of them without their mean.

    The Cholesky factor of that product, summed up in float64, takes a small part of the time of a
    QR decomposition, and is no less exact for the length of F u: the error of the product is some
    1e-13 of its norm, and what is stored of F is float32 at best (docs/howto/convert-a-model.md).
    """
    blocks = _list_blocks(gates.count)
    shift = gates.read(*blocks[0]).mean(axis=0, dtype=np.float64)
    if gates.count <= len(shift):
        return _factor_rows(gates)
    # About a point near the mean, products lose nothing when the mean is taken off.
    sums = np.zeros(len(shift))
    products = np.zeros((len(shift), len(shift)))
    for block in blocks:
        rows = gates.read(*block) - shift
        sums += rows.sum(axis=0)
        products += rows.T @ rows
    rest = sums / gates.count
    products -= gates.count * np.outer(rest, rest)
    try:
        factor: F64 = np.linalg.cholesky(products).astype(np.float64, copy=False)
        return shift + rest, factor.T
    except np.linalg.LinAlgError:
        # Some input adds nothing to any gate, or the same to all.
        return _factor_rows(gates)


def _factor_rows(gates: Rows) -> tuple[F64, F64]:
    blocks = _list_blocks(gates.count)
    sums = [gates.read(*block).sum(axis=0, dtype=np.float64) for block in blocks]
    mean: F64 = np.sum(sums, axis=0) / gates.count
    factor = np.zeros((0, len(mean)))
    for block in blocks:
        # The triangle of all blocks so far, and the next block, have the triangle of both.
        both = np.concatenate([factor, gates.read(*block) - mean])
        # Types know results with both factors only.
        triangle: Any = np.linalg.qr(both, "r")
        factor = triangle
    return mean, factor


def _list_blocks(count: int) -> list[tuple[int, int]]:
    return [(start, min(start + _BLOCK, count)) for start in range(0, count, _BLOCK)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _CutoffTensor(SourceTensor):
    maker: CutoffMaker

    def read_raw(self, start: int = 0, stop: int | None = None) -> Raw:
        return self.maker.make()[start:stop]

    def widen(self, raw: Raw) -> F32:
        return raw.astype(np.float32, copy=False)


def find_cutoff(tensors: Mapping[str, SourceTensor], model: Model, layer: int) -> SourceTensor:
    """The matrix of a layer whose gates have a cutoff."""
    gates, deviations = find_ffn_rows(tensors, model, "gate", layer, 0), model.find_cutoff(layer)
    assert deviations is not None
    rows, _ = list_cutoff_matrices(model)[layer]
    return _CutoffTensor(
        file=gates.tensor.file,
        name=gates.tensor.name,
        dtype="F32",
        shape=(rows, model.shape.hidden),
        offset=0,
        size_bytes=gates.size_bytes,
        maker=CutoffMaker(gates, deviations, has_remainders(model)),
    )


_FUSED = {
    "qkv": ("query", "key", "value"),
    "qkv_bias": ("query_bias", "key_bias", "value_bias"),
    "side_in": ("side_gate", "side_up"),
}
"""Tensors of the store that are several in the checkpoint, one after another."""

_NO_SINK = -1e30
"""Score of a sink beside which that of any token takes all of the attention."""


def find_dense_rows(
    tensors: Mapping[str, SourceTensor], model: Model, kind: str, layer: int = 0
) -> list[Rows]:
    """Rows that follow each other in the dense tensor ``kind`` of a layer, or of the model, but for
    those of predictors."""
    latent = model.attention.latent
    if kind in (STREAM_IN, STREAM_OUT):
        return _find_streams(tensors, model, kind)
    if kind == GATE_CUTOFF:
        return [Rows(tensor=find_cutoff(tensors, model, layer))]
    if kind in ("attention_norm", "ffn_norm", "final_norm") and not model.norm.weights:
        return [Rows(tensor=make_ones(model.shape.hidden))]
    if kind in ("query_norm", "key_norm") and not model.attention.head_norm_weights:
        widths = dict(zip(("query_norm", "key_norm"), model.head_norm_widths, strict=True))
        return [Rows(tensor=make_ones(widths[kind]))]
    if kind == "sinks" and not model.attention.has_sinks(layer):
        return [Rows(tensor=make_same(model.view_layer(layer).shape.heads, _NO_SINK))]
    if kind == "down_bias":
        return [_find_down_biases(tensors, model, layer)]
    if latent is not None and kind == "latent_key":
        name = fill_name(model.tensors.latent_out, layer)
        return [Rows(tensor=_turn_keys(tensors[name], model))]
    if kind == "ffn_norm" and layer in model.ffn.absent_layers:
        return [Rows(tensor=make_ones(model.shape.hidden))]
    own, mixer = split_mixer_kind(kind)
    if own == "inner_norm":
        return [Rows(tensor=tensors[fill_name(model.tensors.inner_norm, layer, mixer=mixer)])]
    beside = list_side_matrices(model)
    if kind in beside and not model.has_router(layer):
        return _find_beside(tensors, model, kind, layer, beside[kind])
    keys: tuple[str, ...] = _FUSED.get(kind, (kind,))
    if kind == "side_in" and not model.ffn.gated:
        keys = keys[1:]
    if kind in ("qkv", "qkv_bias") and not model.view_layer(layer).has_keys:
        keys = keys[:1]
    if kind in ("qkv", "qkv_bias") and model.attention.output_gate:
        keys = (*keys, kind.replace("qkv", "query_gate"))
    if latent is not None and kind in ("qkv", "qkv_bias"):
        return _find_latent(tensors, model, kind, layer)
    if keys[-1] == "query_gate_bias" and model.tensors.query_gate is not None:
        found = [find_rows(tensors, model, key, layer) for key in keys[:-1]]
        return [*found, Rows(tensor=make_zeros(model.view_layer(layer).shape.query))]
    found = [find_rows(tensors, model, key, layer) for key in keys]
    if kind == "side_in":
        assert model.side_ffn is not None
        return [_fill_side(rows.tensor, model, model.side_ffn.width) for rows in found]
    return found


def _find_beside(
    tensors: Mapping[str, SourceTensor], model: Model, kind: str, layer: int, size: tuple[int, int]
) -> list[Rows]:
    """Rows of a matrix beside the experts of a layer that has none of these: its FFN, if it has
    one, or zeros."""
    moe = model.moe
    assert moe is not None
    names = {"side_in": ("dense_gate", "dense_up"), "side_down": ("dense_down",)}.get(kind, ())
    if not names or layer in model.ffn.absent_layers:
        return [Rows(tensor=make_zeros(*size))]
    width, found = moe.dense_ffn or 0, []
    for name in names if model.ffn.gated else names[-1:]:
        pattern, first = name_part(model.tensors.fused_dense, name, model, width)
        source = tensors[fill_name(pattern, layer)]
        is_down = kind == "side_down"
        found.append(Rows(tensor=source) if is_down else _fill_side(source, model, width, first))
    return found


def _fill_side(source: SourceTensor, model: Model, count: int, first: int = 0) -> Rows:
    """``count`` gates or ups of an FFN beside experts from row ``first`` on, and zeros up to what
    stores keep."""
    missing, is_whole = model.side_width - count, source.shape[0] == count
    index = None if is_whole and not missing else np.arange(first, first + count)
    return Rows(tensor=source, index=index, missing=missing)


def _find_latent(
    tensors: Mapping[str, SourceTensor], model: Model, kind: str, layer: int
) -> list[Rows]:
    """Queries or what they are made of, gates of heads, and what keys and values are made of; or
    their biases, of which queries and gates have none."""
    latent, heads = model.attention.latent, model.shape.heads
    assert latent is not None
    query = "query" if latent.query_rank is None else "latent_query"
    gates = ["query_gate"] if model.attention.output_gate else []
    if kind == "qkv":
        keys = [query, *gates, "latent"]
        return [find_rows(tensors, model, key, layer) for key in keys]
    found = [find_rows(tensors, model, "latent_bias", layer)]
    if gates:
        found.insert(0, Rows(tensor=make_zeros(heads)))
    if latent.query_rank is None:
        return [Rows(tensor=make_zeros(heads * latent.key)), *found]
    return [find_rows(tensors, model, "latent_query_bias", layer), *found]


def _find_streams(tensors: Mapping[str, SourceTensor], model: Model, kind: str) -> list[Rows]:
    """Projections of the residual streams but the first; zeros fill each up."""
    assert model.altup is not None
    pattern, shape = getattr(model.tensors, kind), model.shape
    index = None if shape.hidden == shape.stored_hidden else np.arange(shape.hidden)
    return [
        Rows(
            tensor=tensors[fill_name(pattern, 0, stream=stream)],
            index=index,
            missing=shape.stored_hidden - shape.hidden,
        )
        for stream in range(model.altup.streams - 1)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _TurnedKeys(SourceTensor):
    """What turns the plain part of each head's query into a query of what keys are made of:
    [heads rank, plain], of [heads (plain + value), rank]."""

    whole: SourceTensor
    head_rows: int
    """Rows of a head in ``whole``."""

    def read_raw(self, start: int = 0, stop: int | None = None) -> Raw:
        rank, plain = self.whole.shape[1], self.shape[1]
        rows = range(self.shape[0])[start:stop]
        first, last = rows.start // rank, -(-rows.stop // rank)
        found = []
        for head in range(first, last):
            origin = head * self.head_rows
            raw = self.whole.read_raw(origin, origin + plain)
            # Bytes must become numbers before they can be turned.
            numbers = self.whole.widen(raw)
            found.append(np.ascontiguousarray(numbers.T))
        turned: Raw = np.concatenate(found)[rows.start - first * rank : rows.stop - first * rank]
        return turned

    def widen(self, raw: Raw) -> F32:
        return raw.astype(np.float32, copy=False)


def _turn_keys(whole: SourceTensor, model: Model) -> SourceTensor:
    shape, latent = model.shape, model.attention.latent
    assert latent is not None
    return _TurnedKeys(
        file=whole.file,
        name=whole.name,
        dtype="F32",
        shape=(shape.heads * latent.rank, latent.plain),
        offset=0,
        size_bytes=whole.size_bytes,
        whole=whole,
        head_rows=latent.plain + shape.head_dim,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stack(SourceTensor):
    parts: tuple[Rows, ...]

    def read_raw(self, start: int = 0, stop: int | None = None) -> Raw:
        return np.stack([part.read() for part in self.parts])[start:stop]

    def widen(self, raw: Raw) -> F32:
        return raw.astype(np.float32, copy=False)


def _find_down_biases(tensors: Mapping[str, SourceTensor], model: Model, layer: int) -> Rows:
    """Biases of an FFN's output, of a mixture one for each expert [experts, hidden]."""
    count = model.expert_count
    if model.moe is None:
        return find_ffn_rows(tensors, model, "down_bias", layer, 0)
    parts = tuple(find_ffn_rows(tensors, model, "down_bias", layer, n) for n in range(count))
    first = parts[0].tensor
    stack = _Stack(
        file=first.file,
        name=first.name,
        dtype="F32",
        shape=(count, model.shape.hidden),
        offset=0,
        size_bytes=sum(part.size_bytes for part in parts),
        parts=parts,
    )
    return Rows(tensor=stack)
