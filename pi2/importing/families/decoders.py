"""What families have in common: decoders, experts, layers with states."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from typing import Any

from pi2.importing.config import Config, read_activation, read_rope, scale_rope

Tables = dict[str, Any]

LAYER = "model.layers.{layer}"


def describe_decoder(config: Config, rotated: float | None = None) -> Tables:
    """What Llama's descendants share: RMSNorm, gated FFN, rotary positions.

    ``rotated`` is the part of a head that is rotated where the configuration states none; None
    where it is the whole, whatever that says.
    """
    layers = config.read("num_hidden_layers", int)
    hidden, heads = config.read("hidden_size", int), config.read("num_attention_heads", int)
    if heads < 1 or (hidden % heads and not config.has("head_dim")):
        raise config.refuse(f"hidden_size {hidden} is not divided by {heads} heads")
    head_dim = config.read("head_dim", int, hidden // heads)
    context = config.read("max_position_embeddings", int)
    activation = read_activation(config, "hidden_act", "hidden_activation")
    ffn: Tables = {"activation": activation}
    if activation == "fatrelu":
        ffn["threshold"] = config.read("hidden_act_param", float)
    return {
        "shape": {
            "layers": layers,
            "hidden": hidden,
            "ffn": config.read("intermediate_size", int),
            "heads": heads,
            "kv_heads": config.read("num_key_value_heads", int, heads),
            "head_dim": head_dim,
            "vocab": config.read("vocab_size", int),
            "context": context,
        },
        "norm": {"epsilon": config.read("rms_norm_eps", float, 1e-6)},
        "rope": read_rope(config, context, rotated),
        "attention": {},
        "ffn": ffn,
        "tied_head": config.read("tie_word_embeddings", bool, False),
        "tensors": {},
    }


def name_plain_ffn(up: str, down: str) -> Tables:
    """Names of the matrices and biases of an FFN without gates; ``up`` and ``down``: how the names
    of its two projections begin."""
    return {
        "up": f"{up}.weight",
        "up_bias": f"{up}.bias",
        "down": f"{down}.weight",
        "down_bias": f"{down}.bias",
    }


def omit_positions(layers: Iterable[int]) -> Tables:
    """The ``[other_rope]`` table of layers without positions."""
    chosen = sorted(layers)
    return {"other_rope": {"kind": "none", "layers": chosen}} if chosen else {}


def add_turns(
    config: Config, tables: Tables, full: Config, local: Config, share: float | None = None
) -> None:
    """State rotary positions of layers without a window, by the table ``full``, and of those with
    one, by ``local``; both state the base.  ``share``: see `scale_rope`."""
    context, layers = tables["shape"]["context"], tables["shape"]["layers"]
    tables["rope"], other = (
        scale_rope(config, table, table.read("rope_theta", float), context, share)
        for table in (full, local)
    )
    chosen = tables["attention"].get("window_layers", list(range(layers)))
    if "sliding_window" in tables["attention"] and other != tables["rope"]:
        tables["other_rope"] = {**other, "layers": chosen}


def add_growth(config: Config, tables: Tables) -> None:
    """State queries that grow with the position, where positions are scaled so."""
    scaling = config.read_table("rope_parameters")
    growth = scaling.read("llama_4_scaling_beta", float, 0.0)
    if growth:
        tables["attention"]["growth"] = growth
        original = scaling.read("original_max_position_embeddings", int)
        tables["rope"]["original_context"] = original


def has_cycle(length: int) -> Callable[[int], bool]:
    """Whether a layer has a window where every ``length``-th has none."""
    return lambda layer: length < 1 or (layer + 1) % length != 0


SHARED = f"{LAYER}.mlp.shared_experts"


def add_experts(config: Config, tables: Tables, active: int | None = None) -> None:
    """The table ``[moe]``, names and sizes of experts, which all of these families share."""
    ffn = config.read("moe_intermediate_size", int)
    if ffn < 1:
        raise config.refuse(f"moe_intermediate_size is {ffn}")
    tables["moe"] = {
        "experts": config.read_first(("n_routed_experts", "num_local_experts"), int),
        "active_experts": config.read("num_experts_per_tok", int, active),
        "shared_experts": config.read("n_shared_experts", int, 0),
        "scaling": config.read("routed_scaling_factor", float, 1.0),
    }
    dense = tables["shape"]["ffn"]
    tables["shape"]["ffn"] = ffn
    tables["tensors"] |= name_experts(f"{LAYER}.mlp", shared="shared_experts")
    add_dense_layers(tables, dense, range(config.read("first_k_dense_replace", int, 0)))


def add_listed_experts(config: Config, tables: Tables, first: int) -> None:
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


def name_experts(block: str, shared: str) -> Tables:
    """Names of router, experts and shared experts."""
    parts = ("gate", "up", "down")
    return {
        "router": f"{block}.gate.weight",
        "choice_bias": f"{block}.gate.e_score_correction_bias",
        **{part: f"{block}.experts.{{expert}}.{part}_proj.weight" for part in parts},
        **{f"shared_{part}": f"{block}.{shared}.{part}_proj.weight" for part in parts},
    }


def add_dense_layers(tables: Tables, ffn: int, layers: range | list[int]) -> None:
    """State the layers that have one FFN of ``ffn`` neurons."""
    # A checkpoint may state any number of them: only those that there are can be gone through.
    chosen = [layer for layer in range(tables["shape"]["layers"]) if layer in layers]
    if chosen:
        tables["moe"] |= {"dense_layers": chosen, "dense_ffn": ffn}


def list_dense_layers(config: Config, layers: int, first: int) -> list[int]:
    """Layers that are no mixture: those of ``mlp_layer_types``, else of ``moe_layer_freq`` where
    that is a list, as in older configurations, else the ``first`` ones."""
    kinds, older = config.read_list("mlp_layer_types"), config.values.get("moe_layer_freq")
    if not kinds and isinstance(older, list):
        if len(older) != layers:
            raise config.refuse(f"moe_layer_freq is not a list of {layers} numbers")
        return [layer for layer, is_mixture in enumerate(older) if not is_mixture]
    if not kinds:
        return list(range(min(first, layers)))
    if len(kinds) != layers or not all(kind in ("dense", "sparse") for kind in kinds):
        raise config.refuse(f"mlp_layer_types is not a list of {layers} kinds of FFNs")
    return [layer for layer, kind in enumerate(kinds) if kind == "dense"]


def add_sigmoids(config: Config, tables: Tables, groups: int, active_groups: int) -> None:
    """Routing as DeepSeek V3 does it."""
    tables["moe"] |= {
        "router": "sigmoid",
        "choice_bias": True,
        "normalise_weights": config.read("norm_topk_prob", bool, True),
        "groups": config.read("n_group", int, groups),
        "active_groups": config.read("topk_group", int, active_groups),
    }


_KINDS = {
    "full_attention": "attention",
    "attention": "attention",
    "linear_attention": "linear",
    "mamba": "linear",
    "conv": "linear",
}
"""Whether layers are attention, by their names in configurations."""


def add_kinds(
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


def add_first_mamba(
    config: Config, tables: Tables, width: int, rank: str | None, mamba: str
) -> None:
    """Sizes and names of the first Mamba of ``width`` channels; ``rank``: the key that states what
    step sizes are made of, None where it is a sixteenth of the residual stream; ``mamba``: how its
    names begin."""
    if config.read("mamba_hidden_act", str, tables["ffn"]["activation"]) != "silu":
        raise config.refuse("hidden_act is not silu, which its convolutions apply")
    least = -(-tables["shape"]["hidden"] // 16)
    tables["recurrence"] = {
        "key_heads": 1,
        "value_heads": 1,
        "key_dim": config.read("mamba_d_state", int, 16),
        "value_dim": width,
        "kernel": config.read("mamba_d_conv", int, 4),
        "step_rank": least if rank is None else config.read(rank, int, least),
        "convolution_bias": config.read("mamba_conv_bias", bool, True),
        "projection_bias": config.read("mamba_proj_bias", bool, False),
    }
    tables["tensors"] |= {
        "state_order": "mamba1",
        "state_in": f"{mamba}.in_proj.weight",
        "state_in_bias": f"{mamba}.in_proj.bias",
        "state_convolution": f"{mamba}.conv1d.weight",
        "state_convolution_bias": f"{mamba}.conv1d.bias",
        "state_parts": f"{mamba}.x_proj.weight",
        "state_steps": f"{mamba}.dt_proj.weight",
        "state_decay": f"{mamba}.A_log",
        "state_step": f"{mamba}.dt_proj.bias",
        "state_skip": f"{mamba}.D",
        "state_step_norm": f"{mamba}.dt_layernorm.weight",
        "state_key_norm": f"{mamba}.b_layernorm.weight",
        "state_query_norm": f"{mamba}.c_layernorm.weight",
        "state_output": f"{mamba}.out_proj.weight",
        "state_output_bias": f"{mamba}.out_proj.bias",
    }
