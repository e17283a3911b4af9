"""Granite, and families with Mamba: Bamba, Jamba, Mamba and Nemotron."""

from __future__ import annotations

import math

from pi2.importing.config import SPLIT_EXPERTS, Config, read_activation, read_window
from pi2.importing.families.decoders import (
    LAYER,
    SHARED,
    Tables,
    add_dense_layers,
    add_first_mamba,
    add_kinds,
    add_mamba,
    add_sigmoids,
    describe_decoder,
    name_experts,
)
from pi2.importing.families.llama import describe_llama
from pi2.importing.text_parts import describe_layers


def describe_bamba(config: Config) -> Tables:
    """Llama with Mamba-2 in most layers."""
    tables = describe_decoder(config, rotated=0.5)
    bias = config.read("attention_bias", bool, False)
    tables["attention"] = {"qkv_bias": bias, "output_bias": bias}
    chosen = config.read_list("attn_layer_indices")
    width = int(config.read("mamba_expand", float, 2.0) * tables["shape"]["hidden"])
    add_mamba(config, tables, width)
    add_kinds(config, tables, "mamba", lambda layer: layer in chosen)
    tables["tensors"] |= {
        "ffn_norm": f"{LAYER}.pre_ff_layernorm.weight",
        "final_norm": "model.final_layernorm.weight",
        **{part: f"{LAYER}.feed_forward.{part}_proj.weight" for part in ("gate", "up", "down")},
    }
    return tables


_FFN = f"{LAYER}.feed_forward"
_PARTS = ("gate", "up", "down")


def describe_jamba(config: Config) -> Tables:
    """No positions are turned; weights of experts are shares of all of them."""
    tables = describe_decoder(config)
    layers, hidden = tables["shape"]["layers"], tables["shape"]["hidden"]
    tables["rope"] = {"kind": "none"}
    attends = _list_chosen(config, "attn_layer", layers, (8, 4))
    kinds = ["attention" if layer in attends else "mamba1" for layer in range(layers)]
    tables["layers"] = {"kinds": kinds}
    tables["tensors"] = {
        "ffn_norm": f"{LAYER}.pre_ff_layernorm.weight",
        "final_norm": "model.final_layernorm.weight",
    }
    if "mamba1" in kinds:
        rank = None if config.values.get("mamba_dt_rank", "auto") == "auto" else "mamba_dt_rank"
        width = config.read("mamba_expand", int, 2) * hidden
        add_first_mamba(config, tables, width, rank, f"{LAYER}.mamba")
        tables["recurrence"] |= {"part_norm": "weighted", "part_epsilon": tables["norm"]["epsilon"]}
    _add_experts(config, tables)
    return tables


def _add_experts(config: Config, tables: Tables) -> None:
    """Experts of the layers that have them; FFNs of the others are as large as one of these."""
    layers, experts = tables["shape"]["layers"], 16
    if config.has("num_experts") or config.has("num_local_experts"):
        experts = config.read_first(("num_experts", "num_local_experts"), int)
    mixed = _list_chosen(config, "expert_layer", layers, (2, 1)) if experts > 1 else []
    plain = {part: f"{_FFN}.{part}_proj.weight" for part in _PARTS}
    if not mixed:
        tables["tensors"] |= plain
        return
    tables["moe"] = {
        "experts": experts,
        "active_experts": config.read("num_experts_per_tok", int, 2),
        "normalise_weights": False,
    }
    dense = [layer for layer in range(layers) if layer not in mixed]
    add_dense_layers(tables, tables["shape"]["ffn"], dense)
    tables["tensors"] |= {f"dense_{part}": name for part, name in plain.items()}
    tables["tensors"]["router"] = f"{_FFN}.router.weight"
    for part in _PARTS:
        tables["tensors"][part] = f"{_FFN}.experts.{{expert}}.{part}_proj.weight"


def _list_chosen(config: Config, name: str, layers: int, default: tuple[int, int]) -> list[int]:
    """Layers that one of a period of layers is: keys that begin with ``name`` say which."""
    period = config.read(f"{name}_period", int, default[0])
    offset = config.read(f"{name}_offset", int, default[1])
    if period < 1:
        raise config.refuse(f"{name}_period is {period}")
    return [layer for layer in range(layers) if layer % period == offset]


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


