"""Flint: Qwen3's experts without bias, sinks, and positions where there is a window."""

from __future__ import annotations

from pi2.importing.config import Config, read_window
from pi2.importing.families.decoders import LAYER, Tables, omit_positions
from pi2.importing.families.qwen import add_shared_experts, describe_qwen3_moe


def describe_flint(config: Config) -> Tables:
    """Routers with sigmoids, and shared experts without a router of their own."""
    stated = {"use_sliding_window": False, "norm_topk_prob": True}
    config = config.change({key: config.values.get(key, stated[key]) for key in stated})
    if config.values.get("mlp_only_layers") is None:
        config = config.change({"mlp_only_layers": [0, 1]})
    tables = describe_qwen3_moe(config)
    layers = tables["shape"]["layers"]
    last = layers - 1

    def has_window(layer: int) -> bool:
        return layer >= 2 and layer % 4 != 1 and layer != last

    tables["attention"]["sinks"] = True
    window = read_window(config, layers, has_window, width=513)
    tables["attention"] |= window
    turned = window.get("window_layers", range(layers)) if window else ()
    tables |= omit_positions(set(range(layers)) - set(turned))
    tables["moe"]["router"] = "sigmoid"
    add_shared_experts(config.set_default("shared_expert_intermediate_size", 1024), tables)
    tables["moe"].pop("shared_gate", None)
    tables["tensors"]["sinks"] = f"{LAYER}.self_attn.softmax_offset"
    return tables


FAMILIES = {"flint": describe_flint}
