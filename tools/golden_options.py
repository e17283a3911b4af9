"""Options that configurations of several golden models share."""

from __future__ import annotations

from typing import Any

VOCAB = 96
Options = dict[str, Any]
ROPE: Options = {"rope_theta": 10000.0}
EXPERTS: Options = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
LATENT: Options = EXPERTS | {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
INDEX: Options = {"index_topk": 10, "index_n_heads": 6, "index_head_dim": 16}
"""An index that leaves keys of the prompt out."""
HYBRID: Options = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
"""Qwen's layers with a state."""
