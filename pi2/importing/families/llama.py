"""Llama, and families that are Llama in all but a little."""

from __future__ import annotations

from typing import Any

from pi2.importing.config import Config, read_rope, read_window
from pi2.importing.families.decoders import LAYER, Tables, describe_decoder, omit_positions


def describe_llama(config: Config) -> Tables:
    """Llama and everything that has its names."""
    tables = describe_decoder(config)
    bias = config.read("attention_bias", bool, False)
    # GGUF files may have the second without the first.
    output_bias = config.read("attention_out_bias", bool, bias)
    tables["attention"] |= {"qkv_bias": bias, "output_bias": output_bias}
    tables["ffn"]["bias"] = config.read("mlp_bias", bool, False)
    return tables


def describe_arcee(config: Config) -> Tables:
    """Llama without gates."""
    values = {} if config.has("hidden_act") else {"hidden_act": "relu2"}
    tables = describe_llama(config.change(values))
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, 1e-5)
    tables["ffn"]["gated"] = False
    return tables


def describe_bitnet(config: Config) -> Tables:
    """Llama with the square of ReLU, and norms before the projections back."""
    tables = describe_llama(config)
    tables["norm"] = {"epsilon": config.read("rms_norm_eps", float, 1e-5)}
    tables["rope"] = read_rope(config, tables["shape"]["context"], theta=500_000.0)
    tables["attention"]["sub_norm"] = True
    tables["ffn"]["sub_norm"] = True
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


def describe_helium(config: Config) -> Tables:
    """Llama that turns neighbours, and whose output projection has no bias."""
    tables = describe_llama(config)
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, 1e-8)
    tables["rope"]["pairs"] = "neighbours"
    tables["attention"]["output_bias"] = False
    return tables


def describe_internlm3(config: Config) -> Tables:
    """Llama with two keys for biases: ``bias`` is that of all others than query, key and value."""
    # Its original code knew a factor that no released model uses.
    config.demand("hidden_factor", 1, 1)
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


def describe_jais2(config: Config) -> Tables:
    """LayerNorm, biases everywhere, and an FFN without gates."""
    for key, value in (("hidden_act", "relu2"), ("attention_bias", True), ("mlp_bias", True)):
        config = config.set_default(key, value)
    tables = describe_llama(config)
    epsilon = config.read("layer_norm_eps", float, 1e-5)
    tables["norm"] = {"kind": "layernorm", "epsilon": epsilon, "bias": True}
    tables["ffn"]["gated"] = False
    return tables


def describe_seed_oss(config: Config) -> Tables:
    """Llama with two keys for biases of attention."""
    tables = describe_llama(config)
    tables["attention"] = {
        "qkv_bias": config.read("attention_bias", bool, True),
        "output_bias": config.read("attention_out_bias", bool, False),
    }
    return tables


def describe_smollm3(config: Config) -> Tables:
    """Llama with layers without positions."""
    tables = describe_llama(config)
    layers = tables["shape"]["layers"]
    every = config.read("no_rope_layer_interval", int, 4)
    turned = config.read_list("no_rope_layers")
    if not turned:
        turned = [int((layer + 1) % every != 0) for layer in range(layers)]
    if len(turned) != layers:
        raise config.refuse(f"no_rope_layers is not a list of {layers} numbers")
    if config.read("use_sliding_window", bool, False):
        tables["attention"] |= read_window(config, layers, lambda layer: not turned[layer])
    tables["tied_head"] = config.read("tie_word_embeddings", bool, True)
    return tables | omit_positions(layer for layer in range(layers) if not turned[layer])


def describe_stablelm(config: Config) -> Tables:
    """A decoder with LayerNorm that rotates a quarter of each head."""
    config.demand("qk_layernorm", False, False)
    tables = describe_decoder(config, rotated=0.25)
    epsilon = config.read("layer_norm_eps", float, 1e-5)
    tables["norm"] = {"kind": "layernorm", "epsilon": epsilon, "bias": True}
    tables["attention"] = {"qkv_bias": config.read("use_qkv_bias", bool, False)}
    if config.read("use_parallel_residual", bool, False):
        tables["residual"] = "parallel"
        tables["tensors"] = {
            "ffn_norm": f"{LAYER}.input_layernorm.weight",
            "ffn_norm_bias": f"{LAYER}.input_layernorm.bias",
        }
    return tables


FAMILIES = {
    "arcee": describe_arcee,
    "bitnet": describe_bitnet,
    "cwm": describe_cwm,
    "helium": describe_helium,
    "internlm3": describe_internlm3,
    "iquestcoder": describe_iquestcoder,
    "jais2": describe_jais2,
    "llama": describe_llama,
    "seed_oss": describe_seed_oss,
    "smollm3": describe_smollm3,
    "sparsellama": describe_llama,
    "stablelm": describe_stablelm,
}
