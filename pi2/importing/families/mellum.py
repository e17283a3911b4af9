"""Mellum 2."""

from __future__ import annotations

from pi2.importing.config import Config, read_window
from pi2.importing.families.decoders import Tables, add_turns
from pi2.importing.families.experts import add_dense_layers, list_dense_layers
from pi2.importing.families.qwen import describe_qwen3_moe


def describe_mellum(config: Config) -> Tables:
    """Qwen3 with experts, whose layers with a window have other positions."""
    tables = describe_qwen3_moe(config)
    layers = tables["shape"]["layers"]
    tables["attention"] |= read_window(config, layers, lambda layer: False, width=1024)
    both = config.read_table("rope_parameters")
    full, local = both.read_table("full_attention"), both.read_table("sliding_attention")
    full = full.set_default("rope_theta", 500_000.0)
    add_turns(config, tables, full, local.set_default("rope_theta", 10_000.0))
    dense = config.read("intermediate_size", int)
    tables["moe"]["normalise_weights"] = config.read("norm_topk_prob", bool, True)
    add_dense_layers(tables, dense, list_dense_layers(config, layers, 0))
    return tables


FAMILIES = {"mellum": describe_mellum}
