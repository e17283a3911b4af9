"""Draws random configurations of families for `compare_families.py`: transformers' name of the
family, and options of its configuration."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Options = dict[str, Any]
Drawn = tuple[str, Options]
LAYERS = "num_hidden_layers"


def draw_shape(drawn: random.Random, *, free_head: bool = True) -> Options:
    """Sizes; the width of heads is stated, where the family allows it."""
    heads = drawn.choice([2, 3, 4, 6, 8])
    kv_heads = drawn.choice([n for n in (1, 2, 3, 4, 8) if heads % n == 0])
    head_dim = drawn.choice([4, 8, 12, 16, 20, 32])
    hidden = drawn.choice([32, 40, 48, 64, 72, 96])
    if not free_head:
        head_dim = drawn.choice([8, 12, 16, 20])
        hidden = heads * head_dim
    shape: Options = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        "intermediate_size": drawn.choice([16, 33, 48, 80, 97]),
        LAYERS: drawn.choice([1, 2, 3, 4]),
        "rms_norm_eps": drawn.choice([1e-6, 1e-5, 1e-3]),
    }
    if free_head:
        shape["head_dim"] = head_dim
    if drawn.random() < 0.3:
        shape["tie_word_embeddings"] = drawn.random() < 0.7
    return shape


def draw_rope(drawn: random.Random, *, share: bool = False, kinds: str = "dly3") -> Options:
    """Rotary positions: default, linear, YaRN or llama3; a share of heads for families that have
    one."""
    rope: Options = {"rope_theta": drawn.choice([100.0, 500.0, 10000.0]), "rope_type": "default"}
    kind = drawn.choice(kinds)
    if kind == "l":
        rope |= {"rope_type": "linear", "factor": drawn.choice([2.0, 8.0])}
    elif kind == "y":
        rope |= {
            "rope_type": "yarn",
            "factor": drawn.choice([1.0, 4.0, 16.0]),
            "original_max_position_embeddings": drawn.choice([8, 16, 32]),
        }
        if drawn.random() < 0.5:
            rope |= {"beta_fast": 8.0, "beta_slow": 0.5, "truncate": drawn.random() < 0.5}
        if drawn.random() < 0.3:
            rope |= {"mscale": 0.7, "mscale_all_dim": drawn.choice([0.7, 1.3])}
    elif kind == "3":
        rope |= {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    if share and drawn.random() < 0.6:
        rope["partial_rotary_factor"] = drawn.choice([0.25, 0.5, 1.0])
    return {"rope_parameters": rope}


def flip(drawn: random.Random, *names: str) -> Options:
    """True or false for each, or nothing."""
    return {name: drawn.random() < 0.5 for name in names if drawn.random() < 0.7}


def draw_kinds(drawn: random.Random, options: Options) -> Options:
    """A window, and which layers have it."""
    window: Options = {"sliding_window": drawn.choice([3, 6, 11])}
    if drawn.random() < 0.6:
        window["layer_types"] = drawn.choices(
            ["sliding_attention", "full_attention"], k=options[LAYERS]
        )
    return window


def draw_experts(drawn: random.Random, count: str, active: str, **others: Any) -> Options:
    """How many experts there are, and how many a token has."""
    experts = drawn.choice([4, 5, 8, 12])
    return {count: experts, active: drawn.choice([1, 2, 3, 4]), **others}


def draw_groups(drawn: random.Random, options: Options) -> Options:
    """Groups that the experts of a family fall into."""
    groups = drawn.choice([1, 2, 4])
    experts = groups * drawn.choice([2, 3, 4])
    active_groups = drawn.randint(1, groups)
    most = active_groups * (experts // groups)
    return options | {
        "n_routed_experts": experts,
        "num_experts_per_tok": drawn.randint(1, min(4, most)),
        "n_group": groups,
        "topk_group": active_groups,
        "n_shared_experts": drawn.choice([1, 2]),
        "moe_intermediate_size": drawn.choice([8, 13, 24, 36]),
        "routed_scaling_factor": drawn.choice([1.0, 1.8, 2.5]),
        **flip(drawn, "norm_topk_prob"),
    }


def draw_latent(drawn: random.Random) -> Options:
    """A shape with latent attention."""
    shape = draw_shape(drawn, free_head=False)
    shape["num_key_value_heads"] = shape["num_attention_heads"]
    shape["hidden_size"] = shape["num_attention_heads"] * drawn.choice([8, 12, 20])
    return shape | {
        "q_lora_rank": drawn.choice([None, 16, 24, 40]),
        "kv_lora_rank": drawn.choice([8, 16, 20, 48]),
        "qk_nope_head_dim": drawn.choice([8, 12, 16, 40]),
        "qk_rope_head_dim": drawn.choice([4, 8, 12, 16]),
        "v_head_dim": drawn.choice([8, 12, 16, 24]),
        **flip(drawn, "attention_bias"),
    }


def draw_gpt_oss(drawn: random.Random) -> Drawn:
    """gpt-oss."""
    options = draw_shape(drawn)
    options |= draw_experts(drawn, "num_local_experts", "num_experts_per_tok")
    options |= draw_kinds(drawn, options) | draw_rope(drawn, kinds="yyd") | flip(drawn)
    options |= {"attention_bias": drawn.random() < 0.8}
    if drawn.random() < 0.5:
        options |= {"swiglu_limit": drawn.choice([0.5, 2.0]), "swiglu_alpha": 1.3}
    return "GptOss", options


def draw_deepseek_v2(drawn: random.Random) -> Drawn:
    """DeepSeek V2."""
    options = draw_groups(drawn, draw_latent(drawn))
    options |= draw_rope(drawn, kinds="ddy")
    options["topk_method"] = drawn.choice(["greedy", "group_limited_greedy"])
    options["first_k_dense_replace"] = drawn.choice([0, 1, 2])
    return "DeepseekV2", options


def draw_deepseek_v3(drawn: random.Random) -> Drawn:
    """DeepSeek V3."""
    options = draw_groups(drawn, draw_latent(drawn))
    options |= draw_rope(drawn, kinds="ddy") | flip(drawn, "rope_interleave")
    options["first_k_dense_replace"] = drawn.choice([0, 1, 2])
    return "DeepseekV3", options


def draw_glm4_moe_lite(drawn: random.Random) -> Drawn:
    """GLM 4.7 Flash."""
    options = draw_groups(drawn, draw_latent(drawn))
    options |= draw_rope(drawn, kinds="ddy") | flip(drawn, "rope_interleave")
    if drawn.random() < 0.5:
        options["mlp_layer_types"] = drawn.choices(["dense", "sparse"], k=options[LAYERS])
    return "Glm4MoeLite", options


def draw_glm4_moe(drawn: random.Random) -> Drawn:
    """GLM 4.5."""
    options = draw_groups(drawn, draw_shape(drawn))
    options["head_dim"] = drawn.choice([8, 16, 32])
    options |= draw_rope(drawn, share=True, kinds="dd") | flip(drawn, "use_qk_norm")
    options |= flip(drawn, "attention_bias") | {"first_k_dense_replace": drawn.choice([0, 1, 2])}
    return "Glm4Moe", options


def draw_dots1(drawn: random.Random) -> Drawn:
    """dots.1."""
    options = draw_groups(drawn, draw_shape(drawn)) | draw_rope(drawn)
    options |= draw_kinds(drawn, options) | flip(drawn, "attention_bias")
    return "Dots1", options | {"first_k_dense_replace": drawn.choice([0, 1, 2])}


def draw_minimax_m2(drawn: random.Random) -> Drawn:
    """MiniMax M2."""
    options = draw_shape(drawn)
    options["head_dim"] = drawn.choice([8, 16, 32])
    options |= draw_experts(drawn, "num_local_experts", "num_experts_per_tok")
    return "MiniMaxM2", options | draw_rope(drawn, share=True, kinds="dd")


def draw_ernie(drawn: random.Random) -> Drawn:
    """ERNIE 4.5."""
    options = draw_shape(drawn) | draw_rope(drawn, kinds="dd") | flip(drawn, "use_bias")
    return "Ernie4_5", options


def draw_ernie_moe(drawn: random.Random) -> Drawn:
    """ERNIE 4.5 with experts."""
    options = draw_shape(drawn, free_head=False) | draw_rope(drawn, kinds="dd")
    options |= draw_experts(drawn, "moe_num_experts", "moe_k")
    options |= {
        "moe_intermediate_size": drawn.choice([8, 13, 24]),
        "moe_num_shared_experts": drawn.choice([0, 1, 2]),
        "moe_layer_start_index": drawn.choice([0, 1, 2]),
        "moe_layer_interval": drawn.choice([1, 1, 2]),
    }
    return "Ernie4_5_Moe", options


def draw_olmoe(drawn: random.Random) -> Drawn:
    """OLMoE."""
    options = draw_shape(drawn, free_head=False) | draw_rope(drawn)
    options |= draw_experts(drawn, "num_experts", "num_experts_per_tok")
    options |= flip(drawn, "norm_topk_prob", "attention_bias")
    return "Olmoe", options | ({"clip_qkv": 0.8} if drawn.random() < 0.3 else {})


def draw_aria(drawn: random.Random) -> Drawn:
    """The text of Aria."""
    options = draw_shape(drawn, free_head=False) | draw_rope(drawn)
    experts = drawn.choice([2, 5, 8])
    options |= {
        "moe_num_experts": experts,
        "moe_topk": drawn.randint(1, min(3, experts)),
        "moe_num_shared_experts": drawn.choice([1, 2]),
    }
    return "AriaText", options | flip(drawn, "attention_bias")


def draw_phimoe(drawn: random.Random) -> Drawn:
    """Phi-3.5-MoE."""
    options = draw_shape(drawn) | draw_rope(drawn, kinds="dd")
    options |= {"num_local_experts": drawn.choice([4, 5, 8])}
    options |= flip(drawn, "attention_bias", "lm_head_bias")
    if drawn.random() < 0.4:
        options |= {"router_jitter_noise": 0.2, "sliding_window": 7}
    return "Phimoe", options


def draw_hunyuan(drawn: random.Random) -> Drawn:
    """Hunyuan."""
    options = draw_shape(drawn) | draw_rope(drawn, kinds="dl") | flip(drawn, "attention_bias")
    if drawn.random() < 0.4:
        options["rope_parameters"] = {
            "rope_type": "dynamic",
            "rope_theta": 500.0,
            "alpha": 10.0,
            "factor": 1.0,
        }
    return "HunYuanDenseV1", options


def draw_hunyuan_moe(drawn: random.Random) -> Drawn:
    """Hunyuan with experts."""
    _, options = draw_hunyuan(drawn)
    return "HunYuanMoEV1", options | draw_experts(drawn, "num_experts", "moe_topk")


def draw_olmo2(drawn: random.Random) -> Drawn:
    """OLMo 2."""
    options = draw_shape(drawn, free_head=False) | draw_rope(drawn)
    return "Olmo2", options | flip(drawn, "attention_bias")


def draw_olmo3(drawn: random.Random) -> Drawn:
    """OLMo 3."""
    options = draw_shape(drawn, free_head=False) | flip(drawn, "attention_bias")
    options |= draw_kinds(drawn, options)
    full = draw_rope(drawn)["rope_parameters"]
    local = draw_rope(drawn, kinds="d")["rope_parameters"]
    return "Olmo3", options | {
        "rope_parameters": {"full_attention": full, "sliding_attention": local}
    }


def draw_seed_oss(drawn: random.Random) -> Drawn:
    """Seed-OSS."""
    options = draw_shape(drawn) | draw_rope(drawn)
    return "SeedOss", options | flip(drawn, "attention_bias", "attention_out_bias", "mlp_bias")


def draw_ministral3(drawn: random.Random) -> Drawn:
    """Ministral 3."""
    options = draw_shape(drawn) | draw_rope(drawn, kinds="y")
    options["rope_parameters"] |= {"llama_4_scaling_beta": drawn.choice([0.1, 0.5])}
    return "Ministral3", options | ({"sliding_window": 7} if drawn.random() < 0.4 else {})


def draw_nemotron(drawn: random.Random) -> Drawn:
    """Nemotron."""
    options = draw_shape(drawn) | draw_rope(drawn, share=True, kinds="dd")
    options["head_dim"] = drawn.choice([8, 16, 32])
    options["norm_eps"] = options.pop("rms_norm_eps")
    return "Nemotron", options | flip(drawn, "attention_bias", "mlp_bias")


def draw_arcee(drawn: random.Random) -> Drawn:
    """Arcee."""
    options = draw_shape(drawn) | draw_rope(drawn)
    return "Arcee", options | flip(drawn, "attention_bias", "mlp_bias")


def draw_bitnet(drawn: random.Random) -> Drawn:
    """BitNet; the norm of what heads mix has the model's width."""
    options = draw_shape(drawn, free_head=False) | draw_rope(drawn)
    return "BitNet", options | flip(drawn, "attention_bias")


