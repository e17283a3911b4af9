"""Draws random configurations of further families for `compare_families.py`: transformers' name of
the family, and options of its configuration."""

from __future__ import annotations

import random
from collections.abc import Callable

from drawn_configurations import (
    LAYERS,
    Drawn,
    Options,
    draw_experts,
    draw_groups,
    draw_kinds,
    draw_latent,
    draw_rope,
    draw_shape,
    flip,
)


def draw_ministral(drawn: random.Random) -> Drawn:
    """Ministral."""
    options = draw_shape(drawn) | draw_rope(drawn)
    return "Ministral", options | draw_kinds(drawn, options)


def draw_divided_shape(drawn: random.Random) -> Options:
    """Sizes of families that want a width that heads divide."""
    options = draw_shape(drawn)
    return options | {"hidden_size": options["num_attention_heads"] * drawn.choice([8, 12])}


def draw_cwm(drawn: random.Random) -> Drawn:
    """CWM."""
    options = draw_divided_shape(drawn) | draw_rope(drawn) | flip(drawn, "mlp_bias")
    return "Cwm", options | draw_kinds(drawn, options)


def draw_llama(drawn: random.Random) -> Options:
    """What has Llama's code."""
    return draw_divided_shape(drawn) | draw_rope(drawn)


def draw_internlm3(drawn: random.Random) -> Drawn:
    """InternLM 3."""
    bias = drawn.random() < 0.5
    return "InternLM3", draw_llama(drawn) | {"attention_bias": bias, "mlp_bias": bias}


def draw_iquestcoder(drawn: random.Random) -> Drawn:
    """IQuest-Coder."""
    return "IQuestCoder", draw_llama(drawn) | flip(drawn, "attention_bias", "mlp_bias")


def draw_helium(drawn: random.Random) -> Drawn:
    """Helium, whose output projection is a square."""
    options = draw_shape(drawn, free_head=False) | draw_rope(drawn)
    options["head_dim"] = options["hidden_size"] // options["num_attention_heads"]
    return "Helium", options | flip(drawn, "attention_bias", "mlp_bias")


def draw_multipliers(drawn: random.Random) -> Options:
    """Granite's factors."""
    return {
        "embedding_multiplier": drawn.choice([1.0, 3.0]),
        "residual_multiplier": drawn.choice([1.0, 0.3]),
        "attention_multiplier": drawn.choice([0.1, 0.3]),
        "logits_scaling": drawn.choice([1.0, 4.0]),
    }


def draw_hyperclovax(drawn: random.Random) -> Drawn:
    """HyperCLOVA X."""
    options = draw_shape(drawn, free_head=False) | draw_rope(drawn) | draw_multipliers(drawn)
    if drawn.random() < 0.4:
        options["attention_multiplier"] = None
    return "HyperCLOVAX", options | flip(drawn, "attention_bias", "mlp_bias", "use_post_norm")


def draw_vaultgemma(drawn: random.Random) -> Drawn:
    """VaultGemma."""
    options = draw_divided_shape(drawn) | draw_rope(drawn, kinds="d")
    options |= flip(drawn, "attention_bias") | {
        "query_pre_attn_scalar": drawn.choice([8, 20]),
        "attn_logit_softcapping": drawn.choice([None, 20.0]),
        "final_logit_softcapping": drawn.choice([None, 10.0]),
    }
    return "VaultGemma", options | draw_kinds(drawn, options)


def draw_jais2(drawn: random.Random) -> Drawn:
    """Jais 2."""
    options = draw_divided_shape(drawn) | draw_rope(drawn)
    options["layer_norm_eps"] = options.pop("rms_norm_eps")
    return "Jais2", options | flip(drawn, "attention_bias", "mlp_bias")


def draw_exaone4(drawn: random.Random) -> Drawn:
    """EXAONE 4."""
    options = draw_shape(drawn) | draw_rope(drawn)
    options |= draw_kinds(drawn, options)
    if drawn.random() < 0.3:
        options |= {"sliding_window": None, "layer_types": ["full_attention"] * options[LAYERS]}
    elif drawn.random() < 0.4:
        options |= {"sliding_window_pattern": 2}
    return "Exaone4", options


