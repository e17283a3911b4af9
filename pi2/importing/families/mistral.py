"""Mistral, Ministral, Mixtral and Mistral Small 4, and what was made of them with dReLU."""

from __future__ import annotations

from pi2.importing.config import Config, read_whole_window, read_window
from pi2.importing.families.decoders import LAYER, Tables, add_growth, describe_decoder
from pi2.importing.families.deepseek import describe_latent
from pi2.importing.families.experts import add_experts


def describe_mistral(config: Config) -> Tables:
    """Llama with a sliding window."""
    tables = describe_decoder(config)
    tables["attention"] = read_whole_window(config)
    return tables


def describe_bamboo(config: Config) -> Tables:
    """Mistral with dReLU, which its configuration calls ReLU."""
    tables = describe_mistral(config)
    tables["ffn"] = {"activation": "drelu"}
    return tables


def describe_ministral(config: Config) -> Tables:
    """Mistral whose layers with a window are listed."""
    tables = describe_decoder(config)
    window = read_window(config, tables["shape"]["layers"], lambda layer: True)
    tables["attention"] = window
    return tables


def describe_ministral3(config: Config) -> Tables:
    """Mistral whose queries grow with the position."""
    tables = describe_mistral(config)
    add_growth(config, tables)
    return tables


def describe_mixtral(config: Config) -> Tables:
    """Mistral with experts."""
    tables = describe_mistral(config)
    tables["moe"] = {
        "experts": config.read("num_local_experts", int),
        "active_experts": config.read("num_experts_per_tok", int),
    }
    expert = f"{LAYER}.block_sparse_moe.experts.{{expert}}"
    tables["tensors"] = {
        "router": f"{LAYER}.block_sparse_moe.gate.weight",
        "gate": f"{expert}.w1.weight",
        "up": f"{expert}.w3.weight",
        "down": f"{expert}.w2.weight",
    }
    return tables


def describe_turbosparse_mixtral(config: Config) -> Tables:
    """Mixtral with dReLU, which its configuration calls ReLU, and a predictor in every expert."""
    tables = describe_mixtral(config)
    tables["ffn"] = {"activation": "drelu"}
    predictor = f"{LAYER}.block_sparse_moe.experts.{{expert}}.predictor"
    tables["tensors"] |= {
        "predictor_in": f"{predictor}.fc1.weight",
        "predictor_out": f"{predictor}.fc2.weight",
        "predictor_bias": f"{predictor}.bias",
    }
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
    tables = describe_latent(config.set_default("kv_lora_rank", 256))
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


FAMILIES = {
    "bamboo": describe_bamboo,
    "ministral": describe_ministral,
    "ministral3": describe_ministral3,
    "mistral": describe_mistral,
    "mistral4": describe_mistral4,
    "mixtral": describe_mixtral,
    "turbosparsemixtral": describe_turbosparse_mixtral,
}