def describe_nemotron(config: Config) -> Tables:
    """LayerNorm that is stored less 1, and an FFN without gates."""
    tables = describe_decoder(config, rotated=0.5)
    bias = config.read("attention_bias", bool, False)
    tables["norm"] = {
        "kind": "layernorm",
        "epsilon": config.read("norm_eps", float, 1e-5),
        "bias": True,
        "weight_offset": 1.0,
    }
    tables["attention"] = {"qkv_bias": bias, "output_bias": bias}
    tables["ffn"] |= {"gated": False, "bias": config.read("mlp_bias", bool, False)}
    return tables


def describe_nemotron_h(config: Config) -> Tables:
    """Blocks as layers of some mixers and an FFN; no positions are turned."""
    layers = describe_layers(config.values)
    if isinstance(layers, str):
        raise config.refuse(layers)
    own = {
        "num_hidden_layers": len(layers),
        "hidden_act": config.read("mlp_hidden_act", str, "relu2"),
        "rms_norm_eps": config.read("layer_norm_epsilon", float, 1e-5),
    }
    tables = describe_decoder(config.change(own))
    tables["rope"] = {"kind": "none"}
    tables["ffn"] |= {"gated": False, "bias": config.read("mlp_bias", bool, False)}
    tables["layers"] = {"kinds": ["+".join(layer.mixers) or "none" for layer in layers]}
    absent = [number for number, layer in enumerate(layers) if not layer.ffn]
    tables["ffn"] |= {"absent_layers": absent} if absent else {}
    heads, head_dim = config.read("mamba_num_heads", int), config.read("mamba_head_dim", int)
    sizes = {
        "mamba_n_heads": heads,
        "mamba_n_groups": config.read("n_groups", int, 8),
        "mamba_d_state": config.read("ssm_state_size", int, 128),
        "mamba_d_conv": config.read("conv_kernel", int, 4),
        "mamba_conv_bias": config.read("use_conv_bias", bool, True),
        "mamba_proj_bias": config.read("use_bias", bool, False),
        "mamba_hidden_act": config.read("mamba_hidden_act", str, "silu"),
        # The code of transformers knows no other limit.
        "time_step_limit": [config.read("time_step_min", float, 0.001), math.inf],
    }
    add_mamba(config.change(sizes), tables, heads * head_dim, f"{LAYER}.mamba.{{mixer}}")
    tables["tensors"] |= {
        "up": f"{LAYER}.mlp.up_proj.weight",
        "down": f"{LAYER}.mlp.down_proj.weight",
    }
    dense = [number for number, layer in enumerate(layers) if layer.ffn == "mlp"]
    if any(layer.ffn == "moe" for layer in layers):
        _add_nemotron_experts(config, tables, dense)
    return tables


def _add_nemotron_experts(config: Config, tables: Tables, dense: list[int]) -> None:
    """Experts without gates; ``dense``: layers that have one FFN instead."""
    ffn, size = config.read("moe_intermediate_size", int), tables["shape"]["ffn"]
    shared = config.read("moe_shared_expert_intermediate_size", int)
    if ffn < 1 or shared < 1:
        raise config.refuse(f"experts have {ffn} neurons, and {shared} shared ones")
    tables["shape"]["ffn"] = ffn
    tables["moe"] = {
        "experts": config.read_first(("n_routed_experts", "num_local_experts"), int),
        "active_experts": config.read("num_experts_per_tok", int),
        "scaling": config.read("routed_scaling_factor", float, 1.0),
    }
    add_sigmoids(config, tables, 1, 1)
    names = name_experts(f"{LAYER}.mlp", shared=SHARED.rpartition(".")[2])
    names = {key: name for key, name in names.items() if "gate_proj" not in name}
    if config.has("moe_latent_size"):
        tables["moe"]["latent"] = config.read("moe_latent_size", int)
        tables["side_ffn"] = {"width": shared, "norms": False}
        for part in ("up", "down"):
            names[f"side_{part}"] = names.pop(f"shared_{part}")
    else:
        tables["moe"]["shared_experts"] = -(-shared // ffn)
        tables["moe"] |= {"shared_ffn": shared} if shared % ffn else {}
    add_dense_layers(tables, size, dense)
    tables["tensors"] |= names


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
    "bamba": describe_bamba,
    "jamba": describe_jamba,
    "falcon_mamba": describe_falcon_mamba,
    "mamba": describe_mamba,
    "mamba2": describe_mamba2,
    "nemotron": describe_nemotron,
    "nemotron_h": describe_nemotron_h,
    "granite": describe_granite,
    "granite_swa": describe_granite_swa,
    "granitemoe": describe_granite_moe,
    "granitemoe_swa": describe_granite_moe_swa,
    "granitemoehybrid": describe_granite_hybrid,
    "granitemoeshared": describe_granite_moe,
    "hyperclovax": describe_hyperclovax,
}