def draw_dense_layers(drawn: random.Random, options: Options) -> Options:
    """Which layers are no mixture."""
    if drawn.random() < 0.5:
        return {}
    return {"mlp_layer_types": drawn.choices(["dense", "sparse"], k=options[LAYERS])}


def draw_exaone_moe(drawn: random.Random) -> Drawn:
    """K-EXAONE."""
    options = draw_groups(drawn, draw_shape(drawn)) | draw_rope(drawn)
    options["num_experts"] = options.pop("n_routed_experts")
    options["num_shared_experts"] = options.pop("n_shared_experts")
    options |= draw_dense_layers(drawn, options)
    return "ExaoneMoe", options | draw_kinds(drawn, options)


def draw_solar_open(drawn: random.Random) -> Drawn:
    """Solar Open."""
    options = draw_groups(drawn, draw_shape(drawn)) | draw_rope(drawn)
    options.pop("intermediate_size")
    return "SolarOpen", options | flip(drawn, "attention_bias")


def draw_flint(drawn: random.Random) -> Drawn:
    """Flint."""
    options = draw_shape(drawn) | draw_rope(drawn) | {"sliding_window": drawn.choice([3, 6, 11])}
    options |= draw_experts(drawn, "num_experts", "num_experts_per_tok")
    size = drawn.choice([8, 13, 24])
    options |= {
        "moe_intermediate_size": size,
        "shared_expert_intermediate_size": drawn.choice([size, 2 * size, size + 3]),
        "mlp_only_layers": drawn.choice([None, [], [1]]),
    }
    if drawn.random() < 0.5:
        kinds = ["sliding_attention", "full_attention"]
        options["layer_types"] = drawn.choices(kinds, k=options[LAYERS])
    return "Flint", options | flip(drawn, "norm_topk_prob", "attention_bias")


def draw_kolibri(drawn: random.Random) -> Drawn:
    """Kolibri."""
    _, options = draw_flint(drawn)
    for key in ("mlp_only_layers", "intermediate_size", "attention_bias"):
        options.pop(key, None)
    return "Kolibri1", options


def draw_laguna(drawn: random.Random) -> Drawn:
    """Laguna."""
    _, options = draw_flint(drawn)
    kv_heads, layers = options["num_key_value_heads"], options[LAYERS]
    for key in ("mlp_only_layers", "norm_topk_prob", "rope_parameters"):
        options.pop(key, None)
    options |= draw_dense_layers(drawn, options) | {
        "moe_routed_scaling_factor": drawn.choice([1.0, 2.5]),
        "gating": drawn.choice([True, "per-head", "per-element"]),
    }
    if drawn.random() < 0.7:
        counts = [kv_heads * drawn.choice([1, 2, 3]) for _ in range(2)]
        options["num_attention_heads_per_layer"] = drawn.choices(counts, k=layers)
    if drawn.random() < 0.7:
        options["rope_parameters"] = {
            kind: draw_rope(drawn, share=True)["rope_parameters"]
            for kind in ("full_attention", "sliding_attention")
        }
    return "Laguna", options


def draw_nanochat(drawn: random.Random) -> Drawn:
    """nanochat."""
    options = draw_shape(drawn, free_head=drawn.random() < 0.5) | draw_rope(drawn)
    options["final_logit_softcapping"] = drawn.choice([None, 3.0, 15.0])
    return "NanoChat", options | flip(drawn, "attention_bias")


def draw_flex_olmo(drawn: random.Random) -> Drawn:
    """FlexOlmo."""
    options = draw_shape(drawn, free_head=False) | draw_rope(drawn)
    options |= draw_experts(drawn, "num_experts", "num_experts_per_tok")
    return "FlexOlmo", options | flip(drawn, "norm_topk_prob", "attention_bias")


