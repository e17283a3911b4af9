"""Phi 1 to 3, and Phi-3.5-MoE."""

from __future__ import annotations

from pi2.importing.config import Config, read_whole_window
from pi2.importing.families.decoders import LAYER, Tables, describe_decoder, name_plain_ffn
from pi2.importing.families.mistral import describe_mistral


def describe_phi(config: Config) -> Tables:
    """One norm for attention and FFN, side by side; biases everywhere, in the head too."""
    config.demand("qk_layernorm", False, False)
    tables = describe_decoder(config, rotated=0.5)
    epsilon = config.read("layer_norm_eps", float, 1e-5)
    tables["norm"] = {"kind": "layernorm", "epsilon": epsilon, "bias": True}
    tables["attention"] = {"qkv_bias": True, "output_bias": True}
    tables["residual"] = "parallel"
    tables["ffn"] |= {"gated": False, "bias": True}
    tables["head_bias"] = True
    tables["tensors"] = {
        "ffn_norm": f"{LAYER}.input_layernorm.weight",
        "ffn_norm_bias": f"{LAYER}.input_layernorm.bias",
        "output": f"{LAYER}.self_attn.dense.weight",
        "output_bias": f"{LAYER}.self_attn.dense.bias",
        **name_plain_ffn(f"{LAYER}.mlp.fc1", f"{LAYER}.mlp.fc2"),
        "final_norm": "model.final_layernorm.weight",
        "final_norm_bias": "model.final_layernorm.bias",
    }
    return tables


def describe_phi3(config: Config) -> Tables:
    """Mistral with query, key and value in one tensor, and gate and up in another."""
    tables = describe_decoder(config, rotated=1.0)
    tables["attention"] = read_whole_window(config)
    tables["tensors"] = {
        "fused_qkv": f"{LAYER}.self_attn.qkv_proj.weight",
        "fused_gate_up": f"{LAYER}.mlp.gate_up_proj.weight",
    }
    return tables


def describe_phimoe(config: Config) -> Tables:
    """Phi-3.5-MoE: LayerNorm, biases, and two experts that SparseMixer chooses."""
    tables = describe_mistral(config)
    bias = config.read("attention_bias", bool, False)
    epsilon = config.read("rms_norm_eps", float, 1e-5)
    tables["norm"] = {"kind": "layernorm", "epsilon": epsilon, "bias": True}
    tables["attention"] = {"qkv_bias": bias, "output_bias": bias, **read_whole_window(config)}
    tables["head_bias"] = config.read("lm_head_bias", bool, False)
    _read_scales(config, tables)
    tables["moe"] = {
        "experts": config.read("num_local_experts", int),
        # The code takes two, whatever num_experts_per_tok says.
        "active_experts": 2,
        "router": "mixer",
        "tolerance": config.read("router_jitter_noise", float, 0.01),
    }
    block = f"{LAYER}.block_sparse_moe"
    tables["tensors"] = {
        "router": f"{block}.gate.weight",
        **{
            part: f"{block}.experts.{{expert}}.{name}.weight"
            for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        },
    }
    return tables


def _read_scales(config: Config, tables: Tables) -> None:
    """Factors of sines and cosines, which Phi-3.5-MoE states for short and long sequences."""
    scaling = config.read_table("rope_parameters")
    if not scaling.has("short_mscale"):
        scaling = config.read_table("rope_scaling")
    if tables["rope"].get("kind") == "longrope" and scaling.has("short_mscale"):
        tables["rope"]["attention_factor"] = scaling.read("short_mscale", float)
        if scaling.has("long_mscale"):
            tables["rope"]["long_attention_factor"] = scaling.read("long_mscale", float)


FAMILIES = {
    "phi": describe_phi,
    "phi3": describe_phi3,
    "phimoe": describe_phimoe,
}
