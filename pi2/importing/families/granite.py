"""Granite: dense, with experts, with windows, and with Mamba-2; and HyperCLOVA X."""

from __future__ import annotations

from pi2.importing.config import SPLIT_EXPERTS, Config, read_activation, read_window
from pi2.importing.families.decoders import LAYER, Tables
from pi2.importing.families.llama import describe_llama
from pi2.importing.families.states import add_kinds, add_mamba


def describe_granite(config: Config) -> Tables:
    """Llama with multipliers."""
    tables = describe_llama(config)
    tables["attention"]["scale"] = config.read("attention_multiplier", float, 1.0)
    divisor = config.read("logits_scaling", float, 1.0)
    if divisor == 0.0:
        raise config.refuse("logits_scaling is 0")
    tables["multipliers"] = {
        "embedding": config.read("embedding_multiplier", float, 1.0),
        "residual": config.read("residual_multiplier", float, 1.0),
        "logits": 1.0 / divisor,
    }
    return tables


def describe_hyperclovax(config: Config) -> Tables:
    """Granite whose logits are multiplied and not divided, with norms of outputs."""
    tables = describe_granite(config)
    if not config.has("attention_multiplier"):
        del tables["attention"]["scale"]
    tables["multipliers"]["logits"] = config.read("logits_scaling", float, 1.0)
    if config.read("use_post_norm", bool, True):
        tables["norm"]["outputs"] = True
        tables["tensors"] = {
            "attention_output_norm": f"{LAYER}.post_norm1.weight",
            "ffn_output_norm": f"{LAYER}.post_norm2.weight",
        }
    return tables


def describe_granite_swa(config: Config) -> Tables:
    """Granite with sinks, and a window in three layers of four."""
    tables = describe_granite(config)
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, 1e-5)
    tables["tied_head"] = config.read("tie_word_embeddings", bool, True)
    return add_granite_window(config, tables)


def add_granite_window(config: Config, tables: Tables) -> Tables:
    """State sinks, windows, and the bases of positions, of which Granite has one for each layer."""
    layers = tables["shape"]["layers"]
    window = read_window(config, layers, lambda layer: layer % 4 != 0, width=128)
    tables["attention"] |= {"sinks": True, **window}
    stated = config.read_list("layer_rope_theta")
    if not stated:
        return tables
    if len(stated) != layers or not all(type(item) in (int, float) for item in stated):
        raise config.refuse(f"layer_rope_theta is not a list of {layers} numbers")
    bases = sorted({float(item) for item in stated}, reverse=True)
    if len(bases) > 2:
        raise config.refuse(f"layer_rope_theta has {len(bases)} bases, pi2 computes two")
    turns = [tables["rope"] | {"theta": base} if base else {"kind": "none"} for base in bases]
    tables["rope"] = turns[0]
    if len(bases) == 2:
        chosen = [layer for layer, item in enumerate(stated) if float(item) == bases[1]]
        tables["other_rope"] = {**turns[1], "layers": chosen}
    return tables


def describe_granite_moe(config: Config) -> Tables:
    """Granite with experts, whose matrices are in one tensor; shared ones, too."""
    tables = describe_granite(config)
    tables["ffn"] = {"activation": read_activation(config, "hidden_act")}
    tables["moe"] = {
        "experts": config.read("num_local_experts", int),
        "active_experts": config.read("num_experts_per_tok", int),
    }
    ffn, shared = tables["shape"]["ffn"], config.read("shared_intermediate_size", int, 0)
    if shared and ffn > 0:
        count = -(-shared // ffn)
        tables["moe"] |= {"shared_experts": count}
        tables["moe"] |= {"shared_ffn": shared} if shared % ffn else {}
    tables["tensors"] = name_granite_experts(config)
    return tables


def name_granite_experts(config: Config) -> Tables:
    """Names of Granite's router, experts and shared experts."""
    block, shared = f"{LAYER}.block_sparse_moe", f"{LAYER}.shared_mlp"
    names = {"router": f"{block}.router.layer.weight"}
    if config.read(SPLIT_EXPERTS, bool, False):
        for part in ("gate", "up", "down"):
            names |= {
                part: f"{block}.experts.{{expert}}.{part}_proj.weight",
                f"shared_{part}": f"{shared}.{part}_proj.weight",
            }
        return names
    return names | {
        "fused_gate_up": f"{block}.input_linear.weight.{{expert}}",
        "down": f"{block}.output_linear.weight.{{expert}}",
        "fused_shared": f"{shared}.input_linear.weight",
        "shared_down": f"{shared}.output_linear.weight",
    }


def describe_granite_moe_swa(config: Config) -> Tables:
    """Granite with experts, sinks and windows."""
    tables = describe_granite_moe(config)
    block = f"{LAYER}.block_sparse_moe"
    tables["tensors"] |= {
        "router": f"{block}.router.weight",
        "fused_gate_up": f"{block}.experts.gate_up_proj.{{expert}}",
        "down": f"{block}.experts.down_proj.{{expert}}",
    }
    return add_granite_window(config, tables)


def describe_granite_hybrid(config: Config) -> Tables:
    """Granite with Mamba-2 in most layers, and a shared FFN beside its experts, or alone."""
    experts = config.read("num_local_experts", int, 8)
    shared = config.read("shared_intermediate_size", int, 1024)
    own = config.read("intermediate_size", int) if experts else shared
    tables = describe_granite(config.change({"intermediate_size": own, "mlp_bias": False}))
    tables["attention"]["output_bias"] = config.read("attention_bias", bool, False)
    if config.read("position_embedding_type", str, "none") != "rope":
        tables["rope"] = {"kind": "none"}
    width = int(config.read("mamba_expand", float, 2.0) * tables["shape"]["hidden"])
    add_mamba(config, tables, width)
    add_kinds(config, tables, "mamba", lambda layer: False)
    if not experts and config.read(SPLIT_EXPERTS, bool, False):
        return tables
    if not experts:
        tables["tensors"] |= {
            "fused_gate_up": f"{LAYER}.shared_mlp.input_linear.weight",
            "down": f"{LAYER}.shared_mlp.output_linear.weight",
        }
        return tables
    if own < 1:
        raise config.refuse(f"intermediate_size is {own}")
    tables["moe"] = {
        "experts": experts,
        "active_experts": config.read("num_experts_per_tok", int, 2),
        "shared_experts": -(-shared // own),
    }
    tables["moe"] |= {"shared_ffn": shared} if shared % own else {}
    tables["tensors"] |= name_granite_experts(config)
    return tables


FAMILIES = {
    "granite": describe_granite,
    "granite_swa": describe_granite_swa,
    "granitemoe": describe_granite_moe,
    "granitemoe_swa": describe_granite_moe_swa,
    "granitemoehybrid": describe_granite_hybrid,
    "granitemoeshared": describe_granite_moe,
    "hyperclovax": describe_hyperclovax,
}
