"""Bamba: Llama with Mamba-2."""

from __future__ import annotations

from pi2.importing.config import Config
from pi2.importing.families.decoders import LAYER, Tables, describe_decoder
from pi2.importing.families.states import add_kinds, add_mamba


def describe_bamba(config: Config) -> Tables:
    """Llama with Mamba-2 in most layers."""
    tables = describe_decoder(config, rotated=0.5)
    bias = config.read("attention_bias", bool, False)
    tables["attention"] = {"qkv_bias": bias, "output_bias": bias}
    chosen = config.read_list("attn_layer_indices")
    width = int(config.read("mamba_expand", float, 2.0) * tables["shape"]["hidden"])
    add_mamba(config, tables, width)
    add_kinds(config, tables, "mamba", lambda layer: layer in chosen)
    tables["tensors"] |= {
        "ffn_norm": f"{LAYER}.pre_ff_layernorm.weight",
        "final_norm": "model.final_layernorm.weight",
        **{part: f"{LAYER}.feed_forward.{part}_proj.weight" for part in ("gate", "up", "down")},
    }
    return tables


FAMILIES = {"bamba": describe_bamba}
