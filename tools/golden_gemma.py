"""Golden models of Gemma."""

from __future__ import annotations

from golden_options import VOCAB, Options

MODELS: dict[str, tuple[str, Options]] = {
    "gemma": ("Gemma", {"head_dim": 32, "num_key_value_heads": 1}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "sliding_window": 6,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "sliding_window": 5,
            "query_pre_attn_scalar": 40,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "gemma3n": (
        "Gemma3nText",
        {
            "hidden_size": 48,
            "head_dim": 20,
            "intermediate_size": 72,
            "hidden_size_per_layer_input": 20,
            "vocab_size_per_layer_input": VOCAB,
            "num_hidden_layers": 5,
            "num_kv_shared_layers": 2,
            "sliding_window": 5,
            "layer_types": [
                *("sliding_attention", "full_attention", "sliding_attention"),
                *("sliding_attention", "full_attention"),
            ],
            "laurel_rank": 12,
            "activation_sparsity_pattern": [0.8, 0.0, 0.3, 0.6, 0.0],
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3n-narrow": (
        "Gemma3nText",
        {
            "head_dim": 16,
            "intermediate_size": 24,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": VOCAB,
            "num_kv_shared_layers": 0,
            "altup_num_inputs": 3,
            "altup_correct_scale": False,
            "laurel_rank": 32,
            "layer_types": ["full_attention", "full_attention"],
            "activation_sparsity_pattern": [0.9, 0.0],
        },
    ),
    "gemma4": (
        "Gemma4Text",
        {
            "hidden_size": 48,
            "head_dim": 20,
            "global_head_dim": 36,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "num_hidden_layers": 4,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 5000.0,
                    "partial_rotary_factor": 0.3,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "gemma4-e2b": (
        "Gemma4Text",
        {
            "hidden_size": 48,
            "head_dim": 20,
            "global_head_dim": 36,
            "intermediate_size": 44,
            "hidden_size_per_layer_input": 20,
            "vocab_size_per_layer_input": VOCAB,
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "num_key_value_heads": 1,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4-moe": (
        "Gemma4Text",
        {
            "head_dim": 16,
            "global_head_dim": 24,
            "hidden_size_per_layer_input": 0,
            "num_hidden_layers": 3,
            "sliding_window": 6,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "intermediate_size": 44,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 20,
        },
    ),
}
"""Class of transformers and options of a configuration by name."""
