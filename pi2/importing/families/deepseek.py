"""DeepSeek and its relatives: GLM, Kimi, MiniCPM, Youtu and dots."""

from __future__ import annotations

import math
from typing import Any

from pi2.importing.config import NORMALISED_EXPERTS, Config, read_rope, read_window
from pi2.importing.families.decoders import (
    LAYER,
    Tables,
    add_dense_layers,
    add_experts,
    add_kinds,
    add_sigmoids,
    describe_decoder,
    list_dense_layers,
)


def describe_dots1(config: Config) -> Tables:
    """dots.1: norms of heads, as Qwen3 has them."""
    tables = describe_decoder(config)
    layers = tables["shape"]["layers"]
    bias = config.read("attention_bias", bool, False)
    first = config.read("max_window_layers", int, 62)
    tables["attention"] = {"qkv_bias": bias, "output_bias": bias, "head_norm": True}
    if config.has("sliding_window"):
        tables["attention"] |= read_window(config, layers, lambda layer: layer >= first)
    add_experts(config, tables)
    add_sigmoids(config, tables, 1, 1)
    tables["moe"]["normalise_weights"] = config.read("norm_topk_prob", bool, False)
    return tables


def describe_latent(config: Config) -> Tables:
    """A decoder with latent attention, and a dense FFN."""
    heads = config.read("num_attention_heads", int)
    value, plain = config.read("v_head_dim", int, 128), config.read("qk_nope_head_dim", int, 128)
    rotated = config.read("qk_rope_head_dim", int, 64)
    # Other numbers of the configuration are those of heads that nobody computes.
    own = {"head_dim": value, "num_key_value_heads": heads}
    tables = describe_decoder(config.change(own))
    bias = config.read("attention_bias", bool, False)
    latent: Tables = {
        "rank": config.read("kv_lora_rank", int, 512),
        "plain": plain,
        "rotated": rotated,
        "bias": bias,
    }
    if config.has("q_lora_rank"):
        latent["query_rank"] = config.read("q_lora_rank", int)
    tables["rope"] = read_rope(config, tables["shape"]["context"])
    tables["attention"] = {"latent": latent, "output_bias": bias}
    factor = _find_score_factor(config)
    if factor != 1.0:
        tables["attention"]["scale"] = factor / math.sqrt(max(1, plain + rotated))
    return tables


def _find_score_factor(config: Config) -> float:
    """What scaled positions multiply scores with, beside what they do to sines and cosines."""
    scaling = config.read_table("rope_parameters")
    if not scaling.has("rope_type") and not scaling.has("rope_theta"):
        scaling = config.read_table("rope_scaling")
    kind = scaling.read("rope_type", str, scaling.read("type", str, "default"))
    all_dims = scaling.read("mscale_all_dim", float, 0.0)
    factor = scaling.read("factor", float, 1.0)
    if kind == "default" or not all_dims or factor <= 1:
        return 1.0
    return (0.1 * all_dims * math.log(factor) + 1.0) ** 2


