"""Layers that keep a state of fixed size instead of keys and values: which they are, and what
Mamba and Mamba-2 state."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

from pi2.importing.config import Config
from pi2.importing.families.decoders import LAYER, Tables

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
