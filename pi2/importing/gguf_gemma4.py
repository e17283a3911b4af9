"""What GGUF files of Gemma 4 state, under the names of configurations.

Layers with and without a window differ in heads, rotary positions and, of E2B, in the width of
their FFNs: files have a number for every layer where that is so.  The part of a head that turns is
told by divisors of frequencies, which are huge where nothing turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pi2.arrays import F32
from pi2.importing.gguf_gemma3n import LAYER_EMBEDDING_NAMES
from pi2.importing.gguf_metadata import Metadata
from pi2.importing.safetensors_file import SourceTensor

_STILL = 1e20
"""Divisors of frequencies from here on turn nothing."""
_LAYER = "model.layers.{layer}"
GEMMA4_NAMES = {
    **LAYER_EMBEDDING_NAMES,
    "blk.{layer}.layer_output_scale.weight": f"{_LAYER}.layer_scalar",
    "blk.{layer}.ffn_gate_inp.weight": f"{_LAYER}.router.proj.weight",
    "blk.{layer}.ffn_gate_inp.scale": f"{_LAYER}.router.scale",
    "blk.{layer}.ffn_down_exps.scale": f"{_LAYER}.router.per_expert_scale",
    "blk.{layer}.pre_ffw_norm_2.weight": f"{_LAYER}.pre_feedforward_layernorm_2.weight",
    "blk.{layer}.post_ffw_norm_1.weight": f"{_LAYER}.post_feedforward_layernorm_1.weight",
    "blk.{layer}.post_ffw_norm_2.weight": f"{_LAYER}.post_feedforward_layernorm_2.weight",
    "blk.{layer}.ffn_gate_up_exps.weight": f"{_LAYER}.experts.gate_up_proj.{{expert}}",
    "blk.{layer}.ffn_down_exps.weight": f"{_LAYER}.experts.down_proj.{{expert}}",
}
"""Names of transformers by those of files, beside those that earlier families have."""


def read_gemma4(metadata: Metadata, config: dict[str, Any], activation: str) -> dict[str, Any]:
    """The configuration, but for what tensors alone tell.  `UserError` P532 as `Metadata.read`."""
    read, count, layers = metadata.read, metadata.read_count, config["num_hidden_layers"]
    narrow = metadata.read_flags("{arch}.attention.sliding_window_pattern", layers)
    narrow = [(layer + 1) % 6 != 0 for layer in range(layers)] if narrow is None else narrow
    kinds = ["sliding_attention" if flag else "full_attention" for flag in narrow]
    full = [layer for layer, flag in enumerate(narrow) if not flag]
    ffn = metadata.read_counts("{arch}.feed_forward_length", layers)
    kv_heads = metadata.read_counts("{arch}.attention.head_count_kv", layers)
    wide = count("{arch}.attention.key_length")
    head_dim = count("{arch}.attention.key_length_swa", wide)
    heads = {layer: {"head_dim": wide, "num_key_value_heads": kv_heads[layer]} for layer in full}
    own = next((kv_heads[layer] for layer, flag in enumerate(narrow) if flag), kv_heads[0])
    shared = read("{arch}.attention.shared_kv_layers", int, 0)
    experts = read("{arch}.expert_count", int, 0)
    softcap = "{arch}.final_logit_softcapping"
    return {
        "hidden_activation": activation,
        "intermediate_size": ffn[0],
        "use_double_wide_mlp": 0 < shared < layers and ffn[-1] == 2 * ffn[0],
        "num_key_value_heads": own,
        "head_dim": head_dim,
        "per_layer_config": {str(layer): found for layer, found in heads.items()},
        "layer_types": kinds,
        "sliding_window": count("{arch}.attention.sliding_window"),
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": read("{arch}.embedding_length_per_layer_input", int, 0),
        "rms_norm_eps": read("{arch}.attention.layer_norm_rms_epsilon", float),
        "final_logit_softcapping": read(softcap, float) if metadata.has(softcap) else None,
        **(_read_experts(metadata, experts) if experts else {}),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": read("{arch}.rope.freq_base", float, 1_000_000.0),
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": read("{arch}.rope.freq_base_swa", float, 10_000.0),
            },
        },
    }


def _read_experts(metadata: Metadata, experts: int) -> dict[str, Any]:
    """Numbers and sizes of experts."""
    return {
        "enable_moe_block": True,
        "num_experts": experts,
        "top_k_experts": metadata.read_count("{arch}.expert_used_count"),
        "moe_intermediate_size": metadata.read_count("{arch}.expert_feed_forward_length"),
    }


def complete_gemma4(config: dict[str, Any], tensors: Mapping[str, SourceTensor]) -> None:
    """Add what tensors tell: whether keys are values, and how many tokens have embeddings of
    layers."""
    first_shared = config["num_hidden_layers"] - config["num_kv_shared_layers"]
    kinds = config["layer_types"][:first_shared]
    full = (layer for layer, kind in enumerate(kinds) if kind == "full_attention")
    config["attention_k_eq_v"] = any(
        f"model.layers.{layer}.self_attn.v_proj.weight" not in tensors for layer in full
    )
    table = tensors.get("model.embed_tokens_per_layer.weight")
    if table is not None:
        config["vocab_size_per_layer_input"] = table.shape[0]


def scale_gemma4(config: dict[str, Any], divisors: F32) -> bool:
    """State the part of a head that turns, by divisors of its pairs' frequencies; whether they say
    that and nothing else."""
    turning = int(np.count_nonzero(divisors == 1.0))
    is_known = turning > 0 and (divisors[:turning] == 1.0).all()
    if not is_known or not (divisors[turning:] >= _STILL).all():
        return False
    share = turning / len(divisors)
    config["rope_parameters"]["full_attention"]["partial_rotary_factor"] = share
    return True
