"""Cohere's Command: dense and with experts."""

from __future__ import annotations

from pi2.importing.config import Config, read_window
from pi2.importing.families.decoders import LAYER, Tables, has_cycle, omit_positions
from pi2.importing.families.experts import add_dense_layers, list_dense_layers, name_experts
from pi2.importing.families.llama import describe_llama


def describe_cohere(config: Config) -> Tables:
    """Llama with LayerNorm and one norm for attention and FFN, side by side."""
    config.demand("use_qk_norm", False, False)
    tables = describe_llama(config)
    epsilon = config.read("layer_norm_eps", float, 1e-5)
    tables["norm"] = {"kind": "layernorm", "epsilon": epsilon}
    tables["rope"]["pairs"] = "neighbours"
    tables["residual"] = "parallel"
    tables["multipliers"] = {"logits": config.read("logit_scale", float, 0.0625)}
    tables["tied_head"] = config.read("tie_word_embeddings", bool, True)
    tables["tensors"] = {"ffn_norm": f"{LAYER}.input_layernorm.weight"}
    return tables


def describe_cohere2(config: Config) -> Tables:
    """Cohere whose layers have positions where they have a window."""
    tables = describe_cohere(config)
    layers = tables["shape"]["layers"]
    pattern = config.read("sliding_window_pattern", int, 4)
    window = read_window(config, layers, has_cycle(pattern), width=4096)
    tables["attention"] |= window
    turned = window.get("window_layers", range(layers)) if window else ()
    return tables | omit_positions(set(range(layers)) - set(turned))


def describe_cohere2_moe(config: Config) -> Tables:
    """Cohere 2 with experts, and dense layers that turn heads although they have no window."""
    tables = describe_cohere2(config)
    layers, first = tables["shape"]["layers"], config.read("first_k_dense_replace", int, 0)
    if config.has("first_k_dense_replace") and not config.read_list("layer_types"):
        raise config.refuse("first_k_dense_replace is stated without layer_types")
    if config.has("rms_norm_eps"):
        tables["norm"] = {"epsilon": config.read("rms_norm_eps", float)}
    ffn, shared = tables["shape"]["ffn"], config.read("num_shared_experts", int, 0)
    combination = config.read("shared_expert_combination_strategy", str, "average")
    if combination not in ("average", "sum"):
        raise config.refuse(f"shared_expert_combination_strategy is {combination!r}")
    router = config.read("expert_selection_fn", str, "softmax")
    if router not in ("softmax", "sigmoid"):
        raise config.refuse(f"expert_selection_fn is {router!r}")
    tables["moe"] = {
        "experts": config.read_first(("num_experts", "num_local_experts"), int),
        "active_experts": config.read("num_experts_per_tok", int, 2),
        "router": router,
        "shared_experts": shared,
        "normalise_weights": router == "softmax" or config.read("norm_topk_prob", bool, True),
    }
    if shared and combination == "average":
        tables["moe"] |= {"scaling": 0.5, "shared_factor": 0.5}
    dense = list_dense_layers(config, layers, first)
    if dense:
        add_dense_layers(tables, config.read("prefix_dense_intermediate_size", int, ffn), dense)
    names = name_experts(f"{LAYER}.mlp", shared="shared_experts")
    tables["tensors"] |= {key: name for key, name in names.items() if key != "choice_bias"}
    if config.read("prefix_dense_sliding_window_pattern", int, 1) == 1:
        still = tables.pop("other_rope", {"layers": []})["layers"]
        tables |= omit_positions(layer for layer in still if layer not in dense)
    return tables


FAMILIES = {
    "cohere": describe_cohere,
    "cohere2": describe_cohere2,
    "cohere2_moe": describe_cohere2_moe,
}
