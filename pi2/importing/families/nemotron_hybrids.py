"""Nemotron-H: Mamba-2, attention and FFNs with the square of ReLU, each a block of its own."""

from __future__ import annotations

import math

from pi2.importing.blocks import describe_layers
from pi2.importing.config import Config
from pi2.importing.families.decoders import LAYER, Tables, describe_decoder
from pi2.importing.families.experts import (
    SHARED,
    add_dense_layers,
    add_sigmoids,
    name_experts,
)
from pi2.importing.families.states import add_mamba


def describe_nemotron_h(config: Config) -> Tables:
    """Blocks as layers of some mixers and an FFN; no positions are turned."""
    layers = describe_layers(config.values)
    if isinstance(layers, str):
        raise config.refuse(layers)
    own = {
        "num_hidden_layers": len(layers),
        "hidden_act": config.read("mlp_hidden_act", str, "relu2"),
        "rms_norm_eps": config.read("layer_norm_epsilon", float, 1e-5),
    }
    tables = describe_decoder(config.change(own))
    tables["rope"] = {"kind": "none"}
    tables["ffn"] |= {"gated": False, "bias": config.read("mlp_bias", bool, False)}
    tables["layers"] = {"kinds": ["+".join(layer.mixers) or "none" for layer in layers]}
    absent = [number for number, layer in enumerate(layers) if not layer.ffn]
    tables["ffn"] |= {"absent_layers": absent} if absent else {}
    heads, head_dim = config.read("mamba_num_heads", int), config.read("mamba_head_dim", int)
    sizes = {
        "mamba_n_heads": heads,
        "mamba_n_groups": config.read("n_groups", int, 8),
        "mamba_d_state": config.read("ssm_state_size", int, 128),
        "mamba_d_conv": config.read("conv_kernel", int, 4),
        "mamba_conv_bias": config.read("use_conv_bias", bool, True),
        "mamba_proj_bias": config.read("use_bias", bool, False),
        "mamba_hidden_act": config.read("mamba_hidden_act", str, "silu"),
        # The code of transformers knows no other limit.
        "time_step_limit": [config.read("time_step_min", float, 0.001), math.inf],
    }
    add_mamba(config.change(sizes), tables, heads * head_dim, f"{LAYER}.mamba.{{mixer}}")
    tables["tensors"] |= {
        "up": f"{LAYER}.mlp.up_proj.weight",
        "down": f"{LAYER}.mlp.down_proj.weight",
    }
    dense = [number for number, layer in enumerate(layers) if layer.ffn == "mlp"]
    if any(layer.ffn == "moe" for layer in layers):
        _add_experts(config, tables, dense)
    return tables


def _add_experts(config: Config, tables: Tables, dense: list[int]) -> None:
    """Experts without gates; ``dense``: layers that have one FFN instead."""
    ffn, size = config.read("moe_intermediate_size", int), tables["shape"]["ffn"]
    shared = config.read("moe_shared_expert_intermediate_size", int)
    if ffn < 1 or shared < 1:
        raise config.refuse(f"experts have {ffn} neurons, and {shared} shared ones")
    tables["shape"]["ffn"] = ffn
    tables["moe"] = {
        "experts": config.read_first(("n_routed_experts", "num_local_experts"), int),
        "active_experts": config.read("num_experts_per_tok", int),
        "scaling": config.read("routed_scaling_factor", float, 1.0),
    }
    add_sigmoids(config, tables, 1, 1)
    names = name_experts(f"{LAYER}.mlp", shared=SHARED.rpartition(".")[2])
    names = {key: name for key, name in names.items() if "gate_proj" not in name}
    if config.has("moe_latent_size"):
        tables["moe"]["latent"] = config.read("moe_latent_size", int)
        tables["side_ffn"] = {"width": shared, "norms": False}
        for part in ("up", "down"):
            names[f"side_{part}"] = names.pop(f"shared_{part}")
    else:
        tables["moe"]["shared_experts"] = -(-shared // ffn)
        tables["moe"] |= {"shared_ffn": shared} if shared % ffn else {}
    add_dense_layers(tables, size, dense)
    tables["tensors"] |= names


FAMILIES = {"nemotron_h": describe_nemotron_h}
