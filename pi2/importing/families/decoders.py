"""Llama and its descendants: RMSNorm or LayerNorm, gated FFN, rotary positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pi2.importing.config import (
    Config,
    read_activation,
    read_rope,
    read_whole_window,
    read_window,
    scale_rope,
)

Tables = dict[str, Any]

LAYER = "model.layers.{layer}"


def describe_decoder(config: Config, rotated: float | None = None) -> Tables:
    """What Llama's descendants share: RMSNorm, gated FFN, rotary positions.

    ``rotated`` is the part of a head that is rotated where the configuration states none; None
    where it is the whole, whatever that says.
    """
    layers = config.read("num_hidden_layers", int)
    hidden, heads = config.read("hidden_size", int), config.read("num_attention_heads", int)
    if heads < 1 or (hidden % heads and not config.has("head_dim")):
        raise config.refuse(f"hidden_size {hidden} is not divided by {heads} heads")
    head_dim = config.read("head_dim", int, hidden // heads)
    context = config.read("max_position_embeddings", int)
    activation = read_activation(config, "hidden_act", "hidden_activation")
    ffn: Tables = {"activation": activation}
    if activation == "fatrelu":
        ffn["threshold"] = config.read("hidden_act_param", float)
    return {
        "shape": {
            "layers": layers,
            "hidden": hidden,
            "ffn": config.read("intermediate_size", int),
            "heads": heads,
            "kv_heads": config.read("num_key_value_heads", int, heads),
            "head_dim": head_dim,
            "vocab": config.read("vocab_size", int),
            "context": context,
        },
        "norm": {"epsilon": config.read("rms_norm_eps", float, 1e-6)},
        "rope": read_rope(config, context, rotated),
        "attention": {},
        "ffn": ffn,
        "tied_head": config.read("tie_word_embeddings", bool, False),
        "tensors": {},
    }


def describe_llama(config: Config) -> Tables:
    """Llama and everything that has its names."""
    tables = describe_decoder(config)
    bias = config.read("attention_bias", bool, False)
    tables["attention"] |= {"qkv_bias": bias, "output_bias": bias}
    tables["ffn"]["bias"] = config.read("mlp_bias", bool, False)
    return tables


def describe_mistral(config: Config) -> Tables:
    """Llama with a sliding window."""
    tables = describe_decoder(config)
    tables["attention"] = read_whole_window(config)
    return tables


def describe_bamboo(config: Config) -> Tables:
    """Mistral with dReLU, which its configuration calls ReLU."""
    tables = describe_mistral(config)
    tables["ffn"] = {"activation": "drelu"}
    return tables


def describe_qwen2(config: Config) -> Tables:
    """Llama with biases of query, key and value, and a window in late layers."""
    tables = describe_decoder(config)
    window = {}
    if config.read("use_sliding_window", bool, False):
        window = read_window(config, tables["shape"]["layers"], _is_late(config))
    tables["attention"] = {"qkv_bias": True, **window}
    return tables


def describe_qwen3(config: Config) -> Tables:
    """Qwen2 with norms of heads, and fewer biases."""
    tables = describe_qwen2(config)
    bias = config.read("attention_bias", bool, False)
    tables["attention"] |= {"qkv_bias": bias, "output_bias": bias, "head_norm": True}
    return tables


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


def describe_phi3(config: Config) -> Tables:
    """Mistral with query, key and value in one tensor, and gate and up in another."""
    tables = describe_decoder(config, rotated=1.0)
    tables["attention"] = read_whole_window(config)
    tables["tensors"] = {
        "fused_qkv": f"{LAYER}.self_attn.qkv_proj.weight",
        "fused_gate_up": f"{LAYER}.mlp.gate_up_proj.weight",
    }
    return tables


def describe_glm(config: Config) -> Tables:
    """A decoder that rotates half of each head, two neighbours at a time."""
    tables = describe_decoder(config, rotated=0.5)
    tables["attention"] = {"qkv_bias": config.read("attention_bias", bool, False)}
    tables["rope"]["pairs"] = "neighbours"
    tables["tensors"] = {"fused_gate_up": f"{LAYER}.mlp.gate_up_proj.weight"}
    return tables


def describe_glm4(config: Config) -> Tables:
    """GLM with norms of outputs."""
    tables = describe_glm(config)
    tables["norm"]["outputs"] = True
    tables["tensors"] |= {
        "attention_output_norm": f"{LAYER}.post_self_attn_layernorm.weight",
        "ffn_output_norm": f"{LAYER}.post_mlp_layernorm.weight",
    }
    return tables


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


def describe_cohere(config: Config) -> Tables:
    """Llama with LayerNorm and one norm for attention and FFN, side by side."""
    config.demand("use_qk_norm", False, False)
    tables = describe_llama(config)
    epsilon = config.read("layer_norm_eps", float, 1e-5)
    tables["norm"] = {"kind": "layernorm", "epsilon": epsilon}
    tables["rope"]["pairs"] = "neighbours"
    tables["residual"] = "parallel"
    tables["multipliers"] = {"logits": config.read("logit_scale", float, 0.0625)}
    tables["tied_head"] = config.read("tie_word_embeddings", bool, True)
    tables["tensors"] = {"ffn_norm": f"{LAYER}.input_layernorm.weight"}
    return tables


def describe_cohere2(config: Config) -> Tables:
    """Cohere whose layers have positions where they have a window."""
    tables = describe_cohere(config)
    layers = tables["shape"]["layers"]
    pattern = config.read("sliding_window_pattern", int, 4)
    window = read_window(config, layers, has_cycle(pattern), width=4096)
    tables["attention"] |= window
    turned = window.get("window_layers", range(layers)) if window else ()
    return tables | omit_positions(set(range(layers)) - set(turned))


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


def omit_positions(layers: Iterable[int]) -> Tables:
    """The ``[other_rope]`` table of layers without positions."""
    chosen = sorted(layers)
    return {"other_rope": {"kind": "none", "layers": chosen}} if chosen else {}


def add_turns(
    config: Config, tables: Tables, full: Config, local: Config, share: float | None = None
) -> None:
    """State rotary positions of layers without a window, by the table ``full``, and of those with
    one, by ``local``; both state the base.  ``share``: see `scale_rope`."""
    context, layers = tables["shape"]["context"], tables["shape"]["layers"]
    tables["rope"], other = (
        scale_rope(config, table, table.read("rope_theta", float), context, share)
        for table in (full, local)
    )
    chosen = tables["attention"].get("window_layers", list(range(layers)))
    if "sliding_window" in tables["attention"] and other != tables["rope"]:
        tables["other_rope"] = {**other, "layers": chosen}


def add_growth(config: Config, tables: Tables) -> None:
    """State queries that grow with the position, where positions are scaled so."""
    scaling = config.read_table("rope_parameters")
    growth = scaling.read("llama_4_scaling_beta", float, 0.0)
    if growth:
        tables["attention"]["growth"] = growth
        original = scaling.read("original_max_position_embeddings", int)
        tables["rope"]["original_context"] = original


def has_cycle(length: int) -> Callable[[int], bool]:
    """Whether a layer has a window where every ``length``-th has none."""
    return lambda layer: length < 1 or (layer + 1) % length != 0


def _is_late(config: Config) -> Callable[[int], bool]:
    """Whether a layer is one of those that have a window, in Qwen2."""
    first = config.read("max_window_layers", int, 28)
    return lambda layer: layer >= first


FAMILIES = {
    "bamboo": describe_bamboo,
    "cohere": describe_cohere,
    "cohere2": describe_cohere2,
    "glm": describe_glm,
    "glm4": describe_glm4,
    "granite": describe_granite,
    "llama": describe_llama,
    "mistral": describe_mistral,
    "phi3": describe_phi3,
    "qwen2": describe_qwen2,
    "qwen3": describe_qwen3,
    "smollm3": describe_smollm3,
    "sparsellama": describe_llama,
    "stablelm": describe_stablelm,
}
