"""Mamba-2 alone: layers without attention, without positions, and without FFN."""

from __future__ import annotations

from pi2.importing.config import Config
from pi2.importing.families.decoders import Tables, describe_decoder
from pi2.importing.families.states import add_mamba

_LAYER = "backbone.layers.{layer}"
_ENDLESS = 2**20
"""Tokens of a sequence that a model is said to have been made for: states have no end."""


def describe_mamba2(config: Config) -> Tables:
    """Layers of Mamba-2, each behind a norm."""
    config.demand("rms_norm", True, True)
    heads, head_dim = config.read("num_heads", int, 128), config.read("head_dim", int, 64)
    own = {
        # Of attention there is nothing: these are sizes that nobody computes.
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "intermediate_size": 1,
        "hidden_act": config.read("hidden_act", str, "silu"),
        "max_position_embeddings": _ENDLESS,
        "rms_norm_eps": config.read("layer_norm_epsilon", float, 1e-5),
        "mamba_n_heads": heads,
        "mamba_n_groups": config.read("n_groups", int, 8),
        "mamba_d_state": config.read("state_size", int, 128),
        "mamba_d_conv": config.read("conv_kernel", int, 4),
        "mamba_conv_bias": config.read("use_conv_bias", bool, True),
        "mamba_proj_bias": config.read("use_bias", bool, False),
    }
    config = config.change(own)
    tables = describe_decoder(config)
    layers = tables["shape"]["layers"]
    tables["rope"] = {"kind": "none"}
    tables["layers"] = {"kinds": ["mamba"] * layers}
    tables["ffn"] |= {"gated": False, "absent_layers": list(range(layers))}
    add_mamba(config, tables, heads * head_dim, f"{_LAYER}.mixer")
    tables["tensors"] |= {
        "embedding": "backbone.embeddings.weight",
        "attention_norm": f"{_LAYER}.norm.weight",
        "final_norm": "backbone.norm_f.weight",
    }
    return tables


FAMILIES = {"mamba2": describe_mamba2}
