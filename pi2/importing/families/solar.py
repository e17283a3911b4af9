"""Solar Open."""

from __future__ import annotations

from pi2.importing.config import Config
from pi2.importing.families.decoders import Tables, describe_decoder
from pi2.importing.families.experts import add_experts, add_sigmoids


def describe_solar_open(config: Config) -> Tables:
    """Solar Open: GLM 4.5 that turns whole heads, with experts in all layers."""
    ffn = config.read("moe_intermediate_size", int)
    tables = describe_decoder(config.change({"intermediate_size": ffn}))
    tables["attention"] = {"qkv_bias": config.read("attention_bias", bool, False)}
    add_experts(config.change({"first_k_dense_replace": 0}), tables)
    add_sigmoids(config, tables, 1, 1)
    return tables


FAMILIES = {"solar_open": describe_solar_open}
