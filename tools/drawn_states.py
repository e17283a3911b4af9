"""Draws random configurations of families whose layers have states, for `compare_families.py`:
transformers' name of the family, and options of its configuration."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from drawn_configurations import Drawn, Options


def draw_common(draw: random.Random) -> Options:
    """Sizes that all families have."""
    kv_heads = draw.choice([1, 2, 3])
    layers = draw.randint(1, 5)
    heads = kv_heads * draw.choice([1, 2, 3])
    return {
        "hidden_size": heads * draw.choice([4, 8, 12, 16]) * 2,
        "intermediate_size": draw.randint(5, 90),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": draw.random() < 0.5,
    }


def draw_kinds(draw: random.Random, layers: int, state: str, attention: str) -> list[str]:
    """Kinds of layers in any order."""
    return [draw.choice([state, state, attention]) for _ in range(layers)]


def draw_qwen(draw: random.Random) -> Options:
    """Qwen's attention and DeltaNet."""
    options = draw_common(draw)
    key_heads = draw.choice([1, 2, 3])
    options |= {
        "head_dim": draw.choice([8, 16, 24, 32]),
        "attention_bias": draw.random() < 0.3,
        "rms_norm_eps": draw.choice([1e-6, 1e-5]),
        "layer_types": draw_kinds(
            draw, options["num_hidden_layers"], "linear_attention", "full_attention"
        ),
        "linear_conv_kernel_dim": draw.choice([2, 3, 4, 5]),
        "linear_key_head_dim": draw.choice([4, 6, 8, 16, 20]),
        "linear_value_head_dim": draw.choice([4, 6, 8, 16, 20]),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * draw.choice([1, 2, 3]),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": draw.choice([1e3, 1e4, 1e7]),
            "partial_rotary_factor": draw.choice([0.25, 0.5, 1.0]),
        },
    }
    return options


def draw_qwen_moe(draw: random.Random) -> Options:
    """The same with experts."""
    options, experts = draw_qwen(draw), draw.randint(2, 9)
    size = draw.choice([5, 12, 16, 24])
    return options | {
        "num_experts": experts,
        "num_experts_per_tok": draw.randint(1, min(4, experts)),
        "moe_intermediate_size": size,
        "shared_expert_intermediate_size": draw.choice([size, 2 * size, size + 3]),
    }


def draw_qwen3_next(draw: random.Random) -> Options:
    """Qwen3-Next, with layers without experts."""
    options = draw_qwen_moe(draw) | {"norm_topk_prob": draw.random() < 0.7}
    if draw.random() < 0.3:
        options["decoder_sparse_step"] = 2
    elif draw.random() < 0.3:
        options["mlp_only_layers"] = [0]
    return options


