"""Mixtures of experts."""

from __future__ import annotations

from pi2.importing.config import Config, read_whole_window, read_window
from pi2.importing.families.decoders import (
    LAYER,
    Tables,
    describe_decoder,
    describe_mistral,
    describe_qwen3,
    omit_positions,
)
from pi2.importing.families.sigmoid_mixtures import add_dense_layers


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


def describe_qwen2_moe(config: Config) -> Tables:
    """Experts that are chosen, and shared ones."""
    tables = describe_decoder(config)
    bias, last = config.read("qkv_bias", bool, True), config.read("max_window_layers", int, 28)
    tables["attention"] = {"qkv_bias": bias}
    if config.read("use_sliding_window", bool, False):
        tables["attention"] |= read_window(
            config, tables["shape"]["layers"], lambda n: n % 2 == 0 and n < last, width=4096
        )
    add_experts(config, tables)
    add_shared_experts(config, tables)
    return tables


def add_shared_experts(config: Config, tables: Tables) -> None:
    """Qwen's shared experts, which have a router of their own."""
    ffn, shared = tables["shape"]["ffn"], config.read("shared_expert_intermediate_size", int, 0)
    if shared:
        tables["moe"] |= {"shared_experts": -(-shared // ffn), "shared_gate": True}
        tables["moe"] |= {"shared_ffn": shared} if shared % ffn else {}


def describe_qwen3_moe(config: Config) -> Tables:
    """Qwen3 with experts, and a window in all layers or none."""
    tables = describe_qwen3(config)
    tables["attention"].pop("sliding_window", None)
    tables["attention"].pop("window_layers", None)
    if config.read("use_sliding_window", bool, False):
        tables["attention"] |= read_whole_window(config)
    add_experts(config, tables)
    return tables


def add_experts(config: Config, tables: Tables) -> None:
    """Qwen's experts."""
    dense, layers = tables["shape"]["ffn"], tables["shape"]["layers"]
    every = max(1, config.read("decoder_sparse_step", int, 1))
    only = config.read_list("mlp_only_layers")
    ffn = config.read("moe_intermediate_size", int)
    if ffn < 1:
        raise config.refuse(f"moe_intermediate_size is {ffn}")
    tables["shape"]["ffn"] = ffn
    tables["moe"] = {
        "experts": config.read_first(("num_experts", "num_local_experts"), int),
        "active_experts": config.read("num_experts_per_tok", int),
        "normalise_weights": config.read("norm_topk_prob", bool, False),
    }
    add_dense_layers(tables, dense, [n for n in range(layers) if n in only or (n + 1) % every != 0])
    expert = f"{LAYER}.mlp.experts.{{expert}}"
    tables["tensors"] |= {
        "router": f"{LAYER}.mlp.gate.weight",
        **{part: f"{expert}.{part}_proj.weight" for part in ("gate", "up", "down")},
    }


def describe_smallthinker(config: Config) -> Tables:
    """Experts with ReLU, chosen by the layer's input."""
    config.demand("moe_enable_early_router", True, True)
    config.demand("moe_enable_secondary_experts", False, False)
    values = {"hidden_act": "relu", "intermediate_size": config.read("moe_ffn_hidden_size", int)}
    tables = describe_decoder(config.change(values))
    layers = tables["shape"]["layers"]
    turned = config.read_list("rope_layout") or [1] * layers
    narrow = config.read_list("sliding_window_layout") or [0] * layers
    for key, flags in (("rope_layout", turned), ("sliding_window_layout", narrow)):
        if len(flags) != layers:
            raise config.refuse(f"{key} is not a list of {layers} numbers")
    window = [layer for layer in range(layers) if narrow[layer]]
    if window:
        tables["attention"]["sliding_window"] = config.read("sliding_window_size", int, 4096)
        if len(window) < layers:
            tables["attention"]["window_layers"] = window
    softmax = config.read("moe_primary_router_apply_softmax", bool, False)
    tables["moe"] = {
        "experts": config.read("moe_num_primary_experts", int),
        "active_experts": config.read("moe_num_active_primary_experts", int),
        "router": "softmax" if softmax else "sigmoid",
        "router_input": "layer",
    }
    tables["tied_head"] = config.read("tie_word_embeddings", bool, True)
    block = f"{LAYER}.block_sparse_moe"
    tables["tensors"] = {
        "router": f"{block}.primary_router.weight",
        **{part: f"{block}.experts.{{expert}}.{part}.weight" for part in ("gate", "up", "down")},
    }
    return tables | omit_positions(layer for layer in range(layers) if not turned[layer])


FAMILIES = {
    "mixtral": describe_mixtral,
    "qwen2_moe": describe_qwen2_moe,
    "qwen3_moe": describe_qwen3_moe,
    "smallthinker": describe_smallthinker,
    "turbosparsemixtral": describe_turbosparse_mixtral,
}
