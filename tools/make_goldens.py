"""Makes the golden models of tests/golden/models: tiny random models of every family, and what the
reference implementation (Hugging Face transformers, float32) computes with them.

Needs torch and transformers, which pi2 itself does not.  ``python tools/make_goldens.py`` writes
all, ``python tools/make_goldens.py NAME...`` some.  Each folder holds a checkpoint (config.json,
model.safetensors in fp16) and golden.npz: ``prompt`` int64 [n], ``logits`` float32 [n, vocab] after
each of its tokens, ``greedy`` int64 [32], the tokens that follow it.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

import golden_variants as variants
from golden_ternary import QUANTIZATION, pack_projections, round_projections

FOLDER = Path(__file__).resolve().parents[1] / "tests/golden/models"
PROMPT = 24
GREEDY = 32
VOCAB = 96
SMALLEST_GAP = 1e-3
"""Between the best and the next logit, of the largest: else another seed is taken, because a
rounding error could change the text."""

Options = dict[str, Any]

COMMON: Options = {
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
UNKNOWN = {
    "Falcon": ("num_key_value_heads", "intermediate_size"),
    "GPTBigCode": (
        *("num_key_value_heads", "intermediate_size", "hidden_size"),
        *("num_hidden_layers", "num_attention_heads"),
    ),
    "GPTJ": ("num_key_value_heads", "intermediate_size"),
    "GPTNeoX": ("num_key_value_heads",),
    "OPT": ("num_key_value_heads", "intermediate_size"),
}
"""Common options that a family has under other names or not at all."""
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

MODELS: dict[str, tuple[str, Options]] = {
    "llama": ("Llama", {"rope_parameters": ROPE | {"rope_type": "default"}}),
    "llama-relu-odd-heads": (
        "Llama",
        {
            "hidden_act": "relu",
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "hidden_size": 96,
        },
    ),
    "llama-odd-widths": (
        "Llama",
        {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48},
    ),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "relu"}),
    "llama-linear": (
        "Llama",
        {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 4.0}, "head_dim": 32},
    ),
    "llama-llama3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            "tie_word_embeddings": True,
        },
    ),
    "llama-yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            "num_key_value_heads": 1,
        },
    ),
    "llama-yarn-options": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 8.0,
                "beta_fast": 4.0,
                "beta_slow": 0.5,
                "attention_factor": 1.25,
                "truncate": False,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "phi3-longrope": (
        "Phi3",
        {
            "hidden_size": 64,
            "original_max_position_embeddings": 100,
            "max_position_embeddings": 300,
            "tie_word_embeddings": True,
            "rope_parameters": ROPE
            | {
                "rope_type": "longrope",
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5],
                "long_factor": [1.5, 2.0, 3.0, 4.0, 6.0, 9.0],
            },
        },
    ),
    "llama-longrope-beyond": (
        "Llama",
        {
            "rope_parameters": ROPE
            | {
                "rope_type": "longrope",
                "factor": 5.0,
                "original_max_position_embeddings": 16,
                "short_factor": [1.0, 1.1, 1.3, 1.7],
                "long_factor": [1.5, 2.0, 3.0, 4.0],
            },
        },
    ),
    "mistral-window": ("Mistral", {"sliding_window": 8, "head_dim": 32}),
    "qwen2": ("Qwen2", {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 96}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
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
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.5,
        },
    ),
    "phi3": ("Phi3", {"sliding_window": 12}),
    "glm": ("Glm", {"head_dim": 32, "attention_bias": True}),
    "glm4": ("Glm4", {"head_dim": 16, "num_attention_heads": 6, "hidden_size": 64}),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "cohere2": ("Cohere2", {"logit_scale": 0.5, "num_hidden_layers": 4, "sliding_window": 7}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 3, "no_rope_layer_interval": 2}),
    "phi": ("Phi", {"rope_parameters": ROPE | {"partial_rotary_factor": 0.25}}),
    "gptj": (
        "GPTJ",
        {
            "n_inner": 96,
            "rotary_dim": 4,
            "activation_function": "gelu_new",
            "tie_word_embeddings": False,
        },
    ),
    "stablelm": (
        "StableLm",
        {
            "use_qkv_bias": True,
            "rope_parameters": ROPE | {"rope_type": "default", "partial_rotary_factor": 0.5},
        },
    ),
    "stablelm-parallel": ("StableLm", {"use_parallel_residual": True}),
    "starcoder2": ("Starcoder2", {"sliding_window": 8}),
    "starcoder2-odd-widths": (
        "Starcoder2",
        {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 72},
    ),
    "opt": (
        "OPT",
        {"ffn_dim": 96, "word_embed_proj_dim": 32, "activation_function": "relu"},
    ),
    "falcon-7b-relu": (
        "Falcon",
        {
            "multi_query": True,
            "parallel_attn": True,
            "activation": "relu",
            "alibi": False,
            "ffn_hidden_size": 96,
        },
    ),
    "falcon-40b": (
        "Falcon",
        {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "alibi": False,
            "ffn_hidden_size": 96,
        },
    ),
    "falcon-sequential": (
        "Falcon",
        {
            "multi_query": False,
            "parallel_attn": False,
            "bias": True,
            "alibi": False,
            "ffn_hidden_size": 96,
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
    "ernie4-5": ("Ernie4_5", {"head_dim": 16, "use_bias": True, "tie_word_embeddings": True}),
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
    "hunyuan-dense": (
        "HunYuanDenseV1",
        {
            "head_dim": 16,
            "rope_parameters": ROPE | {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0},
        },
    ),
    "hunyuan-moe": (
        "HunYuanMoEV1",
        {"num_experts": 5, "moe_topk": 2, "intermediate_size": 20, "head_dim": 16},
    ),
    "olmo2": ("Olmo2", {"hidden_size": 48}),
    "olmo3": (
        "Olmo3",
        {
            "num_hidden_layers": 4,
            "sliding_window": 6,
            "attention_bias": True,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 500.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 16,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "seed-oss": ("SeedOss", {"head_dim": 16, "attention_out_bias": True, "mlp_bias": True}),
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
            },
        },
    ),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 8,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "nemotron": ("Nemotron", {"head_dim": 16, "mlp_bias": True, "intermediate_size": 33}),
    "arcee": ("Arcee", {"attention_bias": True, "mlp_bias": True}),
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
    "llama-relu2": ("Llama", {"hidden_act": "relu2", "intermediate_size": 33}),
    "bamboo": ("bamboo", {"sliding_window": None}),
    "prosparse": ("sparsellama", {"hidden_act_param": 0.05}),
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
    "bitnet": (
        "BitNet",
        {
            "hidden_size": 96,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "intermediate_size": 72,
            "hidden_act": "relu2",
            "rope_parameters": ROPE | {"rope_type": "default"},
        },
    ),
    "gpt-neox": ("GPTNeoX", {"tie_word_embeddings": False}),
    "gpt-neox-sequential": ("GPTNeoX", {"use_parallel_residual": False, "hidden_act": "gelu_new"}),
}
"""Class and options of every golden model, by its folder."""


def make_model(family: str, options: Options, seed: int) -> torch.nn.Module:
    """A model whose random weights fit into fp16 exactly."""
    unknown = UNKNOWN.get(family, ())
    common = {key: value for key, value in COMMON.items() if key not in unknown}
    torch.manual_seed(seed)
    if family in variants.BUILDERS:
        model = variants.BUILDERS[family](common | options)
    else:
        config = getattr(transformers, f"{family}Config")
        # A few families have the code of another one.
        kind = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM", None)
        kind = kind or transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config]
        model = variants.make(kind, config, common | options)
    if hasattr(model.config, "num_experts_per_tok") or options.get("enable_moe_block"):
        # The others want widths that are multiples of four.
        model.set_experts_implementation("eager")
    tied = model.config.tie_word_embeddings
    buffers = ("e_score_correction_bias", "layer_scalar")
    others = [pair for pair in model.named_buffers() if pair[0].endswith(buffers)]
    with torch.no_grad():
        for name, values in (*model.named_parameters(), *others):
            drawn = torch.randn_like(values)
            if values.dim() > 1 and "embed" not in name and "wte" not in name:
                drawn *= 1.5 / math.sqrt(values.shape[-1])
            elif values.dim() > 1 and tied:
                # Otherwise the best next token would always be the same one again.
                drawn *= 0.1
            elif values.dim() == 1:
                drawn *= 0.2
                is_norm = "norm" in name and name.endswith("weight")
                if name.endswith(("router.scale", "per_expert_scale")):
                    drawn += 1.0
                plain = not family.startswith("Gemma") or family.startswith(("Gemma3n", "Gemma4"))
                if is_norm and plain:
                    drawn += 1.0
                if name.endswith("layer_scalar"):
                    drawn += 0.8
                if "ln_" in name and name.endswith("weight"):
                    drawn += 1.0
            values.copy_(drawn.half().float())
        if family == "BitNet":
            round_projections(model)
    return model


def compute(model: torch.nn.Module, prompt: torch.Tensor) -> tuple[np.ndarray, list[int], float]:
    """Logits of the prompt, the greedy tokens, and the smallest gap between the best two."""
    tokens = prompt[None]
    gaps, greedy, first = [], [], None
    with torch.no_grad():
        for _ in range(GREEDY):
            logits = model(tokens, use_cache=False).logits[0]
            if first is None:
                first = logits.numpy().astype(np.float32)
            best = logits[-1].topk(2)
            gaps.append(float((best.values[0] - best.values[1]) / logits[-1].abs().max()))
            greedy.append(int(best.indices[0]))
            tokens = torch.cat([tokens, best.indices[:1][None]], dim=1)
    assert first is not None
    return first, greedy, min(gaps)


def write_golden(name: str) -> None:
    """Write the folder of one golden model."""
    family, options = MODELS[name]
    for seed in range(100):
        model = make_model(family, options, seed)
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(3, VOCAB, (PROMPT,), generator=generator)
        logits, greedy, gap = compute(model, prompt)
        if gap >= SMALLEST_GAP and len(set(greedy)) > 4:
            break
    else:
        raise SystemExit(f"{name}: no seed gives a clear text")
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    model.half().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config.pop("transformers_version", None)
    if family in variants.BUILDERS:
        config |= {"model_type": family, "architectures": None, **variants.SAID[family]}
        config = {key: value for key, value in config.items() if value is not None}
        file = folder / "model.safetensors"
        tensors = {variants.rename(family, key): value for key, value in load_file(file).items()}
        save_file(tensors | variants.draw_predictors(family, config, seed), file)
    if family == "BitNet":
        config["quantization_config"] = QUANTIZATION
        file = folder / "model.safetensors"
        save_file(pack_projections(load_file(file)), file)
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    np.savez_compressed(
        folder / "golden.npz", prompt=prompt.numpy(), logits=logits, greedy=np.array(greedy)
    )
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{name}: seed {seed}, gap {gap:.1e}, {size / 1024:.0f} KiB")


def main() -> None:
    """Write the golden models that are named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", choices=[[], *MODELS], metavar="NAME")
    for name in parser.parse_args().names or MODELS:
        write_golden(name)


if __name__ == "__main__":
    main()
