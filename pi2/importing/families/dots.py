"""dots.1."""

from __future__ import annotations

from pi2.importing.config import Config, read_window
from pi2.importing.families.decoders import Tables, describe_decoder
from pi2.importing.families.experts import add_experts, add_sigmoids


def describe_dots1(config: Config) -> Tables:
    """dots.1: norms of heads, as Qwen3 has them."""
    tables = describe_decoder(config)
    layers = tables["shape"]["layers"]
    bias = config.read("attention_bias", bool, False)
    first = config.read("max_window_layers", int, 62)
    tables["attention"] = {"qkv_bias": bias, "output_bias": bias, "head_norm": True}
    if config.has("sliding_window"):
        tables["attention"] |= read_window(config, layers, lambda layer: layer >= first)
    add_experts(config, tables)
    add_sigmoids(config, tables, 1, 1)
    tables["moe"]["normalise_weights"] = config.read("norm_topk_prob", bool, False)
    return tables


FAMILIES = {"dots1": describe_dots1}
