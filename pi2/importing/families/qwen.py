"""Qwen and its relatives EXAONE, Flint, Laguna and Mellum."""

from __future__ import annotations

from collections.abc import Callable

from pi2.importing.config import Config, read_whole_window, read_window
from pi2.importing.families.decoders import (
    LAYER,
    Tables,
    add_dense_layers,
    add_kinds,
    add_listed_experts,
    add_sigmoids,
    add_turns,
    describe_decoder,
    has_cycle,
    list_dense_layers,
    name_experts,
    omit_positions,
)
from pi2.importing.families.llama import describe_olmo2


def describe_qwen2(config: Config) -> Tables:
    """Llama with biases of query, key and value, and a window in late layers."""
    tables = describe_decoder(config)
    window = {}
    if config.read("use_sliding_window", bool, False):
        window = read_window(config, tables["shape"]["layers"], _is_late(config))
    tables["attention"] = {"qkv_bias": True, **window}
    # No configuration says so: it is what GGUF files have.
    tables["head_bias"] = config.read("lm_head_bias", bool, False)
    return tables


def _is_late(config: Config) -> Callable[[int], bool]:
    """Whether a layer is one of those that have a window, in Qwen2."""
    first = config.read("max_window_layers", int, 28)
    return lambda layer: layer >= first


def describe_qwen3(config: Config) -> Tables:
    """Qwen2 with norms of heads, and fewer biases."""
    tables = describe_qwen2(config)
    bias = config.read("attention_bias", bool, False)
    tables["attention"] |= {"qkv_bias": bias, "output_bias": bias, "head_norm": True}
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
    add_qwen_experts(config, tables)
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
    add_qwen_experts(config, tables)
    return tables


def describe_qwen3_vl_moe(config: Config) -> Tables:
    """The text of Qwen3-VL with experts, whose weights always add up to 1."""
    tables = describe_qwen3_moe(config)
    tables["moe"]["normalise_weights"] = True
    return tables


def add_qwen_experts(config: Config, tables: Tables) -> None:
    """The table ``[moe]``, names and sizes of Qwen's experts."""
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


def describe_qwen3_next(config: Config) -> Tables:
    """Gated DeltaNet beside gated attention, with experts; the rows of a projection are in groups,
    one for each key head."""
    tables = _describe_hybrid(config)
    add_qwen_experts(config, tables)
    tables["moe"]["normalise_weights"] = config.read("norm_topk_prob", bool, True)
    add_shared_experts(config, tables)
    tables["tensors"] |= {
        "state_order": "grouped",
        "state_in": f"{LAYER}.linear_attn.in_proj_qkvz.weight",
        "state_beta": f"{LAYER}.linear_attn.in_proj_ba.weight",
    }
    return tables


def describe_qwen3_5(config: Config) -> Tables:
    """Qwen3-Next without experts, its projections apart."""
    return _describe_hybrid(config)


def describe_qwen3_5_moe(config: Config) -> Tables:
    """The same with experts."""
    tables = _describe_hybrid(config.change({"intermediate_size": 1}))
    add_qwen_experts(config, tables)
    tables["moe"]["normalise_weights"] = True
    add_shared_experts(config, tables)
    return tables


def _describe_hybrid(config: Config) -> Tables:
    defaults = {} if config.has("head_dim") else {"head_dim": 256}
    tables = describe_decoder(config.change(defaults), rotated=0.25)
    if tables["ffn"]["activation"] != "silu":
        raise config.refuse("hidden_act is not silu, which its convolutions apply")
    tables["norm"]["weight_offset"] = 1.0
    bias = config.read("attention_bias", bool, False)
    tables["attention"] = {
        "qkv_bias": bias,
        "output_bias": bias,
        "head_norm": True,
        "output_gate": True,
    }
    interval = config.read("full_attention_interval", int, 4)
    if interval < 1:
        raise config.refuse(f"full_attention_interval is {interval}")
    add_kinds(config, tables, "delta", lambda layer: (layer + 1) % interval == 0)
    tables["recurrence"] = {
        "key_heads": config.read("linear_num_key_heads", int, 16),
        "value_heads": config.read("linear_num_value_heads", int, 32),
        "key_dim": config.read("linear_key_head_dim", int, 128),
        "value_dim": config.read("linear_value_head_dim", int, 128),
        "kernel": config.read("linear_conv_kernel_dim", int, 4),
    }
    return tables


