"""Latent attention: DeepSeek V2 to V3.2, GLM Flash and GLM 5, Mistral Small 4, MiniCPM 3 and
Youtu."""

from __future__ import annotations

import math

from pi2.importing.config import Config, read_rope
from pi2.importing.families.decoders import Tables, add_growth, describe_decoder
from pi2.importing.families.sigmoid_mixtures import (
    add_dense_layers,
    add_experts,
    add_sigmoids,
    list_dense_layers,
)


def _describe_latent(config: Config) -> Tables:
    """What all of them share: latent attention, experts, shared experts."""
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
    tables = _describe_latent(config)
    tables["rope"]["pairs"] = "neighbours"
    config.demand("mlp_bias", False, False)
    method = config.read("topk_method", str, "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise config.refuse(f"topk_method is {method!r}")
    add_experts(config, tables)
    # The code does not scale weights to add up to 1, whatever norm_topk_prob says.
    tables["moe"]["normalise_weights"] = False
    if method == "group_limited_greedy":
        tables["moe"] |= {
            "groups": config.read("n_group", int),
            "active_groups": config.read("topk_group", int),
            "group_score": "best",
        }
    return tables


def describe_deepseek_v3(config: Config) -> Tables:
    """DeepSeek V3 and R1."""
    tables = _describe_latent(config)
    if config.read("rope_interleave", bool, True):
        tables["rope"]["pairs"] = "neighbours"
    config.demand("topk_method", "noaux_tc", "noaux_tc")
    config.demand("scoring_func", "sigmoid", "sigmoid")
    add_experts(config.change({"first_k_dense_replace": _count_dense(config)}), tables)
    add_sigmoids(config, tables, 8, 4)
    return tables


_MISTRAL4_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""What is meant where a configuration states no positions."""


def describe_mistral4(config: Config) -> Tables:
    """Mistral Small 4: latent attention, queries that grow, and experts that a softmax weights."""
    if not config.has("rope_parameters") and not config.has("rope_scaling"):
        config = config.change({"rope_parameters": _MISTRAL4_ROPE})
    scaling = dict(config.read_table("rope_parameters").values)
    # It is the share that qk_rope_head_dim has of a head.
    scaling.pop("partial_rotary_factor", None)
    config = config.change({"rope_parameters": scaling}).set_default("qk_nope_head_dim", 64)
    tables = _describe_latent(config.set_default("kv_lora_rank", 256))
    if config.read("rope_interleave", bool, True):
        tables["rope"]["pairs"] = "neighbours"
    add_growth(config, tables)
    add_experts(config, tables)
    tables["moe"] |= {
        "normalise_weights": config.read("norm_topk_prob", bool, True),
        "groups": config.read("n_group", int, 1),
        "active_groups": config.read("topk_group", int, 1),
    }
    del tables["tensors"]["choice_bias"]
    return tables


def describe_deepseek_v32(config: Config) -> Tables:
    """DeepSeek V3.2: V3 with an index that chooses keys for every query."""
    return _describe_indexed(config, 8, 4)


def describe_glm_moe_dsa(config: Config) -> Tables:
    """GLM 5: the same with other sizes, and an index for several layers."""
    tables = _describe_indexed(config, 1, 1)
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, 1e-5)
    return tables


def _describe_indexed(config: Config, groups: int, active_groups: int) -> Tables:
    """What an index chooses is every key, as long as there are no more than it chooses: longer
    contexts are left out, and so is the index."""
    config.demand("mlp_bias", False, False)
    groups = config.read("n_group", int, groups)
    active_groups = config.read("topk_group", int, active_groups)
    tables = _describe_with_dense_layers(
        config.change({"n_group": groups, "topk_group": active_groups, "rope_interleave": True}),
        config.read("first_k_dense_replace", int, 3),
    )
    chosen = config.read("index_topk", int, 2048)
    tables["shape"]["context"] = min(tables["shape"]["context"], chosen)
    return tables


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
    tables = _describe_latent(config)
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


def _count_dense(config: Config) -> int:
    return config.read("first_k_dense_replace", int, 3)


def describe_glm4_moe_lite(config: Config) -> Tables:
    """GLM 4.7 Flash: DeepSeek V3 with a list of layers that are no mixture."""
    config = config.set_default("n_group", 1).set_default("topk_group", 1)
    # The older name of the list is the number of such layers at the beginning.
    first = config.read("first_k_dense_replace", int, 1)
    tables = _describe_with_dense_layers(config, first)
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, 1e-5)
    return tables


def _describe_with_dense_layers(config: Config, first: int) -> Tables:
    """DeepSeek V3 whose layers that are no mixture are listed, or the ``first`` ones."""
    dense = config.read("intermediate_size", int)
    tables = describe_deepseek_v3(config.change({"first_k_dense_replace": 0}))
    add_dense_layers(tables, dense, list_dense_layers(config, tables["shape"]["layers"], first))
    return tables


def describe_youtu(config: Config) -> Tables:
    """Youtu: DeepSeek V3 without experts."""
    tables = _describe_latent(config)
    if config.read("rope_interleave", bool, True):
        tables["rope"]["pairs"] = "neighbours"
    tables["tied_head"] = config.read("tie_word_embeddings", bool, True)
    return tables


FAMILIES = {
    "deepseek_v2": describe_deepseek_v2,
    "deepseek_v3": describe_deepseek_v3,
    "deepseek_v32": describe_deepseek_v32,
    "glm4_moe_lite": describe_glm4_moe_lite,
    "glm_moe_dsa": describe_glm_moe_dsa,
    "minicpm3": describe_minicpm3,
    "mistral4": describe_mistral4,
    "youtu": describe_youtu,
}
