"""Which rows of a checkpoint's tensors become the dense tensors of a store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pi2.arrays import F32, Raw
from pi2.importing.cutoffs import find_cutoff
from pi2.importing.ffn_rows import find_ffn_rows, name_part
from pi2.importing.rows import Rows, fill_name, find_rows
from pi2.importing.safetensors_file import SourceTensor
from pi2.importing.virtual_tensor import make_ones, make_same, make_zeros
from pi2.plan.documents.model import Model
from pi2.plan.weights.cutoffs import GATE_CUTOFF
from pi2.plan.weights.projections import list_side_matrices
from pi2.plan.weights.tensor_names import STREAM_IN, STREAM_OUT, split_mixer_kind

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
    """Vectors of equal length as the rows of a matrix."""

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