def draw_granite_moe(drawn: random.Random) -> Drawn:
    """Granite 3 with experts."""
    options = draw_shape(drawn, free_head=False) | draw_rope(drawn)
    options |= draw_experts(drawn, "num_local_experts", "num_experts_per_tok")
    options |= {
        "embedding_multiplier": drawn.choice([1.0, 3.0]),
        "residual_multiplier": drawn.choice([1.0, 0.3]),
        "attention_multiplier": drawn.choice([0.1, 0.3]),
        "logits_scaling": drawn.choice([1.0, 4.0]),
    }
    return "GraniteMoe", options | flip(drawn, "attention_bias")


def draw_granite_moe_shared(drawn: random.Random) -> Drawn:
    """Granite with shared experts."""
    _, options = draw_granite_moe(drawn)
    return "GraniteMoeShared", options | {"shared_intermediate_size": drawn.choice([0, 16, 50, 80])}


def draw_qwen3_moe(drawn: random.Random) -> Drawn:
    """Qwen3 with experts."""
    options = draw_shape(drawn) | draw_rope(drawn) | flip(drawn, "norm_topk_prob")
    options |= draw_experts(drawn, "num_experts", "num_experts_per_tok")
    options |= {"moe_intermediate_size": drawn.choice([8, 13, 24])} | flip(drawn, "attention_bias")
    options |= {"decoder_sparse_step": drawn.choice([1, 1, 2])}
    return "Qwen3Moe", options | ({"mlp_only_layers": [0]} if drawn.random() < 0.3 else {})