def describe_deepseek_v2(config: Config) -> Tables:
    """DeepSeek V2: a softmax weights experts, groups are compared by their best one."""
    tables = describe_latent(config)
    tables["rope"]["pairs"] = "neighbours"
    config.demand("mlp_bias", False, False)
    method = config.read("topk_method", str, "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise config.refuse(f"topk_method is {method!r}")
    add_experts(config, tables)
    # The code does not scale weights to add up to 1, whatever norm_topk_prob says.
    tables["moe"]["normalise_weights"] = config.read(NORMALISED_EXPERTS, bool, False)
    if method == "group_limited_greedy":
        tables["moe"] |= {
            "groups": config.read("n_group", int),
            "active_groups": config.read("topk_group", int),
            "group_score": "best",
        }
    return tables


def describe_deepseek_v3(config: Config) -> Tables:
    """DeepSeek V3 and R1."""
    tables = describe_latent(config)
    if config.read("rope_interleave", bool, True):
        tables["rope"]["pairs"] = "neighbours"
    config.demand("topk_method", "noaux_tc", "noaux_tc")
    config.demand("scoring_func", "sigmoid", "sigmoid")
    add_experts(config.change({"first_k_dense_replace": _count_dense(config)}), tables)
    add_sigmoids(config, tables, 8, 4)
    return tables


def _count_dense(config: Config) -> int:
    return config.read("first_k_dense_replace", int, 3)


def describe_deepseek_v32(config: Config) -> Tables:
    """DeepSeek V3.2: V3 with an index that chooses keys for every query."""
    return describe_indexed(config, 8, 4)


def describe_indexed(config: Config, groups: int, active_groups: int) -> Tables:
    """What an index chooses is every key, as long as there are no more than it chooses: longer
    contexts are left out, and so is the index."""
    config.demand("mlp_bias", False, False)
    groups = config.read("n_group", int, groups)
    active_groups = config.read("topk_group", int, active_groups)
    tables = describe_with_dense_layers(
        config.change({"n_group": groups, "topk_group": active_groups, "rope_interleave": True}),
        config.read("first_k_dense_replace", int, 3),
    )
    chosen = config.read("index_topk", int, 2048)
    tables["shape"]["context"] = min(tables["shape"]["context"], chosen)
    return tables


def describe_with_dense_layers(config: Config, first: int) -> Tables:
    """DeepSeek V3 whose layers that are no mixture are listed, or the ``first`` ones."""
    dense = config.read("intermediate_size", int)
    tables = describe_deepseek_v3(config.change({"first_k_dense_replace": 0}))
    add_dense_layers(tables, dense, list_dense_layers(config, tables["shape"]["layers"], first))
    return tables


def describe_glm(config: Config) -> Tables:
    """A decoder that rotates half of each head, two neighbours at a time."""
    tables = describe_decoder(config, rotated=0.5)
    tables["attention"] = {"qkv_bias": config.read("attention_bias", bool, False)}
    tables["rope"]["pairs"] = "neighbours"
    tables["tensors"] = {"fused_gate_up": f"{LAYER}.mlp.gate_up_proj.weight"}
    return tables


def describe_glm4(config: Config) -> Tables:
    """GLM with norms of outputs."""
    tables = describe_glm(config)
    tables["norm"]["outputs"] = True
    tables["tensors"] |= {
        "attention_output_norm": f"{LAYER}.post_self_attn_layernorm.weight",
        "ffn_output_norm": f"{LAYER}.post_mlp_layernorm.weight",
    }
    return tables


def describe_glm4v(config: Config) -> Tables:
    """The text of GLM-4V: GLM 4, whose queries, keys and values have biases whatever it says."""
    return describe_glm4(config.change({"attention_bias": True}))


def describe_glm4_moe(config: Config) -> Tables:
    """GLM 4.5: half of each head is rotated."""
    tables = describe_glm(config)
    tables["rope"]["pairs"] = "halves"
    tables["attention"]["head_norm"] = config.read("use_qk_norm", bool, False)
    tables["tensors"] = {}
    add_experts(config, tables)
    add_sigmoids(config, tables, 1, 1)
    return tables


def describe_glm4_moe_lite(config: Config) -> Tables:
    """GLM 4.7 Flash: DeepSeek V3 with a list of layers that are no mixture."""
    config = config.set_default("n_group", 1).set_default("topk_group", 1)
    # The older name of the list is the number of such layers at the beginning.
    first = config.read("first_k_dense_replace", int, 1)
    tables = describe_with_dense_layers(config, first)
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, 1e-5)
    return tables


def describe_glm_moe_dsa(config: Config) -> Tables:
    """GLM 5: the same with other sizes, and an index for several layers."""
    tables = describe_indexed(config, 1, 1)
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, 1e-5)
    return tables


NAMES = {
    "max_position_embeddings": "model_max_length",
    "n_group": "num_expert_group",
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
}
"""Keys as these families write them, by the names that others have for them."""


def rename_keys(config: Config, defaults: dict[str, Any]) -> Config:
    """The configuration with the keys of other families, ``defaults`` where they are absent."""
    values = {key: config.values[old] for key, old in NAMES.items() if config.has(old)}
    config = config.change(values)
    for key, value in defaults.items():
        config = config.set_default(key, value)
    return config


def describe_kimi_linear(config: Config) -> Tables:
    """Three layers of the delta rule, then one of attention, or as the configuration says."""
    config = rename_keys(
        config,
        {
            "max_position_embeddings": 2**20,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.446,
            "num_experts_per_tok": 8,
            "rms_norm_eps": 1e-5,
        },
    )
    tables = describe_latent(config)
    tables["rope"] = {"kind": "none"}
    layers, own = tables["shape"]["layers"], config.read_table("linear_attn_config")
    listed = {layer - 1 for layer in own.read_list("full_attn_layers") if type(layer) is int}
    is_listed = own.has("full_attn_layers") and own.has("kda_layers")
    add_kinds(config, tables, "delta", lambda n: n in listed if is_listed else n > 0 and n % 4 == 0)
    size = own.read("head_dim", int, config.read("linear_head_dim", int, 128))
    heads = own.read("num_heads", int, config.read("linear_num_heads", int, 32))
    kernel = config.read("linear_conv_kernel_dim", int, 4)
    add_key_decays(tables, heads, size, own.read("short_conv_kernel_size", int, kernel))
    tables["recurrence"] |= {"decay_rank": size, "gate_rank": size}
    block = f"{LAYER}.self_attn"
    tables["tensors"] |= {
        **name_delta(block, "o_proj"),
        "state_gate": f"{block}.g_a_proj.weight",
        "state_alpha": f"{block}.f_a_proj.weight",
    }
    dense = tables["shape"]["ffn"]
    add_experts(config.change({"first_k_dense_replace": 0}), tables)
    first = config.read("first_k_dense_replace", int, 1)
    add_dense_layers(tables, dense, list_dense_layers(config, layers, first))
    add_sigmoids(config, tables, 1, 1)
    tables["tensors"] |= name_kimi_experts(f"{LAYER}.block_sparse_moe")
    return tables


