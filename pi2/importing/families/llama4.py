"""Llama 4: attention in chunks of tokens where heads are turned, layers without positions, and
experts that read what their weights have multiplied."""

from __future__ import annotations

from pi2.importing.config import SPLIT_EXPERTS, Config, read_rope
from pi2.importing.families.decoders import LAYER, Tables, describe_decoder, omit_positions
from pi2.importing.families.experts import add_dense_layers

_KINDS = ("chunked_attention", "full_attention")


def describe_llama4(config: Config) -> Tables:
    """The part that reads text."""
    tables = describe_decoder(config)
    layers = tables["shape"]["layers"]
    if tables["ffn"]["activation"] not in ("silu", "gelu", "gelu_tanh"):
        raise config.refuse("its experts are computed with smooth activations alone")
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, 1e-5)
    tables["rope"] = read_rope(config, tables["shape"]["context"], theta=500_000.0)
    tables["rope"]["pairs"] = "neighbours"
    turned = _list_turned(config, layers)
    tables |= omit_positions(set(range(layers)) - turned)
    bias = config.read("attention_bias", bool, False)
    tables["attention"] = {"qkv_bias": bias, "output_bias": bias}
    tables["attention"] |= _describe_chunks(config, layers, turned)
    if config.read("use_qk_norm", bool, True) and turned:
        tables["attention"] |= {
            "head_norm": True,
            "head_norm_place": "after",
            "head_norm_weights": False,
        }
        if len(turned) < layers:
            tables["attention"]["head_norm_layers"] = sorted(turned)
    growth = config.read("attn_scale", float, 0.1)
    if _has_tuning(config) and growth and len(turned) < layers:
        tables["attention"] |= {
            "growth": growth,
            "growth_interval": config.read("floor_scale", int, 8192),
            "growth_offset": 1,
            "growth_layers": [layer for layer in range(layers) if layer not in turned],
        }
    _add_experts(config, tables)
    return tables


def _has_tuning(config: Config) -> bool:
    """Whether queries grow: the first releases say so by a number."""
    stated = config.values.get("attn_temperature_tuning")
    if type(stated) is int:
        return stated != 0
    return config.read("attn_temperature_tuning", bool, True)


def _list_turned(config: Config, layers: int) -> set[int]:
    """Layers that turn heads: of which ``no_rope_layers`` says 1."""
    every = config.read("no_rope_layer_interval", int, 4)
    if every < 1:
        raise config.refuse(f"no_rope_layer_interval is {every}")
    flags = config.read_list("no_rope_layers")
    if not flags:
        flags = [int((layer + 1) % every != 0) for layer in range(layers)]
    if len(flags) < layers or not all(flag in (0, 1) for flag in flags):
        raise config.refuse(f"no_rope_layers is not a list of {layers} numbers, 0 or 1")
    return {layer for layer in range(layers) if flags[layer]}


def _describe_chunks(config: Config, layers: int, turned: set[int]) -> Tables:
    """Chunks of attention, of layers that have them."""
    if not config.has("attention_chunk_size") and "attention_chunk_size" in config.values:
        return {}
    kinds = config.read_list("layer_types")
    if not kinds:
        kinds = [_KINDS[layer not in turned] for layer in range(layers)]
    if len(kinds) != layers or not all(kind in _KINDS for kind in kinds):
        raise config.refuse(f"layer_types is not a list of {layers} kinds of attention")
    chosen = [layer for layer, kind in enumerate(kinds) if kind == _KINDS[0]]
    if not chosen:
        return {}
    width = config.read("attention_chunk_size", int, 8192)
    chunks = {"sliding_window": width, "window_kind": "chunked"}
    return chunks if len(chosen) == layers else chunks | {"window_layers": chosen}


def _add_experts(config: Config, tables: Tables) -> None:
    """Experts, a shared one, and layers that have one FFN."""
    layers, every = tables["shape"]["layers"], config.read("interleave_moe_layer_step", int, 1)
    if every < 1:
        raise config.refuse(f"interleave_moe_layer_step is {every}")
    mixed = set(range(every - 1, layers, every))
    if config.has("moe_layers"):
        mixed = {layer for layer in config.read_list("moe_layers") if type(layer) is int}
    tables["moe"] = {
        "experts": config.read_first(("num_local_experts", "num_experts"), int),
        "active_experts": config.read("num_experts_per_tok", int, 1),
        "router": "sigmoid",
        "normalise_weights": False,
        "weighs": "input",
        "shared_experts": 1,
    }
    dense = [layer for layer in range(layers) if layer not in mixed]
    add_dense_layers(tables, config.read("intermediate_size_mlp", int, 16384), dense)
    block, parts = f"{LAYER}.feed_forward", ("gate", "up", "down")
    tables["tensors"] = {
        "router": f"{block}.router.weight",
        **{f"shared_{part}": f"{block}.shared_expert.{part}_proj.weight" for part in parts},
        **{f"dense_{part}": f"{block}.{part}_proj.weight" for part in parts},
    }
    if config.read(SPLIT_EXPERTS, bool, False):
        names = {part: f"{block}.experts.{{expert}}.{part}_proj.weight" for part in parts}
        tables["tensors"] |= names
        return
    tables["tensors"] |= {
        "fused_gate_up": f"{block}.experts.gate_up_proj.{{expert}}",
        "down": f"{block}.experts.down_proj.{{expert}}",
        "experts_turned": True,
    }


FAMILIES = {"llama4_text": describe_llama4}
