"""SmallThinker."""

from __future__ import annotations

from pi2.importing.config import Config
from pi2.importing.families.decoders import LAYER, Tables, describe_decoder, omit_positions


def describe_smallthinker(config: Config) -> Tables:
    """Experts with ReLU, chosen by the layer's input."""
    config.demand("moe_enable_early_router", True, True)
    config.demand("moe_enable_secondary_experts", False, False)
    values = {"hidden_act": "relu", "intermediate_size": config.read("moe_ffn_hidden_size", int)}
    tables = describe_decoder(config.change(values))
    layers = tables["shape"]["layers"]
    turned = config.read_list("rope_layout") or [1] * layers
    narrow = config.read_list("sliding_window_layout") or [0] * layers
    for key, flags in (("rope_layout", turned), ("sliding_window_layout", narrow)):
        if len(flags) != layers:
            raise config.refuse(f"{key} is not a list of {layers} numbers")
    window = [layer for layer in range(layers) if narrow[layer]]
    if window:
        tables["attention"]["sliding_window"] = config.read("sliding_window_size", int, 4096)
        if len(window) < layers:
            tables["attention"]["window_layers"] = window
    softmax = config.read("moe_primary_router_apply_softmax", bool, False)
    tables["moe"] = {
        "experts": config.read("moe_num_primary_experts", int),
        "active_experts": config.read("moe_num_active_primary_experts", int),
        "router": "softmax" if softmax else "sigmoid",
        "router_input": "layer",
    }
    tables["tied_head"] = config.read("tie_word_embeddings", bool, True)
    block = f"{LAYER}.block_sparse_moe"
    tables["tensors"] = {
        "router": f"{block}.primary_router.weight",
        **{part: f"{block}.experts.{{expert}}.{part}.weight" for part in ("gate", "up", "down")},
    }
    return tables | omit_positions(layer for layer in range(layers) if not turned[layer])


FAMILIES = {"smallthinker": describe_smallthinker}
