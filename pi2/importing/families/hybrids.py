"""Families most of whose layers keep a state of fixed size instead of keys and values."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

from pi2.importing.config import SPLIT_EXPERTS, Config
from pi2.importing.families.decoders import (
    LAYER,
    Tables,
    add_turns,
    describe_decoder,
    describe_granite,
)
from pi2.importing.families.mixtures import add_experts, add_shared_experts
from pi2.importing.families.newer_decoders import name_granite_experts
from pi2.importing.families.sigmoid_mixtures import add_dense_layers

_KINDS = {
    "full_attention": "attention",
    "attention": "attention",
    "linear_attention": "linear",
    "mamba": "linear",
    "conv": "linear",
}
"""Whether layers are attention, by their names in configurations."""


def describe_qwen3_next(config: Config) -> Tables:
    """Gated DeltaNet beside gated attention, with experts; the rows of a projection are in groups,
    one for each key head."""
    tables = _describe_qwen(config)
    add_experts(config, tables)
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
    return _describe_qwen(config)


def describe_qwen3_5_moe(config: Config) -> Tables:
    """The same with experts."""
    tables = _describe_qwen(config.change({"intermediate_size": 1}))
    add_experts(config, tables)
    tables["moe"]["normalise_weights"] = True
    add_shared_experts(config, tables)
    return tables


def _describe_qwen(config: Config) -> Tables:
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
    _add_kinds(config, tables, "delta", lambda layer: (layer + 1) % interval == 0)
    tables["recurrence"] = {
        "key_heads": config.read("linear_num_key_heads", int, 16),
        "value_heads": config.read("linear_num_value_heads", int, 32),
        "key_dim": config.read("linear_key_head_dim", int, 128),
        "value_dim": config.read("linear_value_head_dim", int, 128),
        "kernel": config.read("linear_conv_kernel_dim", int, 4),
    }
    return tables


def _add_kinds(
    config: Config, tables: Tables, kind: str, is_attention: Callable[[int], bool]
) -> None:
    """State what mixes the tokens of each layer: ``layer_types``, else what ``is_attention``
    says."""
    layers = tables["shape"]["layers"]
    stated = config.read_list("layer_types") or config.read_list("layers_block_type")
    if not stated:
        stated = ["attention" if is_attention(n) else "linear_attention" for n in range(layers)]
    if len(stated) != layers or not all(type(item) is str and item in _KINDS for item in stated):
        raise config.refuse(f"layer_types is not a list of {layers} kinds of layers")
    kinds = [kind if _KINDS[item] == "linear" else "attention" for item in stated]
    if kind in kinds:
        tables["layers"] = {"kinds": kinds}


def describe_granite_hybrid(config: Config) -> Tables:
    """Granite with Mamba-2 in most layers, and a shared FFN beside its experts, or alone."""
    experts = config.read("num_local_experts", int, 8)
    shared = config.read("shared_intermediate_size", int, 1024)
    own = config.read("intermediate_size", int) if experts else shared
    tables = describe_granite(config.change({"intermediate_size": own, "mlp_bias": False}))
    tables["attention"]["output_bias"] = config.read("attention_bias", bool, False)
    if config.read("position_embedding_type", str, "none") != "rope":
        tables["rope"] = {"kind": "none"}
    width = int(config.read("mamba_expand", float, 2.0) * tables["shape"]["hidden"])
    add_mamba(config, tables, width)
    _add_kinds(config, tables, "mamba", lambda layer: False)
    if not experts and config.read(SPLIT_EXPERTS, bool, False):
        return tables
    if not experts:
        tables["tensors"] |= {
            "fused_gate_up": f"{LAYER}.shared_mlp.input_linear.weight",
            "down": f"{LAYER}.shared_mlp.output_linear.weight",
        }
        return tables
    if own < 1:
        raise config.refuse(f"intermediate_size is {own}")
    tables["moe"] = {
        "experts": experts,
        "active_experts": config.read("num_experts_per_tok", int, 2),
        "shared_experts": -(-shared // own),
    }
    tables["moe"] |= {"shared_ffn": shared} if shared % own else {}
    tables["tensors"] |= name_granite_experts(config)
    return tables


def describe_bamba(config: Config) -> Tables:
    """Llama with Mamba-2 in most layers."""
    tables = describe_decoder(config, rotated=0.5)
    bias = config.read("attention_bias", bool, False)
    tables["attention"] = {"qkv_bias": bias, "output_bias": bias}
    chosen = config.read_list("attn_layer_indices")
    width = int(config.read("mamba_expand", float, 2.0) * tables["shape"]["hidden"])
    add_mamba(config, tables, width)
    _add_kinds(config, tables, "mamba", lambda layer: layer in chosen)
    tables["tensors"] |= {
        "ffn_norm": f"{LAYER}.pre_ff_layernorm.weight",
        "final_norm": "model.final_layernorm.weight",
        **{part: f"{LAYER}.feed_forward.{part}_proj.weight" for part in ("gate", "up", "down")},
    }
    return tables


def add_mamba(config: Config, tables: Tables, width: int, mamba: str = f"{LAYER}.mamba") -> None:
    """Sizes and names of Mamba-2 of ``width`` channels; ``mamba``: how its names begin."""
    if config.read("mamba_hidden_act", str, tables["ffn"]["activation"]) != "silu":
        raise config.refuse("hidden_act is not silu, which its convolutions apply")
    heads = config.read("mamba_n_heads", int, 128)
    if heads < 1 or width % heads:
        raise config.refuse(f"{width} channels are not divided by {heads} heads")
    groups = config.read("mamba_n_groups", int, 1)
    limits = [
        math.inf if isinstance(item, dict) else item for item in config.read_list("time_step_limit")
    ] or [0.0, math.inf]
    if len(limits) != 2 or not all(type(item) in (int, float) and item >= 0 for item in limits):
        raise config.refuse("time_step_limit is not two numbers")
    # An integer may be larger than any float.
    limits = [math.inf if item > sys.float_info.max else float(item) for item in limits]
    if math.isinf(limits[0]):
        raise config.refuse("time_step_limit begins with no number that a step can have")
    tables["recurrence"] = {
        "key_heads": groups,
        "value_heads": heads,
        "key_dim": config.read("mamba_d_state", int, 256),
        "value_dim": width // heads,
        "kernel": config.read("mamba_d_conv", int, 4),
        "convolution_bias": config.read("mamba_conv_bias", bool, True),
        "projection_bias": config.read("mamba_proj_bias", bool, False),
        "norm_groups": groups,
        "shortest_step": limits[0],
    }
    if math.isfinite(limits[1]):
        tables["recurrence"]["longest_step"] = limits[1]
    tables["tensors"] |= {
        "state_order": "mamba",
        "state_in": f"{mamba}.in_proj.weight",
        "state_in_bias": f"{mamba}.in_proj.bias",
        "state_convolution": f"{mamba}.conv1d.weight",
        "state_convolution_bias": f"{mamba}.conv1d.bias",
        "state_decay": f"{mamba}.A_log",
        "state_step": f"{mamba}.dt_bias",
        "state_skip": f"{mamba}.D",
        "state_norm": f"{mamba}.norm.weight",
        "state_output": f"{mamba}.out_proj.weight",
        "state_output_bias": f"{mamba}.out_proj.bias",
    }


def describe_lfm2(config: Config) -> Tables:
    """Short convolutions beside attention whose heads are normalised."""
    size = config.read_first(("block_ff_dim", "intermediate_size"), int)
    if config.read("block_auto_adjust_ff_dim", bool, True):
        size = int(2 * size / 3)
        size = int(config.read("block_ffn_dim_multiplier", float, 1.0) * size)
        multiple = config.read("block_multiple_of", int, 256)
        if multiple < 1:
            raise config.refuse(f"block_multiple_of is {multiple}")
        size = -(-size // multiple) * multiple
    tables = _describe_lfm2(config, size)
    tables["tensors"] |= _name_lfm2_ffn()
    return tables


def describe_lfm3(config: Config) -> Tables:
    """LFM3: LFM2 with norms of outputs, a gate for each head, and a window in some layers."""
    layers = config.read("num_hidden_layers", int)
    kinds = config.read_list("layer_types")
    if not kinds:
        places = ["sliding_attention", "conv", "full_attention", "conv"]
        kinds = [places[n % 4] if n else "conv" for n in range(layers)]
    others = ["full_attention" if kind == "sliding_attention" else kind for kind in kinds]
    size = config.read("intermediate_size", int)
    tables = _describe_lfm2(
        config.change({"layer_types": others}).set_default("conv_L_cache", 7), size
    )
    narrow = [n for n, kind in enumerate(kinds) if kind == "sliding_attention"]
    bias = config.read("attention_bias", bool, False)
    tables["attention"] |= {"qkv_bias": bias, "output_bias": bias}
    if config.read("use_attention_gate", bool, True):
        tables["attention"] |= {"output_gate": True, "output_gate_of": "head"}
        tables["tensors"]["query_gate"] = f"{LAYER}.self_attn.gate_proj.weight"
    if narrow:
        width = config.read("sliding_window", int, 256)
        tables["attention"] |= {"sliding_window": width, "window_layers": narrow}
    whole = {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6}
    both = config.set_default("rope_parameters", {"full_attention": whole})
    both = both.read_table("rope_parameters")
    full, local = (
        both.read_table(f"{kind}_attention").set_default("rope_theta", theta)
        for kind, theta in (("full", 1_000_000.0), ("sliding", 10_000.0))
    )
    add_turns(config, tables, full, local, share=1.0)
    names = {"query_norm": "q_norm", "key_norm": "k_norm", "output": "o_proj"}
    tables["tensors"] |= {key: f"{LAYER}.self_attn.{name}.weight" for key, name in names.items()}
    if config.read("use_sandwich_norm", bool, True):
        tables["norm"]["outputs"] = True
        tables["tensors"] |= {
            "attention_output_norm": f"{LAYER}.post_operator_norm.weight",
            "ffn_output_norm": f"{LAYER}.post_ffn_norm.weight",
        }
    tables["tensors"] |= _name_lfm2_ffn()
    return tables


def _name_lfm2_ffn() -> Tables:
    """Names of an FFN that is no mixture."""
    names = (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    return {part: f"{LAYER}.feed_forward.{name}.weight" for part, name in names}


def describe_lfm2_moe(config: Config) -> Tables:
    """LFM2 with experts behind its first layers, weighted by sigmoids."""
    tables = _describe_lfm2(config, config.read("intermediate_size", int))
    dense, ffn = tables["shape"]["ffn"], config.read("moe_intermediate_size", int)
    if ffn < 1:
        raise config.refuse(f"moe_intermediate_size is {ffn}")
    tables["shape"]["ffn"] = ffn
    tables["moe"] = {
        "experts": config.read_first(("num_experts", "num_local_experts"), int),
        "active_experts": config.read("num_experts_per_tok", int, 4),
        "router": "sigmoid",
        "choice_bias": config.read("use_expert_bias", bool, True),
        "normalise_weights": config.read("norm_topk_prob", bool, True),
        "scaling": config.read("routed_scaling_factor", float, 1.0),
    }
    add_dense_layers(tables, dense, range(config.read("num_dense_layers", int, 2)))
    block = f"{LAYER}.feed_forward"
    tables["tensors"] |= {
        "router": f"{block}.gate.weight",
        "choice_bias": f"{block}.expert_bias",
    }
    for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        tables["tensors"] |= {
            part: f"{block}.experts.{{expert}}.{name}.weight",
            f"dense_{part}": f"{block}.{name}.weight",
        }
    return tables


def _describe_lfm2(config: Config, ffn: int) -> Tables:
    """What LFM2 with and without experts share."""
    theta = config.read("theta", float, config.read("rope_theta", float, 1_000_000.0))
    tables = describe_decoder(
        config.change({"intermediate_size": ffn, "hidden_act": "silu", "rope_theta": theta})
    )
    epsilon = config.read("block_norm_eps", float, config.read("norm_eps", float, 1e-5))
    tables["norm"] = {"epsilon": config.read("norm_eps", float, epsilon)}
    tables["attention"] = {"head_norm": True}
    tables["tied_head"] = config.read(
        "tie_word_embeddings", bool, config.read("tie_embedding", bool, True)
    )
    chosen = config.read_list("full_attn_idxs")
    _add_kinds(config, tables, "convolution", lambda layer: not chosen or layer in chosen)
    tables["convolution"] = {
        "width": tables["shape"]["hidden"],
        "kernel": config.read("conv_L_cache", int, 3),
        "bias": config.read("conv_bias", bool, False),
    }
    conv = f"{LAYER}.conv"
    tables["tensors"] |= {
        "attention_norm": f"{LAYER}.operator_norm.weight",
        "ffn_norm": f"{LAYER}.ffn_norm.weight",
        "final_norm": "model.embedding_norm.weight",
        "query_norm": f"{LAYER}.self_attn.q_layernorm.weight",
        "key_norm": f"{LAYER}.self_attn.k_layernorm.weight",
        "output": f"{LAYER}.self_attn.out_proj.weight",
        "state_order": "convolution",
        "state_in": f"{conv}.in_proj.weight",
        "state_in_bias": f"{conv}.in_proj.bias",
        "state_convolution": f"{conv}.conv.weight",
        "state_convolution_bias": f"{conv}.conv.bias",
        "state_output": f"{conv}.out_proj.weight",
        "state_output_bias": f"{conv}.out_proj.bias",
    }
    return tables


FAMILIES = {
    "bamba": describe_bamba,
    "granitemoehybrid": describe_granite_hybrid,
    "lfm2": describe_lfm2,
    "lfm2_moe": describe_lfm2_moe,
    "lfm3": describe_lfm3,
    "qwen3_5_moe_text": describe_qwen3_5_moe,
    "qwen3_5_text": describe_qwen3_5,
    "qwen3_next": describe_qwen3_next,
}
