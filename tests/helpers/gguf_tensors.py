"""Tensors and settings of tiny checkpoints as llama.cpp's converter names and arranges them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pi2.arrays import F32
from pi2.plan.documents.model import Model

_WHOLE = {
    "embedding": "token_embd.weight", "positions": "position_embd.weight",
    "head": "output.weight", "head_bias": "output.bias",
    "final_norm": "output_norm.weight", "final_norm_bias": "output_norm.bias",
}  # fmt: skip
_LAYERS = {
    "attention_norm": "attn_norm.weight", "attention_norm_bias": "attn_norm.bias",
    "ffn_norm": "ffn_norm.weight", "ffn_norm_bias": "ffn_norm.bias",
    **{
        f"{key}{end}": f"attn_{name}.{kind}"
        for key, name in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "output"))
        for end, kind in (("", "weight"), ("_bias", "bias"))
    },
    **{
        f"{part}{end}": f"ffn_{part}.{kind}"
        for part in ("gate", "up", "down")
        for end, kind in (("", "weight"), ("_bias", "bias"))
    },
    "router": "ffn_gate_inp.weight", "predictor_in": "fc1.weight", "predictor_out": "fc2.weight",
}  # fmt: skip
"""Names in files, by the keys of `pi2.plan.documents.model_parts.Tensors`."""


def permute(values: F32, heads: int) -> F32:
    """Rows of queries or keys as llama.cpp has them for Llama: pairs become neighbours."""
    halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def translate(
    model: Model, weights: Mapping[str, F32], *, is_permuted: bool = True
) -> dict[str, F32]:
    """Tensors of a checkpoint; ``is_permuted``: with rows as files of Llama have them."""
    found, names, shape = {}, model.tensors, model.shape
    for key, name in _WHOLE.items():
        if getattr(names, key) in weights:
            found[name] = weights[getattr(names, key)]
    heads = {"query": shape.heads, "key": shape.kv_heads} if is_permuted else {}
    for layer in range(shape.layers):
        for key, name in _LAYERS.items():
            pattern = getattr(names, key)
            owners = range(model.expert_count) if "{expert}" in pattern else [0]
            stored = [pattern.format(layer=layer, expert=expert) for expert in owners]
            if stored[0] not in weights:
                continue
            values = np.stack([weights[own] for own in stored])
            if "{expert}" in pattern:
                name = name.replace(".", "_exps.")
            else:
                values = values[0]
            own = heads.get(key.removesuffix("_bias"))
            found[f"blk.{layer}.{name}"] = values if own is None else permute(values, own)
    return found


def list_settings(model: Model) -> dict[str, Any]:
    """What a file states of a model; keys that begin with a dot follow the architecture."""
    shape, moe = model.shape, model.moe
    found: dict[str, Any] = {
        "general.name": "Tiny", ".context_length": shape.context, ".block_count": shape.layers,
        ".embedding_length": shape.hidden, ".feed_forward_length": shape.ffn,
        ".attention.head_count": shape.heads, ".attention.head_count_kv": shape.kv_heads,
        ".attention.key_length": shape.head_dim, ".attention.value_length": shape.head_dim,
        ".rope.dimension_count": shape.head_dim, ".rope.freq_base": model.rope.theta,
        ".attention.layer_norm_rms_epsilon": model.norm.epsilon,
    }  # fmt: skip
    if moe is not None:
        found |= {".expert_count": moe.experts, ".expert_used_count": moe.active_experts}
    return found


def read_weights(checkpoint: Path) -> dict[str, F32]:
    from safetensors.numpy import load_file

    weights = load_file(checkpoint / "model.safetensors")
    return {name: values.astype(np.float32) for name, values in weights.items()}
