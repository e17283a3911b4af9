"""Further decoders whose descriptions differ from their relatives' in little: Ministral, CWM,
InternLM 3, IQuest-Coder, Helium, HyperCLOVA X, VaultGemma, Jais 2, OLMo, EXAONE 4 and Granite
with windows."""

from __future__ import annotations

from typing import Any

from pi2.importing.config import Config, read_window
from pi2.importing.families.decoders import (
    LAYER,
    Tables,
    describe_decoder,
    describe_granite,
    describe_llama,
    has_cycle,
    omit_positions,
)
from pi2.importing.families.gemma import describe_gemma2
from pi2.importing.families.newer_decoders import describe_olmo2


def describe_ministral(config: Config) -> Tables:
    """Mistral whose layers with a window are listed."""
    tables = describe_decoder(config)
    window = read_window(config, tables["shape"]["layers"], lambda layer: True)
    tables["attention"] = window
    return tables


def describe_cwm(config: Config) -> Tables:
    """Llama without biases of attention, with a window in three layers of four."""
    stated: dict[str, Any] = {"attention_bias": False}
    if not config.has("rope_parameters") and not config.has("rope_scaling"):
        stated["rope_parameters"] = {
            "rope_type": "llama3",
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    tables = describe_llama(config.change(stated))
    layers = tables["shape"]["layers"]
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, 1e-5)
    tables["attention"] |= read_window(config, layers, lambda layer: layer % 4 != 0, width=8192)
    return tables


def describe_internlm3(config: Config) -> Tables:
    """Llama with two keys for biases: ``bias`` is that of all others than query, key and value."""
    bias = config.read("mlp_bias", bool, config.read("bias", bool, False))
    tables = describe_llama(config.change({"mlp_bias": bias}))
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, 1e-5)
    of_attention = config.read("attention_bias", bool, config.read("qkv_bias", bool, False))
    tables["attention"] |= {"qkv_bias": of_attention, "output_bias": bias}
    return tables


def describe_iquestcoder(config: Config) -> Tables:
    """Llama; its original code has two options that no released model uses."""
    if config.has("clip_qkv"):
        raise config.refuse("clip_qkv is stated")
    config.demand("use_sliding_window", False, False)
    tables = describe_llama(config)
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, 1e-5)
    return tables


def describe_helium(config: Config) -> Tables:
    """Llama that turns neighbours, and whose output projection has no bias."""
    tables = describe_llama(config)
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, 1e-8)
    tables["rope"]["pairs"] = "neighbours"
    tables["attention"]["output_bias"] = False
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


def describe_vaultgemma(config: Config) -> Tables:
    """Gemma 2 without norms of outputs."""
    tables = describe_gemma2(config)
    tables["norm"]["outputs"] = False
    return tables


def describe_jais2(config: Config) -> Tables:
    """LayerNorm, biases everywhere, and an FFN without gates."""
    for key, value in (("hidden_act", "relu2"), ("attention_bias", True), ("mlp_bias", True)):
        config = config.set_default(key, value)
    tables = describe_llama(config)
    epsilon = config.read("layer_norm_eps", float, 1e-5)
    tables["norm"] = {"kind": "layernorm", "epsilon": epsilon, "bias": True}
    tables["ffn"]["gated"] = False
    return tables


def describe_olmo(config: Config) -> Tables:
    """The first OLMo: LayerNorm without weights, and cut queries, keys and values."""
    config = config.change({"mlp_bias": False})
    tables = describe_llama(config)
    tables["norm"] = {"kind": "layernorm", "epsilon": 1e-5, "weights": False}
    if config.has("clip_qkv"):
        tables["attention"]["clip"] = config.read("clip_qkv", float)
    return tables


def describe_exaone4(config: Config) -> Tables:
    """OLMo 2 with norms of each head, whose layers have positions where they have a window."""
    tables = describe_olmo2(config.change({"attention_bias": False}))
    tables["attention"] = {"head_norm": True}
    return tables | add_exaone_window(config, tables)


def add_exaone_window(config: Config, tables: Tables) -> Tables:
    """State the window of EXAONE's layers, and return what says which have no positions."""
    layers, values = tables["shape"]["layers"], config.values
    if "sliding_window" in values and not config.has("sliding_window"):
        return {}
    cycle = 4
    if not config.read_list("layer_types"):
        cycle = config.read("sliding_window_pattern", int, cycle)
    window = read_window(config, layers, has_cycle(cycle), width=4096)
    tables["attention"] |= window
    turned = window.get("window_layers", range(layers)) if window else ()
    return omit_positions(set(range(layers)) - set(turned))


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


FAMILIES = {
    "cwm": describe_cwm,
    "exaone4": describe_exaone4,
    "granite_swa": describe_granite_swa,
    "helium": describe_helium,
    "hyperclovax": describe_hyperclovax,
    "internlm3": describe_internlm3,
    "iquestcoder": describe_iquestcoder,
    "jais2": describe_jais2,
    "ministral": describe_ministral,
    "olmo": describe_olmo,
    "vaultgemma": describe_vaultgemma,
}
