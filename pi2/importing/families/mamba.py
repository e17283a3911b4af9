"""Mamba and Mamba-2 alone: layers without attention, without positions, and without FFN."""

from __future__ import annotations

from pi2.importing.config import Config
from pi2.importing.families.decoders import Tables, describe_decoder
from pi2.importing.families.states import add_first_mamba, add_mamba

_LAYER = "backbone.layers.{layer}"
_ENDLESS = 2**20
"""Tokens of a sequence that a model is said to have been made for: states have no end."""


def describe_mamba2(config: Config) -> Tables:
    """Layers of Mamba-2, each behind a norm."""
    config.demand("rms_norm", True, True)
    heads, head_dim = config.read("num_heads", int, 128), config.read("head_dim", int, 64)
    own = {
        "mamba_n_heads": heads,
        "mamba_n_groups": config.read("n_groups", int, 8),
        "mamba_d_state": config.read("state_size", int, 128),
    }
    config = _rename(config).change(own)
    tables = _describe_states(config, head_dim, "mamba")
    add_mamba(config, tables, heads * head_dim, f"{_LAYER}.mixer")
    return tables


def describe_mamba(config: Config) -> Tables:
    """Layers of the first Mamba, each behind a norm."""
    config = _rename(config)
    tables = _describe_states(config, 2, "mamba1")
    tables["tied_head"] = config.read("tie_word_embeddings", bool, True)
    hidden = tables["shape"]["hidden"]
    width = config.read("intermediate_size", int, config.read("expand", int, 2) * hidden)
    rank = None if config.values.get("time_step_rank") == "auto" else "time_step_rank"
    add_first_mamba(config, tables, width, rank, f"{_LAYER}.mixer")
    return tables


def describe_falcon_mamba(config: Config) -> Tables:
    """Mamba with norms, which have no weights, of what step sizes are made of, B and C."""
    tables = describe_mamba(config)
    epsilon = config.read("mixer_rms_eps", float, 1e-6)
    tables["recurrence"] |= {"part_norm": "plain", "part_epsilon": epsilon}
    return tables


def _rename(config: Config) -> Config:
    """The configuration with the keys that hybrids have."""
    return config.change(
        {
            "mamba_d_state": config.read("state_size", int, 16),
            "mamba_d_conv": config.read("conv_kernel", int, 4),
            "mamba_conv_bias": config.read("use_conv_bias", bool, True),
            "mamba_proj_bias": config.read("use_bias", bool, False),
        }
    )


def _describe_states(config: Config, head_dim: int, kind: str) -> Tables:
    """Layers of a ``kind`` alone, each behind a norm."""
    # Of attention there is nothing: these are sizes that nobody computes.
    own = {
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "intermediate_size": 1,
        "hidden_act": config.read("hidden_act", str, "silu"),
        "max_position_embeddings": _ENDLESS,
        "rms_norm_eps": config.read("layer_norm_epsilon", float, 1e-5),
    }
    tables = describe_decoder(config.change(own))
    layers = tables["shape"]["layers"]
    tables["rope"] = {"kind": "none"}
    tables["layers"] = {"kinds": [kind] * layers}
    tables["ffn"] |= {"gated": False, "absent_layers": list(range(layers))}
    tables["tensors"] |= {
        "embedding": "backbone.embeddings.weight",
        "attention_norm": f"{_LAYER}.norm.weight",
        "final_norm": "backbone.norm_f.weight",
    }
    return tables


FAMILIES = {
    "falcon_mamba": describe_falcon_mamba,
    "mamba": describe_mamba,
    "mamba2": describe_mamba2,
}