def draw_hunyuan3(drawn: random.Random) -> Drawn:
    """Hunyuan 3."""
    options = draw_shape(drawn) | draw_rope(drawn) | flip(drawn, "attention_bias")
    options |= draw_experts(drawn, "num_experts", "num_experts_per_tok")
    options |= {
        "num_shared_experts": drawn.choice([1, 2]),
        "moe_intermediate_size": drawn.choice([8, 13, 24]),
        "router_scaling_factor": drawn.choice([1.0, 2.8]),
    }
    return "HYV3", options | draw_dense_layers(drawn, options)


def draw_afmoe(drawn: random.Random) -> Drawn:
    """AFMoE."""
    options = draw_shape(drawn) | draw_rope(drawn) | flip(drawn, "attention_bias", "mup_enabled")
    options |= draw_experts(drawn, "num_experts", "num_experts_per_tok")
    options |= {
        "num_shared_experts": drawn.choice([1, 2]),
        "num_dense_layers": drawn.choice([0, 1, 2]),
        "moe_intermediate_size": drawn.choice([8, 13, 24]),
        "route_scale": drawn.choice([1.0, 2.8]),
        "global_attn_every_n_layers": drawn.choice([2, 4]),
    }
    return "Afmoe", options | draw_kinds(drawn, options)


