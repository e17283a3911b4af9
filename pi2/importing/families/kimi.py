"""Kimi Linear: a delta rule whose decays are of keys, and latent attention without positions."""

from __future__ import annotations

from typing import Any

from pi2.importing.config import Config
from pi2.importing.families.decoders import LAYER, Tables
from pi2.importing.families.deepseek import describe_latent
from pi2.importing.families.experts import (
    add_dense_layers,
    add_experts,
    add_sigmoids,
    list_dense_layers,
)
from pi2.importing.families.states import add_kinds

NAMES = {
    "max_position_embeddings": "model_max_length",
    "n_group": "num_expert_group",
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
}
"""Keys as these families write them, by the names that others have for them."""


def rename_keys(config: Config, defaults: dict[str, Any]) -> Config:
    """The configuration with the keys of other families, ``defaults`` where they are absent."""
    values = {key: config.values[old] for key, old in NAMES.items() if config.has(old)}
    config = config.change(values)
    for key, value in defaults.items():
        config = config.set_default(key, value)
    return config


def describe_kimi_linear(config: Config) -> Tables:
    """Three layers of the delta rule, then one of attention, or as the configuration says."""
    config = rename_keys(
        config,
        {
            "max_position_embeddings": 2**20,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.446,
            "num_experts_per_tok": 8,
            "rms_norm_eps": 1e-5,
        },
    )
    tables = describe_latent(config)
    tables["rope"] = {"kind": "none"}
    layers, own = tables["shape"]["layers"], config.read_table("linear_attn_config")
    listed = {layer - 1 for layer in own.read_list("full_attn_layers") if type(layer) is int}
    is_listed = own.has("full_attn_layers") and own.has("kda_layers")
    add_kinds(config, tables, "delta", lambda n: n in listed if is_listed else n > 0 and n % 4 == 0)
    size = own.read("head_dim", int, config.read("linear_head_dim", int, 128))
    heads = own.read("num_heads", int, config.read("linear_num_heads", int, 32))
    kernel = config.read("linear_conv_kernel_dim", int, 4)
    add_key_decays(tables, heads, size, own.read("short_conv_kernel_size", int, kernel))
    tables["recurrence"] |= {"decay_rank": size, "gate_rank": size}
    block = f"{LAYER}.self_attn"
    tables["tensors"] |= {
        **name_delta(block, "o_proj"),
        "state_gate": f"{block}.g_a_proj.weight",
        "state_alpha": f"{block}.f_a_proj.weight",
    }
    dense = tables["shape"]["ffn"]
    add_experts(config.change({"first_k_dense_replace": 0}), tables)
    first = config.read("first_k_dense_replace", int, 1)
    add_dense_layers(tables, dense, list_dense_layers(config, layers, first))
    add_sigmoids(config, tables, 1, 1)
    tables["tensors"] |= name_kimi_experts(f"{LAYER}.block_sparse_moe")
    return tables


def add_key_decays(tables: Tables, heads: int, size: int, kernel: int) -> None:
    """Sizes of a delta rule whose decays are of keys, and whose gates go through a sigmoid."""
    tables["recurrence"] = {
        "key_heads": heads,
        "value_heads": heads,
        "key_dim": size,
        "value_dim": size,
        "kernel": kernel,
        "decay_of": "key",
        "gate": "sigmoid",
    }


def name_delta(block: str, output: str) -> Tables:
    """Names of a delta rule's tensors, which begin with ``block``."""
    return {
        "state_order": "single",
        "state_in": f"{block}.q_proj.weight",
        "state_key": f"{block}.k_proj.weight",
        "state_value": f"{block}.v_proj.weight",
        "state_gate": f"{block}.g_proj.weight",
        "state_output_gates": f"{block}.g_b_proj.weight",
        "state_beta": f"{block}.b_proj.weight",
        "state_alpha": f"{block}.f_proj.weight",
        "state_decays": f"{block}.f_b_proj.weight",
        "state_convolution": f"{block}.q_conv1d.weight",
        "state_key_convolution": f"{block}.k_conv1d.weight",
        "state_value_convolution": f"{block}.v_conv1d.weight",
        "state_decay": f"{block}.A_log",
        "state_step": f"{block}.dt_bias",
        "state_norm": f"{block}.o_norm.weight",
        "state_output": f"{block}.{output}.weight",
    }


def name_kimi_experts(block: str) -> Tables:
    """Names of router, experts and shared experts."""
    parts = {"gate": "w1", "up": "w3", "down": "w2"}
    return {
        "router": f"{block}.gate.weight",
        "choice_bias": f"{block}.gate.e_score_correction_bias",
        **{part: f"{block}.experts.{{expert}}.{old}.weight" for part, old in parts.items()},
        **{f"shared_{part}": f"{block}.shared_experts.{part}_proj.weight" for part in parts},
    }


FAMILIES = {"kimi_linear": describe_kimi_linear}
