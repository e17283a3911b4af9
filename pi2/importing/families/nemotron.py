"""Nemotron 4: LayerNorm, and FFNs with the square of ReLU."""

from __future__ import annotations

from pi2.importing.config import Config
from pi2.importing.families.decoders import Tables, describe_decoder


def describe_nemotron(config: Config) -> Tables:
    """LayerNorm that is stored less 1, and an FFN without gates."""
    tables = describe_decoder(config, rotated=0.5)
    bias = config.read("attention_bias", bool, False)
    tables["norm"] = {
        "kind": "layernorm",
        "epsilon": config.read("norm_eps", float, 1e-5),
        "bias": True,
        "weight_offset": 1.0,
    }
    tables["attention"] = {"qkv_bias": bias, "output_bias": bias}
    tables["ffn"] |= {"gated": False, "bias": config.read("mlp_bias", bool, False)}
    return tables


FAMILIES = {"nemotron": describe_nemotron}
