"""Where the neurons of an FFN, or of an expert, lie in a checkpoint.

A store's layers have experts of equal size.  What has another size is stored as several of them:
shared experts, and the one FFN of a layer that is no mixture.  Zeros fill up the last.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pi2.arrays import F32, I64
from pi2.importing.rows import Rows, fill_name
from pi2.importing.safetensors_file import SourceTensor
from pi2.importing.virtual_tensor import make_zeros, take_expert, turn_tensor
from pi2.plan.documents.model import Model

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