def add_mamba2(draw: random.Random, options: Options) -> Options:
    """Mamba-2."""
    groups = draw.choice([1, 1, 2])
    heads, expand = groups * draw.choice([1, 2, 4]), draw.choice([1, 2])
    head_dim = max(1, expand * options["hidden_size"] // heads)
    options["hidden_size"] = heads * head_dim // expand
    return options | {
        "mamba_n_groups": groups,
        "mamba_n_heads": heads,
        "mamba_d_head": head_dim,
        "mamba_expand": expand,
        "mamba_d_state": draw.choice([4, 7, 8, 16]),
        "mamba_d_conv": draw.choice([2, 3, 4]),
        "mamba_conv_bias": draw.random() < 0.7,
        "mamba_proj_bias": draw.random() < 0.3,
        "mamba_chunk_size": draw.choice([4, 8, 256]),
    }


def draw_granite(draw: random.Random) -> Options:
    """Granite 4."""
    options = draw_common(draw)
    # Its attention divides the width by the heads.
    options["num_attention_heads"] = options["num_key_value_heads"] = 2
    options["hidden_size"] = draw.choice([32, 48, 64])
    options = add_mamba2(draw, options)
    experts = draw.choice([0, 3, 6])
    size = draw.choice([8, 12, 20])
    return options | {
        "layer_types": draw_kinds(draw, options["num_hidden_layers"], "mamba", "attention"),
        "num_local_experts": experts,
        "num_experts_per_tok": min(2, experts) or 1,
        "intermediate_size": size,
        "shared_intermediate_size": draw.choice([size, 3 * size, size + 4]),
        "position_embedding_type": draw.choice([None, "rope"]),
        "attention_bias": draw.random() < 0.3,
        "embedding_multiplier": draw.choice([1.0, 4.0]),
        "residual_multiplier": draw.choice([1.0, 0.3]),
        "attention_multiplier": draw.choice([0.25, 0.1]),
        "logits_scaling": draw.choice([1.0, 3.0]),
    }


def draw_bamba(draw: random.Random) -> Options:
    """Bamba."""
    options = draw_common(draw)
    options["num_attention_heads"] = options["num_key_value_heads"] = 2
    options["hidden_size"] = draw.choice([32, 48, 64])
    options = add_mamba2(draw, options)
    layers = range(options["num_hidden_layers"])
    options["attn_layer_indices"] = [n for n in layers if draw.random() < 0.4]
    return options | {"attention_bias": draw.random() < 0.3}


def draw_lfm2(draw: random.Random) -> Options:
    """LFM2."""
    options = draw_common(draw)
    return options | {
        "layer_types": draw_kinds(draw, options["num_hidden_layers"], "conv", "full_attention"),
        "conv_bias": draw.random() < 0.4,
        "conv_L_cache": draw.choice([2, 3, 4]),
        "block_auto_adjust_ff_dim": draw.random() < 0.5,
        "block_multiple_of": draw.choice([8, 20]),
        "block_ffn_dim_multiplier": draw.choice([1.0, 1.3]),
    }


def draw_lfm2_moe(draw: random.Random) -> Options:
    """LFM2 with experts."""
    options, experts = draw_common(draw), draw.randint(2, 8)
    return options | {
        "layer_types": draw_kinds(draw, options["num_hidden_layers"], "conv", "full_attention"),
        "conv_bias": draw.random() < 0.4,
        "conv_L_cache": draw.choice([2, 3, 4]),
        "moe_intermediate_size": draw.choice([8, 12, 24]),
        "num_experts": experts,
        "num_experts_per_tok": draw.randint(1, min(4, experts)),
        "num_dense_layers": draw.choice([0, 0, 1]),
        "use_expert_bias": draw.random() < 0.7,
        "norm_topk_prob": draw.random() < 0.7,
        "routed_scaling_factor": draw.choice([1.0, 1.7]),
    }


def draw_lfm3(draw: random.Random) -> Options:
    """LFM3."""
    options = draw_common(draw)
    kinds = ["conv", "conv", "full_attention", "sliding_attention"]
    full = {"rope_type": "default", "rope_theta": 500.0}
    if draw.random() < 0.6:
        share = draw.choice([0.25, 0.5, 1.0])
        full |= {"rope_type": "proportional", "partial_rotary_factor": share}
    return options | {
        "head_dim": draw.choice([8, 12, 16, 32]),
        "layer_types": draw.choices(kinds, k=options["num_hidden_layers"]),
        "sliding_window": draw.choice([3, 8]),
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
        "conv_bias": draw.random() < 0.4,
        "conv_L_cache": draw.choice([2, 3, 7]),
        "attention_bias": draw.random() < 0.3,
        "use_sandwich_norm": draw.random() < 0.7,
        "use_attention_gate": draw.random() < 0.7,
    }


def draw_mamba2(draw: random.Random) -> Options:
    """Mamba-2 alone."""
    groups, expand = draw.choice([1, 1, 2]), draw.choice([1, 2])
    heads, head_dim = groups * draw.choice([1, 2, 4]), draw.choice([4, 8, 12])
    return {
        "num_hidden_layers": draw.randint(1, 4),
        "hidden_size": heads * head_dim,
        "num_heads": heads * expand,
        "head_dim": head_dim,
        "expand": expand,
        "n_groups": groups,
        "state_size": draw.choice([4, 7, 16]),
        "conv_kernel": draw.choice([2, 3, 4]),
        "use_bias": draw.random() < 0.3,
        "use_conv_bias": draw.random() < 0.7,
        "layer_norm_epsilon": draw.choice([1e-5, 1e-3]),
        "tie_word_embeddings": draw.random() < 0.5,
    }


def draw_mamba(draw: random.Random) -> Options:
    """The first Mamba alone."""
    hidden = draw.choice([16, 24, 40, 64])
    return {
        "num_hidden_layers": draw.randint(1, 4),
        "hidden_size": hidden,
        "expand": draw.choice([1, 2, 3]),
        "state_size": draw.choice([4, 7, 16]),
        "conv_kernel": draw.choice([2, 3, 4]),
        "time_step_rank": draw.choice(["auto", 3, 33]),
        "use_bias": draw.random() < 0.3,
        "use_conv_bias": draw.random() < 0.7,
        "layer_norm_epsilon": draw.choice([1e-5, 1e-3]),
        "tie_word_embeddings": draw.random() < 0.5,
    }


def draw_falcon_mamba(draw: random.Random) -> Options:
    """Falcon Mamba."""
    return draw_mamba(draw) | {"mixer_rms_eps": draw.choice([1e-6, 1e-2])}


def draw_jamba(draw: random.Random) -> Options:
    """Jamba, with and without experts."""
    options, experts = draw_common(draw), draw.choice([1, 3, 6])
    period, every = draw.randint(1, 4), draw.randint(1, 3)
    return options | {
        "num_experts": experts,
        "num_experts_per_tok": draw.randint(1, min(3, experts)),
        "expert_layer_period": every,
        "expert_layer_offset": draw.randrange(every),
        "attn_layer_period": period,
        "attn_layer_offset": draw.randrange(period),
        "mamba_d_state": draw.choice([4, 7, 16]),
        "mamba_d_conv": draw.choice([2, 3, 4]),
        "mamba_expand": draw.choice([1, 2]),
        "mamba_dt_rank": draw.choice(["auto", 3, 33]),
        "mamba_conv_bias": draw.random() < 0.7,
        "mamba_proj_bias": draw.random() < 0.3,
    }


def draw_nemotron_h(draw: random.Random) -> Options:
    """Nemotron-H: blocks that are layers together, with and without experts."""
    options = draw_common(draw)
    ffn = draw.choice([["mlp"], ["moe"], ["mlp", "moe"]])
    state, attention = "linear_attention", "full_attention"
    blocks: list[str] = []
    for _ in range(options.pop("num_hidden_layers")):
        blocks += [*draw.choices([state, state, attention], k=draw.choice([0, 1, 1, 2, 3]))]
        blocks.append(draw.choice(ffn))
    blocks += draw.choice([[], [], [state], [attention, state]])
    groups, experts = draw.choice([1, 1, 2]), draw.randint(2, 8)
    size = draw.choice([8, 12, 24])
    latent = draw.choice([None, 12, 40])
    return options | {
        "moe_latent_size": latent,
        "layers_block_type": blocks,
        "tie_word_embeddings": False,
        "head_dim": draw.choice([8, 12, 16]),
        "attention_bias": draw.random() < 0.3,
        "mlp_bias": "moe" not in blocks and draw.random() < 0.4,
        "use_bias": draw.random() < 0.3,
        "use_conv_bias": draw.random() < 0.7,
        "mamba_num_heads": groups * draw.choice([1, 2, 4]),
        "mamba_head_dim": draw.choice([4, 8, 12]),
        "n_groups": groups,
        "ssm_state_size": draw.choice([4, 7, 16]),
        "conv_kernel": draw.choice([2, 3, 4]),
        "time_step_min": draw.choice([0.001, 0.3]),
        "n_routed_experts": experts,
        "num_experts_per_tok": draw.randint(1, min(4, experts)),
        "moe_intermediate_size": size,
        "moe_shared_expert_intermediate_size": draw.choice([size, 2 * size, size + 3]),
        "norm_topk_prob": draw.random() < 0.7,
        "routed_scaling_factor": draw.choice([1.0, 2.5]),
    }


def draw_kimi_linear(draw: random.Random) -> Options:
    """Kimi Linear."""
    options, experts = draw_common(draw), draw.choice([2, 5, 6])
    return options | {
        "num_key_value_heads": options["num_attention_heads"],
        # The code ties no head, whatever the configuration says.
        "tie_word_embeddings": False,
        "kv_lora_rank": draw.choice([8, 20, 32]),
        "q_lora_rank": draw.choice([None, None, 12]),
        "qk_rope_head_dim": draw.choice([4, 8]),
        "qk_nope_head_dim": draw.choice([8, 12, 16]),
        "v_head_dim": draw.choice([8, 12, 20]),
        "num_local_experts": experts,
        "num_experts_per_tok": draw.randint(1, 2),
        "moe_intermediate_size": draw.choice([5, 12, 24]),
        "n_shared_experts": draw.choice([1, 2]),
        "layer_types": draw_kinds(
            draw, options["num_hidden_layers"], "linear_attention", "full_attention"
        ),
        "linear_head_dim": draw.choice([4, 6, 8, 20, 32]),
        "linear_num_heads": draw.choice([1, 2, 3, 5]),
        "linear_conv_kernel_dim": draw.choice([2, 3, 4]),
        "norm_topk_prob": draw.random() < 0.7,
        "attention_bias": draw.random() < 0.2,
    }


def draw_bailing_hybrid(draw: random.Random) -> Options:
    """Ling 3: gates of heads, decays with a floor."""
    options = draw_kimi_linear(draw)
    for key in ("q_lora_rank", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"):
        del options[key]
    groups = draw.choice([1, 2])
    each = draw.choice([2, 3])
    return options | {
        "num_local_experts": groups * each,
        "n_group": groups,
        "topk_group": draw.randint(1, groups),
        "num_experts_per_tok": draw.randint(1, 2),
        "head_dim": draw.choice([4, 6, 8, 20, 32]),
        "short_conv_kernel_size": draw.choice([2, 3, 4]),
        "kda_safe_gate": draw.random() < 0.7,
        "kda_lower_bound": draw.choice([-5.0, -2.5]),
        "first_k_dense_replace": draw.choice([0, 1, 2]),
        "num_mtp_layers": 0,
    }


def _name(
    family: str, draw_options: Callable[[random.Random], Options], draw: random.Random
) -> Drawn:
    return family, draw_options(draw)


STATE_DRAWERS: dict[str, Callable[[random.Random], Drawn]] = {
    "bailing_hybrid": partial(_name, "BailingHybrid", draw_bailing_hybrid),
    "bamba": partial(_name, "Bamba", draw_bamba),
    "falcon_mamba": partial(_name, "FalconMamba", draw_falcon_mamba),
    "granitemoehybrid": partial(_name, "GraniteMoeHybrid", draw_granite),
    "jamba": partial(_name, "Jamba", draw_jamba),
    "kimi_linear": partial(_name, "KimiLinear", draw_kimi_linear),
    "lfm2": partial(_name, "Lfm2", draw_lfm2),
    "lfm2_moe": partial(_name, "Lfm2Moe", draw_lfm2_moe),
    "lfm3": partial(_name, "Lfm3", draw_lfm3),
    "mamba": partial(_name, "Mamba", draw_mamba),
    "mamba2": partial(_name, "Mamba2", draw_mamba2),
    "nemotron_h": partial(_name, "NemotronH", draw_nemotron_h),
    "qwen3_5": partial(_name, "Qwen3_5Text", draw_qwen),
    "qwen3_5_moe": partial(_name, "Qwen3_5MoeText", draw_qwen_moe),
    "qwen3_next": partial(_name, "Qwen3Next", draw_qwen3_next),
}
"""What draws a family's configurations, by name of the family."""