def describe_exaone4(config: Config) -> Tables:
    """OLMo 2 with norms of each head, whose layers have positions where they have a window."""
    tables = describe_olmo2(config.change({"attention_bias": False}))
    tables["attention"] = {"head_norm": True}
    return tables | add_exaone_window(config, tables)


def add_exaone_window(config: Config, tables: Tables) -> Tables:
    """State the window of EXAONE's layers, and return what says which have no positions."""
    layers, values = tables["shape"]["layers"], config.values
    if "sliding_window" in values and not config.has("sliding_window"):
        return {}
    cycle = 4
    if not config.read_list("layer_types"):
        cycle = config.read("sliding_window_pattern", int, cycle)
    window = read_window(config, layers, has_cycle(cycle), width=4096)
    tables["attention"] |= window
    turned = window.get("window_layers", range(layers)) if window else ()
    return omit_positions(set(range(layers)) - set(turned))


def describe_exaone_moe(config: Config) -> Tables:
    """K-EXAONE: EXAONE 4 with norms before attention and FFN, and experts."""
    tables = describe_decoder(config)
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, 1e-5)
    tables["attention"] = {"head_norm": True}
    tables |= add_exaone_window(config, tables)
    add_listed_experts(config, tables, config.read("first_k_dense_replace", int, 1))
    add_sigmoids(config, tables, 1, 1)
    tables["moe"]["scaling"] = config.read("routed_scaling_factor", float, 2.5)
    tables["tensors"]["choice_bias"] = f"{LAYER}.mlp.e_score_correction_bias"
    return tables


def describe_kolibri(config: Config) -> Tables:
    """Kolibri: EXAONE's windows and positions, norms before and after, and experts that are chosen
    by scores and a bias."""
    tables = describe_decoder(config.set_default("intermediate_size", 1))
    layers = tables["shape"]["layers"]
    tables["norm"]["outputs"] = True
    tables["attention"] = {"head_norm": True}
    values, window = config.values, {}
    if "sliding_window" not in values or config.has("sliding_window"):
        window = read_window(config, layers, has_cycle(5), width=513)
        turned = window.get("window_layers", range(layers)) if window else ()
        tables["attention"] |= window
        tables |= omit_positions(set(range(layers)) - set(turned))
    add_qwen_experts(config, tables)
    add_shared_experts(config.set_default("shared_expert_intermediate_size", 512), tables)
    tables["moe"].pop("shared_gate", None)
    tables["moe"].pop("dense_layers", None)
    tables["moe"] |= {"router": "sigmoid", "choice_bias": True, "choice_bias_of": "score"}
    names = name_experts(f"{LAYER}.mlp", shared="shared_experts")
    tables["tensors"] = names | {
        "attention_output_norm": f"{LAYER}.post_attn_norm.weight",
        "ffn_output_norm": f"{LAYER}.post_ffn_norm.weight",
        "choice_bias": f"{LAYER}.moe.router.expert_bias",
    }
    return tables


def describe_flint(config: Config) -> Tables:
    """Routers with sigmoids, and shared experts without a router of their own."""
    stated = {"use_sliding_window": False, "norm_topk_prob": True}
    config = config.change({key: config.values.get(key, stated[key]) for key in stated})
    if config.values.get("mlp_only_layers") is None:
        config = config.change({"mlp_only_layers": [0, 1]})
    tables = describe_qwen3_moe(config)
    layers = tables["shape"]["layers"]
    last = layers - 1

    def has_window(layer: int) -> bool:
        return layer >= 2 and layer % 4 != 1 and layer != last

    tables["attention"]["sinks"] = True
    window = read_window(config, layers, has_window, width=513)
    tables["attention"] |= window
    turned = window.get("window_layers", range(layers)) if window else ()
    tables |= omit_positions(set(range(layers)) - set(turned))
    tables["moe"]["router"] = "sigmoid"
    add_shared_experts(config.set_default("shared_expert_intermediate_size", 1024), tables)
    tables["moe"].pop("shared_gate", None)
    tables["tensors"]["sinks"] = f"{LAYER}.self_attn.softmax_offset"
    return tables


