"""The dense tensors of a neuron store as a program's weights: `StoreWeights`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from pi2.backends.blocks.instructions import Weight
from pi2.formats import find_packing
from pi2.model.blocks import Attention
from pi2.model.tensor import DenseTensor, name_layer_tensor, name_mixer_norm, name_state_tensor
from pi2.plan.documents.model import Model
from pi2.plan.weights.layout import Tensor

if TYPE_CHECKING:
    from pi2.arrays import F32, U8

_SAME = frozenset(
    {
        *("positions", "layer_embedding", "layer_projection", "layer_projection_norm"),
        *("stream_in", "stream_out", "final_norm", "final_norm_bias", "head", "head_bias"),
        *("hyper_head", "hyper_head_bias", "hyper_head_scale"),
        *("embedding", "embedding_norm", "embedding_norm_bias", "ngram_rows"),
        *("hyper_head_norm", "hyper_head_down", "hyper_head_up"),
    }
)
"""Tensors of the whole model: their names in stores."""
_RENAMED: Mapping[str, str] = {"latent_keys": "latent_key", "latent_values": "latent_value"}


def describe_stored(model: Model) -> Model:
    """Return a model as its store has it: norms have their offset, heads their whole width, and
    every part its own rows."""
    changes: dict[str, Any] = {"norm": model.norm.model_copy(update={"weight_offset": 0.0})}
    attention: dict[str, Any] = {"value_width": None}
    if model.attention.output_gate and model.attention.latent is None:
        attention["output_gate_of"] = "element"
    if model.attention.index is not None:
        attention["index"] = model.attention.index.model_copy(update={"pairs": "halves"})
    changes["attention"] = model.attention.model_copy(update=attention)
    names = {"query_gate": "query_gate", "fused_qkv": None}
    changes["tensors"] = model.tensors.model_copy(update=names)
    if model.other_heads is not None:
        update = {"keys_are_values": False}
        changes["other_heads"] = model.other_heads.model_copy(update=update)
    if model.positions is not None:
        changes["positions"] = model.positions.model_copy(update={"offset": 0})
    return model.model_copy(update=changes)


class StoreWeights:
    """Finds tensors as `pi2.backends.blocks.instructions.FindWeight` does."""

    def __init__(self, model: Model, tensors: Mapping[str, Tensor | DenseTensor]) -> None:
        """``model``: as `describe_stored` has it; tensors with or without their bytes."""
        self._model, self._tensors = model, tensors
        self._whole: dict[str, Weight] = {}
        """Tensors by their names in stores."""
        kinds, own = ("in", "token_norm", "stream_norm"), model.operators.get("mtp")
        self._inputs = {} if own is None else {own[kind]: f"mtp_{kind}" for kind in kinds}
        """Names in stores of what an MTP head joins."""

    def __call__(self, key: str, layer: int, mixer: int = 0, /) -> Weight | None:
        if key in self._inputs:
            return self._take(name_layer_tensor(0, self._inputs[key]))
        if key in _SAME:
            return self._take(key)
        if key.startswith("state_"):
            found = self._take(name_state_tensor(layer, mixer, key))
            return self._cut(found) if key == "state_output" else found
        if key in ("attention_norm", "inner_norm"):
            return self._take(name_layer_tensor(layer, name_mixer_norm(mixer)))
        own = self._model.blocks[layer].attention
        part, is_bias = key.removesuffix("_bias"), key.endswith("_bias")
        rows = {} if own is None else _list_projected(own)
        if part in rows:
            first, count = rows[part]
            whole = self._take(name_layer_tensor(layer, "qkv_bias" if is_bias else "qkv"))
            return None if whole is None else _slice(whole, first, count, is_bias)
        width = self._model.side_width
        if part in ("side_gate", "side_up") and not is_bias:
            whole = self._take(name_layer_tensor(layer, "side_in"))
            first = width if key == "side_up" and self._model.ffn.gated else 0
            return None if whole is None else _slice(whole, first, width, False)
        found = self._take(name_layer_tensor(layer, _RENAMED.get(key, key)))
        if key in ("output", "laurel_out", "layer_input_output", "side_down", "experts_out"):
            return self._cut(found)
        return found

    def _cut(self, weight: Weight | None) -> Weight | None:
        """Leave out rows of zeros that make the residual stream as long as packed vectors."""
        return None if weight is None else _slice(weight, 0, self._model.shape.hidden, False)

    def _take(self, name: str) -> Weight | None:
        if name not in self._tensors:
            return None
        if name not in self._whole:
            self._whole[name] = make_weight(self._tensors[name])
        return self._whole[name]


def _list_projected(own: Attention) -> dict[str, tuple[int, int]]:
    """Return the first row in ``qkv`` and the number of rows of each part."""
    latent, sizes = own.latent, dict[str, int]()
    if latent is not None:
        if latent.query_rank is None:
            sizes["query"] = own.heads * latent.key
        else:
            sizes["latent_query"] = latent.query_rank
        sizes |= {"query_gate": own.gates, "latent": latent.kept}
    else:
        keys = own.keys if own.has_keys else 0
        sizes = {"query": own.query, "key": keys, "value": keys, "query_gate": own.gates}
    found, first = {}, 0
    for part, size in sizes.items():
        if size:
            found[part] = first, size
        first += size
    return found


def _slice(weight: Weight, first: int, count: int, is_vector: bool) -> Weight:
    """Return some rows of a matrix, or elements of a vector."""
    size, scales, data = 4 if is_vector else weight.row_bytes, weight.row_scales, weight.data
    if data is not None:
        data = data[first * size : (first + count) * size]
    if is_vector:
        return replace(weight, rows=1, length=count, data=data)
    scales = None if scales is None else scales[first : first + count]
    return _join_scales(replace(weight, rows=count, data=data, row_scales=scales))


def _join_scales(weight: Weight) -> Weight:
    """Return a matrix with one scale, if all rows have the same."""
    scales = weight.row_scales
    is_unknown = weight.data is None
    if scales is None or is_unknown or not len(scales) or (scales != scales[0]).any():
        return weight
    return replace(weight, scales=(float(scales[0]),), row_scales=None)


def make_weight(tensor: Tensor | DenseTensor) -> Weight:
    """Return a tensor as a program's weight; its data are copied unless they are blocks already."""
    data: U8 | None = None
    scales: F32 | None = None
    if isinstance(tensor, DenseTensor):
        packing = tensor.packing
        if packing.scaled == "vectors":
            scales = cast("F32", range(tensor.rows))  # no two are known to be the same
    else:
        import numpy as np

        packing = find_packing(tensor.precision or "fp32")
        data = np.asarray(tensor.weights).view(np.uint8).reshape(tensor.rows, -1)
        if tensor.format is None:
            data = packing.join_blocks(data, tensor.scales, tensor.length)
        data = data.reshape(-1)
        if packing.scaled == "vectors" and tensor.scales is not None:
            scales = packing.take_scales(tensor.scales).reshape(-1)
    return Weight(
        format=packing.joined,
        rows=tensor.rows,
        length=tensor.length,
        data=data,
        row_scales=scales,
        name=tensor.name,
    )