def draw_qwen2_moe(drawn: random.Random) -> Drawn:
    """Qwen2 with experts."""
    options = draw_shape(drawn, free_head=False) | draw_rope(drawn) | flip(drawn, "norm_topk_prob")
    options |= draw_experts(drawn, "num_experts", "num_experts_per_tok") | flip(drawn, "qkv_bias")
    options |= {"moe_intermediate_size": drawn.choice([8, 13, 24])}
    return "Qwen2Moe", options | {"shared_expert_intermediate_size": drawn.choice([16, 24, 50])}


def draw_gemma4(drawn: random.Random) -> Drawn:
    """Gemma 4, with and without experts."""
    options = draw_shape(drawn)
    options |= draw_kinds(drawn, options)
    if "layer_types" in options:
        options["layer_types"][-1] = "full_attention"
    shares = drawn.random() < 0.5
    options |= {
        "hidden_size_per_layer_input": 0,
        "head_dim": drawn.choice([8, 12, 32]),
        "global_head_dim": drawn.choice([16, 20, 40]),
        "attention_k_eq_v": shares,
        "attention_bias": not shares and drawn.random() < 0.3,
        "num_global_key_value_heads": drawn.choice([None, 1]),
        "final_logit_softcapping": drawn.choice([None, 5.0]),
        "tie_word_embeddings": drawn.random() < 0.8,
    }
    if drawn.random() < 0.6:
        experts = drawn.choice([4, 5, 7])
        options |= {
            "enable_moe_block": True,
            "num_experts": experts,
            "top_k_experts": drawn.randint(1, 3),
            "moe_intermediate_size": drawn.choice([12, 19, 32]),
        }
    if drawn.random() < 0.7:
        share = drawn.choice([0.25, 0.5, 1.0])
        turns = {"rope_type": "proportional", "partial_rotary_factor": share}
        options["rope_parameters"] = {
            "full_attention": turns | {"rope_theta": 4000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        }
    return "Gemma4Text", options


def draw_unified_gemma4(drawn: random.Random) -> Drawn:
    """Gemma 4 12B, which has neither experts nor embeddings of layers."""
    _, options = draw_gemma4(drawn)
    for key in ("hidden_size_per_layer_input", "enable_moe_block", "num_experts", "top_k_experts"):
        options.pop(key, None)
    options.pop("moe_intermediate_size", None)
    return "Gemma4UnifiedText", options


def draw_small_gemma4(drawn: random.Random) -> Drawn:
    """Gemma 4 with embeddings of layers, and last layers that share keys and values."""
    kind, options = draw_gemma4(drawn)
    # The first of two layers, and the last, have no window; layers that share need one of each.
    kinds = ["full_attention", "sliding_attention"] * drawn.randint(1, 2)
    shared = drawn.randint(0, 3)
    later = [drawn.choice(["full_attention", "sliding_attention"]) for _ in range(shared)]
    later = [*later[:-1], "full_attention"] if later else ["full_attention"]
    for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        options.pop(key, None)
    return kind, options | {
        "enable_moe_block": False,
        "layer_types": [*kinds, *later],
        "num_hidden_layers": len(kinds) + len(later),
        "sliding_window": drawn.choice([3, 6, 40]),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": drawn.random() < 0.5,
        "hidden_size_per_layer_input": drawn.choice([4, 7, 16, 32, 40]),
        "vocab_size_per_layer_input": 96,  # all tokens of golden models
    }


def draw_gemma3n(drawn: random.Random) -> Drawn:
    """Gemma 3n: residual streams, LAuReL, and cutoffs of gates on both sides of their mean."""
    kinds = ["full_attention", "sliding_attention"] * drawn.randint(1, 2)
    shared = drawn.randint(0, 3)
    kinds += [drawn.choice(["full_attention", "sliding_attention"]) for _ in range(shared)]
    heads = drawn.choice([1, 2, 4])
    return "Gemma3nText", {
        "hidden_size": drawn.choice([32, 40, 48, 64]),
        "intermediate_size": drawn.choice([20, 44, 64, 100]),
        "num_attention_heads": heads,
        "num_key_value_heads": drawn.choice([n for n in (1, 2, 4) if heads % n == 0]),
        "head_dim": drawn.choice([8, 12, 16, 32]),
        "layer_types": kinds,
        "num_hidden_layers": len(kinds),
        "sliding_window": drawn.choice([3, 6, 40]),
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": drawn.choice([4, 7, 16, 32, 40]),
        "vocab_size_per_layer_input": 96,  # all tokens of golden models
        "altup_num_inputs": drawn.choice([2, 3, 4, 6]),
        "altup_correct_scale": drawn.random() < 0.7,
        "laurel_rank": drawn.choice([4, 10, 32, 64]),
        "activation_sparsity_pattern": [drawn.choice([0.0, 0.3, 0.7, 0.95]) for _ in kinds],
        "final_logit_softcapping": drawn.choice([3.0, 30.0]),
    }


DRAWERS: dict[str, Callable[[random.Random], Drawn]] = {
    "bitnet": draw_bitnet,
    "gemma3n": draw_gemma3n,
    "gemma4": draw_gemma4,
    "gemma4_small": draw_small_gemma4,
    "gemma4_unified": draw_unified_gemma4,
    "gpt_oss": draw_gpt_oss,
    "deepseek_v2": draw_deepseek_v2,
    "deepseek_v3": draw_deepseek_v3,
    "glm4_moe_lite": draw_glm4_moe_lite,
    "glm4_moe": draw_glm4_moe,
    "dots1": draw_dots1,
    "minimax_m2": draw_minimax_m2,
    "ernie4_5": draw_ernie,
    "ernie4_5_moe": draw_ernie_moe,
    "olmoe": draw_olmoe,
    "aria_text": draw_aria,
    "phimoe": draw_phimoe,
    "hunyuan_v1_dense": draw_hunyuan,
    "hunyuan_v1_moe": draw_hunyuan_moe,
    "olmo2": draw_olmo2,
    "olmo3": draw_olmo3,
    "seed_oss": draw_seed_oss,
    "ministral3": draw_ministral3,
    "nemotron": draw_nemotron,
    "arcee": draw_arcee,
    "granitemoe": draw_granite_moe,
    "granitemoeshared": draw_granite_moe_shared,
    "qwen2_moe": draw_qwen2_moe,
    "qwen3_moe": draw_qwen3_moe,
}
"""What draws a family's configurations, by ``model_type``."""
