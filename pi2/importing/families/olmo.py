"""OLMo 1 to 3, OLMoE and FlexOlmo."""

from __future__ import annotations

from pi2.importing.config import Config, read_window
from pi2.importing.families.decoders import LAYER, Tables, add_turns, describe_decoder, has_cycle
from pi2.importing.families.experts import name_experts
from pi2.importing.families.llama import describe_llama


def describe_olmo(config: Config) -> Tables:
    """The first OLMo: LayerNorm without weights, and cut queries, keys and values."""
    config = config.change({"mlp_bias": False})
    tables = describe_llama(config)
    tables["norm"] = {"kind": "layernorm", "epsilon": 1e-5, "weights": False}
    if config.has("clip_qkv"):
        tables["attention"]["clip"] = config.read("clip_qkv", float)
    return tables


def describe_olmo2(config: Config) -> Tables:
    """Llama whose norms come after attention and FFN, and norms of all heads together."""
    tables = describe_decoder(config)
    bias = config.read("attention_bias", bool, False)
    tables["norm"] = {
        "epsilon": config.read("rms_norm_eps", float, 1e-5),
        "inputs": False,
        "outputs": True,
    }
    tables["attention"] = {
        "qkv_bias": bias,
        "output_bias": bias,
        "head_norm": True,
        "head_norm_of": "all",
    }
    return tables


def describe_olmo3(config: Config) -> Tables:
    """OLMo 2 with a window in three layers of four, whose positions are not scaled."""
    tables = describe_olmo2(config)
    layers = tables["shape"]["layers"]
    tables["attention"] |= read_window(config, layers, has_cycle(4), width=4096)
    theta = config.read("rope_theta", float, 500_000.0)
    both = config.read_table("rope_parameters")
    full, local = both.read_table("full_attention"), both.read_table("sliding_attention")
    if not both.has("full_attention") and not both.has("sliding_attention"):
        full = both if both.has("rope_type") else config.read_table("rope_scaling")
    # The original code looks for it outside of the two tables.
    full = full.change({"truncate": both.read("truncate", bool, True)})
    full, local = (table.set_default("rope_theta", theta) for table in (full, local))
    add_turns(config, tables, full, local)
    return tables


def describe_olmoe(config: Config) -> Tables:
    """OLMoE: norms of all heads together, experts that a softmax weights."""
    tables = describe_decoder(config)
    bias = config.read("attention_bias", bool, False)
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, 1e-5)
    tables["attention"] = {
        "qkv_bias": bias,
        "output_bias": bias,
        "head_norm": True,
        "head_norm_of": "all",
    }
    if config.has("clip_qkv"):
        tables["attention"]["clip"] = config.read("clip_qkv", float)
    tables["moe"] = {
        "experts": config.read_first(("num_experts", "num_local_experts"), int),
        "active_experts": config.read("num_experts_per_tok", int, 8),
        "normalise_weights": config.read("norm_topk_prob", bool, False),
    }
    tables["tensors"] = name_experts(f"{LAYER}.mlp", shared="shared_experts")
    return tables


def describe_flex_olmo(config: Config) -> Tables:
    """OLMo 2 with OLMoE's experts."""
    mixture = describe_olmoe(config)
    mixture["moe"]["active_experts"] = config.read("num_experts_per_tok", int, 5)
    tables = describe_olmo2(config)
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, 1e-6)
    return tables | {key: mixture[key] for key in ("moe", "tensors")}


FAMILIES = {
    "flex_olmo": describe_flex_olmo,
    "olmo": describe_olmo,
    "olmo2": describe_olmo2,
    "olmo3": describe_olmo3,
    "olmoe": describe_olmoe,
}