def draw_mellum(drawn: random.Random) -> Drawn:
    """Mellum."""
    options = draw_shape(drawn) | flip(drawn, "attention_bias", "norm_topk_prob")
    options |= draw_experts(drawn, "num_experts", "num_experts_per_tok")
    options |= {"moe_intermediate_size": drawn.choice([8, 13, 24])}
    full, local = (draw_rope(drawn)["rope_parameters"] for _ in range(2))
    options["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
    options |= draw_dense_layers(drawn, options)
    return "Mellum", options | draw_kinds(drawn, options)


def draw_bases(drawn: random.Random, options: Options) -> Options:
    """Bases of positions of each layer."""
    if drawn.random() < 0.4:
        return {}
    chosen = drawn.sample([0, 100.0, 5000.0], 2)
    return {"layer_rope_theta": drawn.choices(chosen, k=options[LAYERS])}


def draw_granite_swa(drawn: random.Random) -> Drawn:
    """Granite with windows."""
    options = draw_shape(drawn, free_head=False) | draw_rope(drawn) | draw_multipliers(drawn)
    options |= flip(drawn, "attention_bias", "mlp_bias") | draw_kinds(drawn, options)
    return "GraniteSWA", options | draw_bases(drawn, options)


def draw_granite_moe_swa(drawn: random.Random) -> Drawn:
    """Granite with experts and windows."""
    options = draw_shape(drawn, free_head=False) | draw_rope(drawn) | draw_multipliers(drawn)
    options |= draw_experts(drawn, "num_local_experts", "num_experts_per_tok")
    options |= draw_kinds(drawn, options) | draw_bases(drawn, options)
    options |= flip(drawn, "attention_bias")
    return "GraniteMoeSWA", options | {"shared_intermediate_size": drawn.choice([0, 16, 50])}


def draw_youtu(drawn: random.Random) -> Drawn:
    """Youtu."""
    options = draw_latent(drawn) | draw_rope(drawn, kinds="ddy")
    return "Youtu", options | flip(drawn, "rope_interleave")


def draw_mistral4(drawn: random.Random) -> Drawn:
    """Mistral Small 4."""
    options = draw_groups(drawn, draw_latent(drawn)) | draw_rope(drawn, kinds="y")
    options["rope_parameters"] |= {"llama_4_scaling_beta": drawn.choice([0.1, 0.5])}
    options |= flip(drawn, "rope_interleave")
    return "Mistral4", options | {"first_k_dense_replace": drawn.choice([0, 1, 2])}


def draw_indexed(drawn: random.Random) -> Options:
    """Latent attention with an index that chooses every key of so short a context."""
    options = draw_groups(drawn, draw_latent(drawn)) | draw_rope(drawn, kinds="ddy")
    options |= {
        "q_lora_rank": drawn.choice([16, 24]),
        "index_topk": 64,
        "index_head_dim": 24,
        "index_n_heads": 2,
        "first_k_dense_replace": drawn.choice([0, 1, 2]),
    }
    return options | draw_dense_layers(drawn, options)


def draw_deepseek_v32(drawn: random.Random) -> Drawn:
    """DeepSeek V3.2."""
    return "DeepseekV32", draw_indexed(drawn)


def draw_glm_moe_dsa(drawn: random.Random) -> Drawn:
    """GLM 5."""
    return "GlmMoeDsa", draw_indexed(drawn) | {"index_topk_freq": drawn.choice([1, 2])}


def draw_minicpm3(drawn: random.Random) -> Drawn:
    """MiniCPM 3."""
    options = draw_latent(drawn) | draw_rope(drawn, kinds="ddl") | flip(drawn, "mlp_bias")
    return "MiniCPM3", options | {
        "scale_emb": drawn.choice([1, 12]),
        "scale_depth": drawn.choice([None, 1.4]),
        "dim_model_base": drawn.choice([None, 16]),
    }


def draw_cohere2_moe(drawn: random.Random) -> Drawn:
    """Cohere 2 with experts."""
    options = draw_divided_shape(drawn) | draw_rope(drawn, kinds="dl")
    options |= flip(drawn, "attention_bias", "norm_topk_prob")
    options |= draw_experts(drawn, "num_experts", "num_experts_per_tok")
    options |= {
        "num_shared_experts": drawn.choice([0, 1, 2]),
        "shared_expert_combination_strategy": drawn.choice(["average", "sum"]),
        "expert_selection_fn": drawn.choice(["softmax", "sigmoid"]),
        "prefix_dense_intermediate_size": drawn.choice([40, 90]),
        "rms_norm_eps": drawn.choice([None, 1e-6, 1e-3]),
    }
    options |= draw_dense_layers(drawn, options)
    return "Cohere2Moe", options | draw_kinds(drawn, options)


def draw_gpt_bigcode(drawn: random.Random) -> Drawn:
    """GPT-BigCode."""
    heads = drawn.choice([2, 3, 4])
    return "GPTBigCode", {
        "n_head": heads,
        "n_embd": heads * drawn.choice([8, 12, 20]),
        "n_inner": drawn.choice([33, 80]),
        "n_layer": drawn.choice([1, 2, 3]),
        **flip(drawn, "multi_query", "scale_attn_weights", "tie_word_embeddings"),
    }


def draw_olmo(drawn: random.Random) -> Drawn:
    """The first OLMo."""
    options = draw_shape(drawn, free_head=False) | draw_rope(drawn)
    options |= flip(drawn, "attention_bias") | {"clip_qkv": drawn.choice([None, 0.8])}
    options.pop("rms_norm_eps")
    return "Olmo", options


def draw_llama4(drawn: random.Random) -> Drawn:
    """Llama 4."""
    options = draw_shape(drawn) | draw_rope(drawn)
    layers, experts = options["num_hidden_layers"], drawn.randint(2, 7)
    return "Llama4Text", options | flip(drawn, "attention_bias", "use_qk_norm") | {
        "head_dim": drawn.choice([8, 12, 16]),
        "intermediate_size": drawn.choice([8, 20, 24]),
        "intermediate_size_mlp": drawn.choice([8, 33, 48]),
        "num_local_experts": experts,
        "num_experts_per_tok": drawn.randint(1, min(3, experts)),
        "interleave_moe_layer_step": drawn.choice([1, 1, 2]),
        "no_rope_layers": [drawn.choice([1, 1, 0]) for _ in range(layers)],
        "attention_chunk_size": drawn.choice([3, 8, 64]),
        "attn_temperature_tuning": drawn.random() < 0.7,
        "floor_scale": drawn.choice([4, 9]),
        "attn_scale": drawn.choice([0.1, 0.6]),
    }


def draw_mimo(drawn: random.Random) -> Drawn:
    """MiMo V2 Flash, whose layers with a window have twice as many keys."""
    options = draw_groups(drawn, draw_shape(drawn))
    layers, heads = options[LAYERS], drawn.choice([2, 4])
    options.pop("n_shared_experts")
    options |= draw_kinds(drawn, options)
    options["rope_parameters"] = {
        f"{kind}_attention": {
            "rope_type": "default",
            "rope_theta": drawn.choice([100.0, 10000.0]),
            "partial_rotary_factor": drawn.choice([0.334, 0.5, 1.0]),
        }
        for kind in ("full", "sliding")
    }
    return "MiMoV2Flash", options | flip(drawn, "attention_bias") | {
        "num_key_value_heads": heads,
        "num_attention_heads": 2 * heads * drawn.choice([1, 2]),
        "head_dim": drawn.choice([12, 24]),
        "v_head_dim": drawn.choice([4, 8, 12]),
        "attention_value_scale": drawn.choice([None, 0.707]),
        "mlp_layer_types": drawn.choices(["dense", "sparse", "sparse"], k=layers),
    }


def draw_minimax_m3(drawn: random.Random) -> Drawn:
    """The text of MiniMax M3, whose index may choose fewer blocks than there are."""
    options = draw_shape(drawn) | draw_rope(drawn, share=True, kinds="dd")
    layers = options[LAYERS]
    options |= draw_experts(drawn, "num_local_experts", "num_experts_per_tok")
    options["intermediate_size"] = drawn.choice([8, 13, 24])
    options["head_dim"] = drawn.choice([8, 16])
    return "MiniMaxM3VLText", options | {
        "dense_intermediate_size": drawn.choice([8, 20, 33]),
        "shared_intermediate_size": drawn.choice([8, 13, 30]),
        "swiglu_limit": drawn.choice([0.3, 7.0]),
        "swiglu_alpha": drawn.choice([1.0, 1.702]),
        "routed_scaling_factor": drawn.choice([1.0, 2.0]),
        "mlp_layer_types": drawn.choices(["dense", "sparse", "sparse"], k=layers),
        "layer_types": drawn.choices(["full_attention", "minimax_m3_sparse"], k=layers),
        "index_n_heads": options["num_key_value_heads"],
        "index_head_dim": options["head_dim"],
        "index_block_size": 8,
        "index_topk_blocks": drawn.choice([8, 16]),
    }


FURTHER_DRAWERS: dict[str, Callable[[random.Random], Drawn]] = {
    "afmoe": draw_afmoe,
    "cohere2_moe": draw_cohere2_moe,
    "cwm": draw_cwm,
    "deepseek_v32": draw_deepseek_v32,
    "exaone4": draw_exaone4,
    "exaone_moe": draw_exaone_moe,
    "flex_olmo": draw_flex_olmo,
    "flint": draw_flint,
    "glm_moe_dsa": draw_glm_moe_dsa,
    "gpt_bigcode": draw_gpt_bigcode,
    "granite_swa": draw_granite_swa,
    "granitemoe_swa": draw_granite_moe_swa,
    "helium": draw_helium,
    "hy_v3": draw_hunyuan3,
    "hyperclovax": draw_hyperclovax,
    "internlm3": draw_internlm3,
    "iquestcoder": draw_iquestcoder,
    "jais2": draw_jais2,
    "kolibri1": draw_kolibri,
    "laguna": draw_laguna,
    "llama4_text": draw_llama4,
    "mellum": draw_mellum,
    "mimo_v2_flash": draw_mimo,
    "minicpm3": draw_minicpm3,
    "minimax_m3_vl_text": draw_minimax_m3,
    "ministral": draw_ministral,
    "mistral4": draw_mistral4,
    "nanochat": draw_nanochat,
    "olmo": draw_olmo,
    "solar_open": draw_solar_open,
    "vaultgemma": draw_vaultgemma,
    "youtu": draw_youtu,
}
"""What draws a family's configurations, by ``model_type``."""
