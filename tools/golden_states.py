"""Golden models some of whose layers keep a state."""

from __future__ import annotations

from golden_options import HYBRID, LATENT, Options

_LATENT = {key: value for key, value in LATENT.items() if key != "n_routed_experts"}

MODELS: dict[str, tuple[str, Options]] = {
    "qwen3-next": (
        "Qwen3Next",
        HYBRID
        | {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "qwen3-5": (
        "Qwen3_5Text",
        HYBRID
        | {
            "hidden_size": 48,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "linear_value_head_dim": 12,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_conv_kernel_dim": 3,
            "attention_bias": True,
        },
    ),
    "qwen3-5-moe": (
        "Qwen3_5MoeText",
        HYBRID
        | {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
            "tie_word_embeddings": True,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        },
    ),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        {
            "hidden_size": 48,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "attention", "mamba"],
            "intermediate_size": 20,
            "shared_intermediate_size": 40,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "mamba_n_heads": 6,
            "mamba_d_head": 16,
            "mamba_d_state": 10,
            "mamba_n_groups": 2,
            "mamba_expand": 2,
            "mamba_proj_bias": True,
            "time_step_limit": [0.5, 1.5],
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.5,
        },
    ),
    "granite-hybrid-dense": (
        "GraniteMoeHybrid",
        {
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "attention", "mamba"],
            "position_embedding_type": "rope",
            "shared_intermediate_size": 72,
            "num_local_experts": 0,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
            "mamba_expand": 1,
            "mamba_conv_bias": False,
            "mamba_d_conv": 2,
        },
    ),
    "bamba": (
        "Bamba",
        {
            "num_hidden_layers": 3,
            "attn_layer_indices": [1],
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "mamba_n_groups": 2,
            "mamba_expand": 2,
        },
    ),
    "nemotron-h": (
        "NemotronH",
        {
            "layers_block_type": [
                *("linear_attention", "mlp", "linear_attention", "full_attention", "mlp"),
                *("full_attention", "mlp"),
            ],
            "intermediate_size": 33,
            "head_dim": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 12,
            "ssm_state_size": 8,
            "n_groups": 2,
            "use_bias": True,
            "mlp_bias": True,
            "time_step_min": 0.6,
        },
    ),
    "nemotron-h-moe": (
        "NemotronH",
        {
            "layers_block_type": [
                *("linear_attention", "moe", "linear_attention", "full_attention", "moe"),
                *("linear_attention", "linear_attention", "mlp", "full_attention", "moe"),
            ],
            "head_dim": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 1,
            "conv_kernel": 3,
            "use_conv_bias": False,
            "n_routed_experts": 6,
            "moe_intermediate_size": 20,
            "moe_shared_expert_intermediate_size": 36,
            "intermediate_size": 44,
            "routed_scaling_factor": 2.5,
        },
    ),
    "nemotron-h-latent": (
        "NemotronH",
        {
            "layers_block_type": [
                *("linear_attention", "moe", "linear_attention", "full_attention", "moe"),
                *("full_attention", "moe"),
            ],
            "head_dim": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 1,
            "n_routed_experts": 6,
            "moe_intermediate_size": 20,
            "moe_latent_size": 40,
            "moe_shared_expert_intermediate_size": 36,
            "routed_scaling_factor": 2.5,
        },
    ),
    "mamba2": (
        "Mamba2",
        {
            "num_heads": 4,
            "head_dim": 12,
            "hidden_size": 24,
            "expand": 2,
            "state_size": 8,
            "n_groups": 2,
            "conv_kernel": 3,
        },
    ),
    "kimi-linear": (
        "KimiLinear",
        _LATENT
        | {
            "num_hidden_layers": 4,
            "layer_types": [
                *("linear_attention", "linear_attention", "full_attention", "linear_attention")
            ],
            "q_lora_rank": None,
            "num_local_experts": 6,
            "linear_head_dim": 12,
            "linear_num_heads": 3,
            "linear_conv_kernel_dim": 3,
        },
    ),
    "bailing-hybrid": (
        "BailingHybrid",
        {key: value for key, value in _LATENT.items() if key != "q_lora_rank"}
        | {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 6,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "head_dim": 10,
            "short_conv_kernel_size": 4,
            "num_mtp_layers": 0,
        },
    ),
    "mamba": (
        "Mamba",
        {"hidden_size": 24, "expand": 2, "state_size": 6, "conv_kernel": 3, "use_bias": True},
    ),
    "falcon-mamba": (
        "FalconMamba",
        {
            "hidden_size": 40,
            "state_size": 5,
            "time_step_rank": 7,
            "use_conv_bias": False,
            "mixer_rms_eps": 1e-2,
        },
    ),
    "jamba": (
        "Jamba",
        {
            "num_hidden_layers": 4,
            "hidden_size": 48,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "intermediate_size": 20,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_d_conv": 3,
            "mamba_dt_rank": 5,
        },
    ),
    "nemotron-h-blocks": (
        "NemotronH",
        {
            "layers_block_type": [
                *("full_attention", "linear_attention", "full_attention", "mlp", "moe"),
                *("linear_attention", "linear_attention", "linear_attention", "moe"),
                "linear_attention",
            ],
            "head_dim": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 2,
            "intermediate_size": 44,
            "n_routed_experts": 6,
            "moe_intermediate_size": 20,
            "moe_latent_size": 12,
            "moe_shared_expert_intermediate_size": 36,
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_multiple_of": 20,
            "hidden_size": 48,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "conv_bias": True,
        },
    ),
    "lfm2-moe": (
        "Lfm2Moe",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "hidden_size": 48,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "moe_intermediate_size": 20,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
    "lfm2-plain": (
        "Lfm2",
        {
            "layer_types": ["conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": 2,
            "tie_word_embeddings": False,
        },
    ),
}
"""Class of transformers and options of a configuration by name."""
