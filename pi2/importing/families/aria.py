"""The text of Aria."""

from __future__ import annotations

from pi2.importing.config import Config
from pi2.importing.families.decoders import LAYER, Tables, describe_decoder


def describe_aria(config: Config) -> Tables:
    """A decoder with experts and shared ones, whose matrices lie the other way."""
    config.demand("mlp_bias", False, False)
    config.demand("hidden_act", "silu", "silu")
    tables = describe_decoder(config)
    bias = config.read("attention_bias", bool, False)
    tables["attention"] = {"qkv_bias": bias, "output_bias": bias}
    tables["moe"] = {
        "experts": config.read("moe_num_experts", int, 8),
        "active_experts": config.read("moe_topk", int, 2),
        "shared_experts": config.read("moe_num_shared_experts", int, 2),
        "normalise_weights": True,
    }
    block = f"{LAYER}.mlp"
    tables["tensors"] |= {
        "router": f"{block}.router.weight",
        "fused_gate_up": f"{block}.experts.fc1.weight.{{expert}}",
        "down": f"{block}.experts.fc2.weight.{{expert}}",
        "experts_turned": True,
        **{
            f"shared_{part}": f"{block}.shared_experts.{part}_proj.weight"
            for part in ("gate", "up", "down")
        },
    }
    return tables


FAMILIES = {"aria_text": describe_aria}
