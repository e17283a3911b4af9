"""gpt-oss: sinks, biases everywhere, a clamped SwiGLU, and a window in every other layer."""

from __future__ import annotations

from pi2.importing.config import SPLIT_EXPERTS, Config, read_rope, read_window
from pi2.importing.families.decoders import LAYER, Tables, describe_decoder

SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""How positions are scaled where a configuration says nothing."""


def describe_gpt_oss(config: Config) -> Tables:
    """Experts whose matrices are in one tensor, columns where others have rows."""
    if not config.has("rope_parameters") and not config.has("rope_scaling"):
        config = config.change({"rope_parameters": SCALING})
    tables = describe_decoder(config)
    layers, context = tables["shape"]["layers"], tables["shape"]["context"]
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, 1e-5)
    tables["rope"] = read_rope(config, context, theta=150000.0)
    bias = config.read("attention_bias", bool, True)
    window = read_window(config, layers, lambda layer: layer % 2 == 0, width=128)
    tables["attention"] = {"qkv_bias": bias, "output_bias": bias, "sinks": True, **window}
    limit = config.read("swiglu_limit", float, 7.0)
    if limit <= 0:
        raise config.refuse(f"swiglu_limit is {limit}")
    tables["ffn"] = {
        # The code computes this, whatever hidden_act says.
        "activation": "silu",
        "bias": True,
        "slope": config.read("swiglu_alpha", float, 1.702),
        "limit": limit,
        "up_offset": 1.0,
    }
    tables["moe"] = {
        "experts": config.read_first(("num_local_experts", "num_experts"), int),
        "active_experts": config.read_first(("num_experts_per_tok", "experts_per_token"), int),
        "router_bias": True,
    }
    experts = f"{LAYER}.mlp.experts"
    tables["tensors"] = {
        "router": f"{LAYER}.mlp.router.weight",
        "router_bias": f"{LAYER}.mlp.router.bias",
        "sinks": f"{LAYER}.self_attn.sinks",
    }
    if config.read(SPLIT_EXPERTS, bool, False):
        for part in ("gate", "up", "down"):
            tables["tensors"] |= {
                part: f"{experts}.{{expert}}.{part}_proj.weight",
                f"{part}_bias": f"{experts}.{part}_proj_bias",
            }
        return tables
    tables["tensors"] |= {
        "fused_gate_up": f"{experts}.gate_up_proj.{{expert}}",
        "fused_gate_up_bias": f"{experts}.gate_up_proj_bias",
        "gate_up_order": "neighbours",
        "down": f"{experts}.down_proj.{{expert}}",
        "down_bias": f"{experts}.down_proj_bias",
        "experts_turned": True,
    }
    return tables


FAMILIES = {"gpt_oss": describe_gpt_oss}
