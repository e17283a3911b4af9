"""ERNIE 4.5: dense and with experts."""

from __future__ import annotations

from pi2.importing.config import Config
from pi2.importing.families.decoders import LAYER, Tables, describe_decoder
from pi2.importing.families.experts import add_dense_layers, name_experts


def describe_ernie(config: Config) -> Tables:
    """ERNIE 4.5: neighbours are rotated."""
    tables = describe_decoder(config)
    bias = config.read("use_bias", bool, False)
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, 1e-5)
    tables["rope"]["pairs"] = "neighbours"
    tables["attention"] = {"qkv_bias": bias, "output_bias": bias}
    tables["ffn"]["bias"] = bias
    tables["tied_head"] = config.read("tie_word_embeddings", bool, True)
    return tables


def describe_ernie_moe(config: Config) -> Tables:
    """ERNIE 4.5 with experts that a softmax weights and a bias helps to choose."""
    config.demand("use_bias", False, False)
    tables = describe_ernie(config)
    layers, dense = tables["shape"]["layers"], tables["shape"]["ffn"]
    if config.read("moe_norm_min", float, 1e-12) > 1e-6:
        raise config.refuse(f"moe_norm_min is {config.read('moe_norm_min', float)}")
    tables["shape"]["ffn"] = config.read("moe_intermediate_size", int)
    tables["moe"] = {
        "experts": config.read_first(("moe_num_experts", "num_experts"), int),
        "active_experts": config.read_first(("moe_k", "num_experts_per_tok"), int),
        "shared_experts": config.read("moe_num_shared_experts", int, 0),
        "choice_bias": True,
    }
    first, last = config.read("moe_layer_start_index", int, 1), layers - 1
    if config.read("moe_layer_end_index", int, -1) != -1:
        last = config.read("moe_layer_end_index", int)
    every = max(1, config.read("moe_layer_interval", int, 1))
    mixed = [n for n in range(layers) if (n + 1) % every == 0 and first <= n <= last]
    add_dense_layers(tables, dense, [n for n in range(layers) if n not in mixed])
    tables["tensors"] = name_experts(f"{LAYER}.mlp", shared="shared_experts")
    tables["tensors"]["choice_bias"] = f"{LAYER}.mlp.moe_statics.e_score_correction_bias"
    return tables


FAMILIES = {
    "ernie4_5": describe_ernie,
    "ernie4_5_moe": describe_ernie_moe,
}