def add_key_decays(tables: Tables, heads: int, size: int, kernel: int) -> None:
    """Sizes of a delta rule whose decays are of keys, and whose gates go through a sigmoid."""
    tables["recurrence"] = {
        "key_heads": heads,
        "value_heads": heads,
        "key_dim": size,
        "value_dim": size,
        "kernel": kernel,
        "decay_of": "key",
        "gate": "sigmoid",
    }


def name_delta(block: str, output: str) -> Tables:
    """Names of a delta rule's tensors, which begin with ``block``."""
    return {
        "state_order": "single",
        "state_in": f"{block}.q_proj.weight",
        "state_key": f"{block}.k_proj.weight",
        "state_value": f"{block}.v_proj.weight",
        "state_gate": f"{block}.g_proj.weight",
        "state_output_gates": f"{block}.g_b_proj.weight",
        "state_beta": f"{block}.b_proj.weight",
        "state_alpha": f"{block}.f_proj.weight",
        "state_decays": f"{block}.f_b_proj.weight",
        "state_convolution": f"{block}.q_conv1d.weight",
        "state_key_convolution": f"{block}.k_conv1d.weight",
        "state_value_convolution": f"{block}.v_conv1d.weight",
        "state_decay": f"{block}.A_log",
        "state_step": f"{block}.dt_bias",
        "state_norm": f"{block}.o_norm.weight",
        "state_output": f"{block}.{output}.weight",
    }


def name_kimi_experts(block: str) -> Tables:
    """Names of router, experts and shared experts."""
    parts = {"gate": "w1", "up": "w3", "down": "w2"}
    return {
        "router": f"{block}.gate.weight",
        "choice_bias": f"{block}.gate.e_score_correction_bias",
        **{part: f"{block}.experts.{{expert}}.{old}.weight" for part, old in parts.items()},
        **{f"shared_{part}": f"{block}.shared_experts.{part}_proj.weight" for part in parts},
    }


def describe_minicpm3(config: Config) -> Tables:
    """MiniCPM 3: latent attention in a dense model, with factors of depth and width."""
    layers, hidden = config.read("num_hidden_layers", int), config.read("hidden_size", int)
    heads = config.read("num_attention_heads", int)
    for key, value in (
        ("v_head_dim", hidden // max(1, heads)),
        ("kv_lora_rank", 256),
        ("qk_nope_head_dim", 64),
        ("qk_rope_head_dim", 32),
    ):
        config = config.set_default(key, value)
    tables = describe_latent(config)
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, 1e-5)
    tables["tied_head"] = config.read("tie_word_embeddings", bool, True)
    tables["ffn"]["bias"] = config.read("mlp_bias", bool, False)
    root = math.sqrt(layers)
    depth = config.read_limit("scale_depth", 1.4)
    base = config.read_limit("dim_model_base", 256.0)
    tables["multipliers"] = {
        "embedding": config.read("scale_emb", float, 12.0),
        "residual": 1.0 if depth is None else depth / root,
        "logits": 1.0 if base is None else base / hidden,
    }
    return tables


def describe_youtu(config: Config) -> Tables:
    """Youtu: DeepSeek V3 without experts."""
    tables = describe_latent(config)
    if config.read("rope_interleave", bool, True):
        tables["rope"]["pairs"] = "neighbours"
    tables["tied_head"] = config.read("tie_word_embeddings", bool, True)
    return tables


FAMILIES = {
    "dots1": describe_dots1,
    "deepseek_v2": describe_deepseek_v2,
    "deepseek_v3": describe_deepseek_v3,
    "kimi_k2": describe_deepseek_v3,
    "deepseek_v32": describe_deepseek_v32,
    "glm": describe_glm,
    "glm4": describe_glm4,
    "glm4_moe": describe_glm4_moe,
    "glm4v_moe_text": describe_glm4_moe,
    "glm4v_text": describe_glm4v,
    "glm4_moe_lite": describe_glm4_moe_lite,
    "glm_moe_dsa": describe_glm_moe_dsa,
    "kimi_linear": describe_kimi_linear,
    "minicpm3": describe_minicpm3,
    "youtu": describe_youtu,
}