_FULL = {"rope_theta": 500_000.0, "partial_rotary_factor": 0.5}
_LOCAL = {"rope_theta": 10_000.0, "partial_rotary_factor": 1.0}


def describe_laguna(config: Config) -> Tables:
    """Laguna: AFMoE's experts, gates of what heads mix, and layers that differ in their heads."""
    config.demand("moe_apply_router_weight_on_input", False, False)
    if config.read("moe_router_logit_softcapping", float, 0.0) > 0.0:
        raise config.refuse("moe_router_logit_softcapping is not 0")
    tables = describe_decoder(config.set_default("head_dim", 128))
    layers, dense = tables["shape"]["layers"], tables["shape"]["ffn"]
    bias = config.read("attention_bias", bool, False)
    is_whole = config.values.get("gating", True) not in (True, "per-head")
    tables["attention"] = {
        "qkv_bias": bias,
        "output_bias": bias,
        "head_norm": True,
        "output_gate": True,
        "output_gate_of": "element" if is_whole else "head",
        "output_gate_function": "softplus",
    }
    _add_heads(config, tables)
    tables["attention"] |= read_window(config, layers, lambda layer: False, width=512)
    both = config.read_table("rope_parameters")
    stated = both.has("full_attention") or both.has("sliding_attention")
    full, local = (
        both.read_table(key) if stated else both.change(default)
        for key, default in (("full_attention", _FULL), ("sliding_attention", _LOCAL))
    )
    full, local = (
        table.set_default("rope_theta", default["rope_theta"])
        for table, default in ((full, _FULL), (local, _LOCAL))
    )
    add_turns(config, tables, full, local, share=1.0)
    add_qwen_experts(config, tables)
    add_shared_experts(config.set_default("shared_expert_intermediate_size", 512), tables)
    for key in ("shared_gate", "dense_layers", "dense_ffn"):
        tables["moe"].pop(key, None)
    add_dense_layers(tables, dense, list_dense_layers(config, layers, 1))
    tables["moe"] |= {"router": "sigmoid", "choice_bias": True, "normalise_weights": True}
    tables["moe"]["scaling"] = config.read("moe_routed_scaling_factor", float, 1.0)
    tables["tensors"] |= {
        "query_gate": f"{LAYER}.self_attn.g_proj.weight",
        "choice_bias": f"{LAYER}.mlp.experts.e_score_correction_bias",
    }
    return tables


def _add_heads(config: Config, tables: Tables) -> None:
    shape = tables["shape"]
    counts = config.read_list("num_attention_heads_per_layer")
    if not counts:
        return
    if len(counts) != shape["layers"] or not all(type(item) is int for item in counts):
        raise config.refuse(
            f"num_attention_heads_per_layer is not a list of {shape['layers']} numbers"
        )
    found = sorted(set(counts))
    if len(found) > 2:
        raise config.refuse(f"layers have {len(found)} numbers of heads, pi2 computes two")
    shape["heads"] = found[0]
    if len(found) == 2:
        tables["other_heads"] = {
            "layers": [layer for layer, count in enumerate(counts) if count == found[1]],
            "heads": found[1],
            "kv_heads": shape["kv_heads"],
            "head_dim": shape["head_dim"],
        }


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


FAMILIES = {
    "qwen2": describe_qwen2,
    "qwen2_5_vl_text": describe_qwen2,
    "qwen2_moe": describe_qwen2_moe,
    "qwen2_vl_text": describe_qwen2,
    "qwen3": describe_qwen3,
    "qwen3_5_moe_text": describe_qwen3_5_moe,
    "qwen3_5_text": describe_qwen3_5,
    "qwen3_moe": describe_qwen3_moe,
    "qwen3_next": describe_qwen3_next,
    "qwen3_vl_moe_text": describe_qwen3_vl_moe,
    "qwen3_vl_text": describe_qwen3,
    "exaone4": describe_exaone4,
    "exaone_moe": describe_exaone_moe,
    "kolibri1": describe_kolibri,
    "flint": describe_flint,
    "laguna": describe_laguna,
    "mellum": describe_mellum,
}
