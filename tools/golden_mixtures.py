"""Golden models with experts or latent attention."""

from __future__ import annotations

from golden_options import EXPERTS, LATENT, ROPE, Options

MODELS: dict[str, tuple[str, Options]] = {
    "laguna": (
        "Laguna",
        {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "num_attention_heads_per_layer": [2, 6, 2],
            "sliding_window": 5,
            "head_dim": 16,
            "hidden_size": 48,
            "intermediate_size": 33,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 20,
            "moe_routed_scaling_factor": 2.5,
            "attention_bias": True,
        },
    ),
    "kolibri": (
        "Kolibri1",
        {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 5,
            "head_dim": 12,
            "hidden_size": 48,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 28,
        },
    ),
    "mixtral": (
        "Mixtral",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 36},
    ),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 40,
            "intermediate_size": 48,
        },
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 200.0,
                "factor": 4.0,
                "low_freq_factor": 1.5,
                "high_freq_factor": 6.0,
                "original_max_position_embeddings": 24,
            },
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 19,
            "hidden_size": 48,
            "head_dim": 16,
            "sliding_window": 6,
            "swiglu_limit": 1.5,
            "num_hidden_layers": 3,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "truncate": False,
            },
        },
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {
            **LATENT,
            "q_lora_rank": None,
            "attention_bias": True,
            "n_group": 3,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "first_k_dense_replace": 1,
            "n_shared_experts": 2,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **LATENT,
            "n_group": 3,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 0.8,
            },
        },
    ),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        {
            **LATENT,
            "attention_bias": True,
            "rope_interleave": False,
            "num_hidden_layers": 3,
            "mlp_layer_types": ["dense", "sparse", "dense"],
            "routed_scaling_factor": 1.8,
        },
    ),
    "glm4-moe": (
        "Glm4Moe",
        {
            **EXPERTS,
            "head_dim": 16,
            "attention_bias": True,
            "use_qk_norm": True,
            "first_k_dense_replace": 1,
        },
    ),
    "dots1": (
        "Dots1",
        {**EXPERTS, "n_shared_experts": 2, "sliding_window": 6, "max_window_layers": 1},
    ),
    "minimax-m2": (
        "MiniMaxM2",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 20,
            "head_dim": 16,
            "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
        },
    ),
    "minimax-m3": (
        "MiniMaxM3VLText",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 20,
            "dense_intermediate_size": 44,
            "shared_intermediate_size": 28,
            "swiglu_limit": 0.8,
            "head_dim": 16,
            "mlp_layer_types": ["dense", "sparse"],
            "layer_types": ["full_attention", "minimax_m3_sparse"],
            "index_n_heads": 2,
            "index_head_dim": 16,
            "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
        },
    ),
    "mimo-v2-flash": (
        "MiMoV2Flash",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "v_head_dim": 10,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "rope_parameters": {
                "full_attention": ROPE | {"partial_rotary_factor": 0.5},
                "sliding_attention": {
                    "rope_type": "default",
                    "rope_theta": 100.0,
                    "partial_rotary_factor": 0.5,
                },
            },
        },
    ),
    "ernie4-5-moe": (
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 20,
            "moe_num_shared_experts": 1,
            "num_hidden_layers": 3,
            "moe_layer_interval": 2,
            "moe_layer_start_index": 0,
        },
    ),
    "olmoe": (
        "Olmoe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 20,
            "norm_topk_prob": False,
            "clip_qkv": 0.9,
        },
    ),
    "phimoe": (
        "Phimoe",
        {
            "num_local_experts": 6,
            "intermediate_size": 20,
            "attention_bias": True,
            "lm_head_bias": True,
            "router_jitter_noise": 0.2,
            "max_position_embeddings": 300,
            "rope_parameters": ROPE
            | {
                "rope_type": "longrope",
                "original_max_position_embeddings": 100,
                "short_factor": [1.0, 1.1, 1.3, 1.7],
                "long_factor": [1.5, 2.0, 3.0, 4.0],
                "short_mscale": 1.2,
                "long_mscale": 1.3,
            },
        },
    ),
    "hunyuan-moe": (
        "HunYuanMoEV1",
        {"num_experts": 5, "moe_topk": 2, "intermediate_size": 20, "head_dim": 16},
    ),
    "mistral4": (
        "Mistral4",
        LATENT
        | {
            "n_group": 2,
            "topk_group": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "mistral4-scaled": (
        "Mistral4",
        LATENT
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            }
        },
    ),
    "granite-moe": (
        "GraniteMoe",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 20,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.5,
        },
    ),
    "granite-moe-shared": (
        "GraniteMoeShared",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 20,
            "shared_intermediate_size": 52,
            "attention_multiplier": 0.2,
        },
    ),
    "qwen3-moe-dense-layers": (
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "mlp_only_layers": [1],
        },
    ),
    "turbosparse-mixtral": (
        "turbosparsemixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 40},
    ),
    "smallthinker": (
        "smallthinker",
        {
            "moe_num_primary_experts": 6,
            "moe_num_active_primary_experts": 2,
            "moe_ffn_hidden_size": 28,
            "moe_primary_router_apply_softmax": False,
            "num_hidden_layers": 3,
            "rope_layout": [0, 1, 1],
            "sliding_window_layout": [0, 1, 1],
            "sliding_window_size": 6,
            "tie_word_embeddings": True,
        },
    ),
    "llama4": (
        "Llama4Text",
        {
            "num_hidden_layers": 5,
            "head_dim": 12,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 20,
            "intermediate_size_mlp": 44,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 1, 0, 1, 0],
            "attention_chunk_size": 7,
            "floor_scale": 5,
            "attn_scale": 0.7,
        },
    ),
    "llama4-top-one": (
        "Llama4Text",
        {
            "num_hidden_layers": 2,
            "head_dim": 8,
            "num_local_experts": 4,
            "intermediate_size": 24,
            "no_rope_layers": [1, 0],
            "use_qk_norm": False,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 100.0,
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
}
"""Class of transformers and options of a configuration by name."""
