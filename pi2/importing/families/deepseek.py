"""DeepSeek V2 to V3.2: latent attention, and experts."""

from __future__ import annotations

import math

from pi2.importing.config import NORMALISED_EXPERTS, Config, read_rope
from pi2.importing.families.decoders import Tables, describe_decoder
from pi2.importing.families.experts import (
    add_dense_layers,
    add_experts,
    add_sigmoids,
    list_dense_layers,
)


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


FAMILIES = {
    "deepseek_v2": describe_deepseek_v2,
    "deepseek_v3": describe_deepseek_v3,
    "kimi_k2": describe_deepseek_v3,
    "deepseek_v32": describe_deepseek_v32,
}
