"""Further mixtures of experts whose descriptions differ from their relatives' in little: K-EXAONE,
Solar Open, FlexOlmo, Hunyuan 3, AFMoE, Mellum, Cohere 2 with experts and Granite with windows."""

from __future__ import annotations

from pi2.importing.config import Config, read_window
from pi2.importing.families.decoders import (
    LAYER,
    Tables,
    add_turns,
    describe_cohere2,
    describe_decoder,
    omit_positions,
)
from pi2.importing.families.further_decoders import (
    add_exaone_window,
    add_granite_window,
)
from pi2.importing.families.mixtures import describe_qwen3_moe
from pi2.importing.families.newer_decoders import describe_granite_moe, describe_olmo2
from pi2.importing.families.sigmoid_mixtures import (
    add_dense_layers,
    add_experts,
    add_sigmoids,
    describe_olmoe,
    list_dense_layers,
    name_experts,
)


def _add_listed_experts(config: Config, tables: Tables, first: int) -> None:
    """Experts of families that list the layers without them; ``first``: their number where there
    is no list."""
    dense, layers = tables["shape"]["ffn"], tables["shape"]["layers"]
    shared = config.read("num_shared_experts", int, 1)
    values = {
        "n_routed_experts": config.read_first(("num_experts", "num_local_experts"), int),
        "n_shared_experts": config.read("n_shared_experts", int, shared),
        "first_k_dense_replace": 0,
    }
    add_experts(config.change(values), tables)
    add_dense_layers(tables, dense, list_dense_layers(config, layers, first))


def describe_exaone_moe(config: Config) -> Tables:
    """K-EXAONE: EXAONE 4 with norms before attention and FFN, and experts."""
    tables = describe_decoder(config)
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, 1e-5)
    tables["attention"] = {"head_norm": True}
    tables |= add_exaone_window(config, tables)
    _add_listed_experts(config, tables, config.read("first_k_dense_replace", int, 1))
    add_sigmoids(config, tables, 1, 1)
    tables["moe"]["scaling"] = config.read("routed_scaling_factor", float, 2.5)
    tables["tensors"]["choice_bias"] = f"{LAYER}.mlp.e_score_correction_bias"
    return tables


def describe_solar_open(config: Config) -> Tables:
    """Solar Open: GLM 4.5 that turns whole heads, with experts in all layers."""
    ffn = config.read("moe_intermediate_size", int)
    tables = describe_decoder(config.change({"intermediate_size": ffn}))
    tables["attention"] = {"qkv_bias": config.read("attention_bias", bool, False)}
    add_experts(config.change({"first_k_dense_replace": 0}), tables)
    add_sigmoids(config, tables, 1, 1)
    return tables


def describe_flex_olmo(config: Config) -> Tables:
    """OLMo 2 with OLMoE's experts."""
    mixture = describe_olmoe(config)
    mixture["moe"]["active_experts"] = config.read("num_experts_per_tok", int, 5)
    tables = describe_olmo2(config)
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, 1e-6)
    return tables | {key: mixture[key] for key in ("moe", "tensors")}


def describe_hunyuan3(config: Config) -> Tables:
    """Hunyuan 3: norms of heads before they turn, and experts that sigmoids weight."""
    config.demand("mlp_bias", False, False)
    tables = describe_decoder(config)
    bias = config.read("attention_bias", bool, False)
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, 1e-5)
    tables["attention"] = {"qkv_bias": bias, "output_bias": bias, "head_norm": True}
    _add_listed_experts(config, tables, 1)
    tables["moe"] |= {"router": "sigmoid", "choice_bias": True}
    tables["moe"]["scaling"] = config.read("router_scaling_factor", float, 2.826)
    tables["tensors"] |= name_experts(f"{LAYER}.mlp", shared="shared_mlp")
    tables["tensors"] |= {
        "router": f"{LAYER}.mlp.router.gate.weight",
        "choice_bias": f"{LAYER}.mlp.expert_bias",
    }
    return tables


def describe_afmoe(config: Config) -> Tables:
    """AFMoE: norms before and after, gates of what heads mix, positions where there is a
    window."""
    tables = describe_decoder(config)
    layers = tables["shape"]["layers"]
    tables["norm"] |= {"epsilon": config.read("rms_norm_eps", float, 1e-5), "outputs": True}
    bias = config.read("attention_bias", bool, False)
    tables["attention"] = {"qkv_bias": bias, "output_bias": bias}
    tables["attention"] |= {"head_norm": True, "output_gate": True}
    cycle = config.read("global_attn_every_n_layers", int, 4)
    if cycle < 1:
        raise config.refuse(f"global_attn_every_n_layers is {cycle}")
    window = read_window(config, layers, lambda layer: (layer + 1) % cycle != 0, width=1024)
    tables["attention"] |= window
    turned = window.get("window_layers", range(layers)) if window else ()
    tables |= omit_positions(set(range(layers)) - set(turned))
    if config.read("mup_enabled", bool, False):
        tables["multipliers"] = {"embedding": tables["shape"]["hidden"] ** 0.5}
    _add_listed_experts(config, tables, config.read("num_dense_layers", int, 1))
    tables["moe"] |= {"router": "sigmoid", "choice_bias": True}
    tables["moe"]["scaling"] = config.read("route_scale", float, 1.0)
    tables["tensors"] |= {
        "query_gate": f"{LAYER}.self_attn.gate_proj.weight",
        "attention_output_norm": f"{LAYER}.post_attention_layernorm.weight",
        "ffn_norm": f"{LAYER}.pre_mlp_layernorm.weight",
        "ffn_output_norm": f"{LAYER}.post_mlp_layernorm.weight",
        "router": f"{LAYER}.mlp.router.gate.weight",
        "choice_bias": f"{LAYER}.mlp.expert_bias",
    }
    return tables


def describe_mellum(config: Config) -> Tables:
    """Qwen3 with experts, whose layers with a window have other positions."""
    tables = describe_qwen3_moe(config)
    layers = tables["shape"]["layers"]
    tables["attention"] |= read_window(config, layers, lambda layer: False, width=1024)
    both = config.read_table("rope_parameters")
    full, local = both.read_table("full_attention"), both.read_table("sliding_attention")
    full = full.set_default("rope_theta", 500_000.0)
    add_turns(config, tables, full, local.set_default("rope_theta", 10_000.0))
    dense = config.read("intermediate_size", int)
    tables["moe"]["normalise_weights"] = config.read("norm_topk_prob", bool, True)
    add_dense_layers(tables, dense, list_dense_layers(config, layers, 0))
    return tables


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


def describe_granite_moe_swa(config: Config) -> Tables:
    """Granite with experts, sinks and windows."""
    tables = describe_granite_moe(config)
    block = f"{LAYER}.block_sparse_moe"
    tables["tensors"] |= {
        "router": f"{block}.router.weight",
        "fused_gate_up": f"{block}.experts.gate_up_proj.{{expert}}",
        "down": f"{block}.experts.down_proj.{{expert}}",
    }
    return add_granite_window(config, tables)


FAMILIES = {
    "afmoe": describe_afmoe,
    "cohere2_moe": describe_cohere2_moe,
    "exaone_moe": describe_exaone_moe,
    "flex_olmo": describe_flex_olmo,
    "granitemoe_swa": describe_granite_moe_swa,
    "hy_v3": describe_hunyuan3,
    "mellum": describe_mellum,
    "solar_open": describe_solar_open,
}
