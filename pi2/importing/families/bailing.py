"""Ling 3: a delta rule whose decays are of keys, and latent attention whose heads have gates."""

from __future__ import annotations

from pi2.importing.config import Config
from pi2.importing.families.decoders import LAYER, Tables
from pi2.importing.families.deepseek import describe_deepseek_v3
from pi2.importing.families.experts import add_dense_layers, list_dense_layers
from pi2.importing.families.kimi import add_key_decays, name_delta, rename_keys
from pi2.importing.families.states import add_kinds


def describe_bailing_hybrid(config: Config) -> Tables:
    """DeepSeek V3 with gates in every sixth layer, and Kimi's delta rule in the others."""
    config = rename_keys(
        config,
        {
            "max_position_embeddings": 2**18,
            "n_group": 8,
            "topk_group": 4,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "num_experts_per_tok": 8,
            "rope_theta": 6e6,
        },
    )
    dense = config.read("intermediate_size", int)
    # Queries are projected at once, whatever else is stated.
    values = {"first_k_dense_replace": 0, "q_lora_rank": None, "rope_interleave": True}
    tables = describe_deepseek_v3(config.change(values))
    layers, group = tables["shape"]["layers"], config.read("layer_group_size", int, 6)
    add_kinds(config, tables, "delta", lambda n: group > 0 and (n + 1) % group == 0)
    heads = tables["shape"]["heads"]
    # ``head_dim`` is that of rotated parts in what transformers writes.
    size = config.read("linear_head_dim", int, config.read("head_dim", int, 128))
    add_key_decays(tables, heads, size, config.read("short_conv_kernel_size", int, 4))
    if config.read("kda_safe_gate", bool, True):
        tables["recurrence"]["decay_floor"] = config.read("kda_lower_bound", float, -5.0)
    first = config.read("first_k_dense_replace", int, 2)
    add_dense_layers(tables, dense, list_dense_layers(config, layers, first))
    tables["attention"] |= {"output_gate": True, "output_gate_of": "head"}
    block = f"{LAYER}.attention"
    tables["tensors"] |= {
        **name_delta(block, "dense"),
        "embedding": "model.word_embeddings.weight",
        "query": f"{block}.q_proj.weight",
        "query_gate": f"{block}.g_proj.weight",
        "latent": f"{block}.kv_a_proj_with_mqa.weight",
        "latent_bias": f"{block}.kv_a_proj_with_mqa.bias",
        "latent_norm": f"{block}.kv_a_layernorm.weight",
        "latent_out": f"{block}.kv_b_proj.weight",
        "output": f"{block}.dense.weight",
        "output_bias": f"{block}.dense.bias",
        "choice_bias": f"{LAYER}.mlp.gate.expert_bias",
    }
    return tables


FAMILIES = {"bailing_hybrid": describe_bailing_hybrid}
