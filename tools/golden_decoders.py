"""Golden models whose layers are attention and a dense FFN: families, and scalings of positions."""

from __future__ import annotations

from golden_options import ROPE, Options

MODELS: dict[str, tuple[str, Options]] = {
    "nanochat": (
        "NanoChat",
        {"hidden_size": 40, "attention_bias": True, "final_logit_softcapping": 4.0},
    ),
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
            }
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
            }
        },
    ),
    "mistral-window": ("Mistral", {"sliding_window": 8, "head_dim": 32}),
    "qwen2": ("Qwen2", {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 96}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
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
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 32, "activation_function": "relu"}),
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
    "ernie4-5": ("Ernie4_5", {"head_dim": 16, "use_bias": True, "tie_word_embeddings": True}),
    "hunyuan-dense": (
        "HunYuanDenseV1",
        {
            "head_dim": 16,
            "rope_parameters": ROPE | {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0},
        },
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
    "llama-relu2": ("Llama", {"hidden_act": "relu2", "intermediate_size": 33}),
    "bamboo": ("bamboo", {"sliding_window": None}),
    "prosparse": ("sparsellama", {"hidden_act_param": 0.05}),
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
    "bloom": ("Bloom", {"num_attention_heads": 6, "hidden_size": 48}),
    "mpt": ("Mpt", {"attn_config": {"clip_qkv": 0.5}, "max_seq_len": 128}),
    "gpt-neox": ("GPTNeoX", {"tie_word_embeddings": False}),
    "gpt-neox-sequential": ("GPTNeoX", {"use_parallel_residual": False, "hidden_act": "gelu_new"}),
}
"""Class of transformers and options of a configuration by name."""
