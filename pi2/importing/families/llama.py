"""Llama, Cohere, OLMo and nanochat."""

from __future__ import annotations

from typing import Any

from pi2.importing.config import Config, read_rope, read_window
from pi2.importing.families.decoders import (
    LAYER,
    Tables,
    add_dense_layers,
    add_turns,
    describe_decoder,
    has_cycle,
    list_dense_layers,
    name_experts,
    omit_positions,
)


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


def describe_cohere2_moe(config: Config) -> Tables:
    """Cohere 2 with experts, and dense layers that turn heads although they have no window."""
    tables = describe_cohere2(config)
    layers, first = tables["shape"]["layers"], config.read("first_k_dense_replace", int, 0)
    if config.has("first_k_dense_replace") and not config.read_list("layer_types"):
        raise config.refuse("first_k_dense_replace is stated without layer_types")
    if config.has("rms_norm_eps"):
        tables["norm"] = {"epsilon": config.read("rms_norm_eps", float)}
    ffn, shared = tables["shape"]["ffn"], config.read("num_shared_experts", int, 0)
    combination = config.read("shared_expert_combination_strategy", str, "average")
    if combination not in ("average", "sum"):
        raise config.refuse(f"shared_expert_combination_strategy is {combination!r}")
    router = config.read("expert_selection_fn", str, "softmax")
    if router not in ("softmax", "sigmoid"):
        raise config.refuse(f"expert_selection_fn is {router!r}")
    tables["moe"] = {
        "experts": config.read_first(("num_experts", "num_local_experts"), int),
        "active_experts": config.read("num_experts_per_tok", int, 2),
        "router": router,
        "shared_experts": shared,
        "normalise_weights": router == "softmax" or config.read("norm_topk_prob", bool, True),
    }
    if shared and combination == "average":
        tables["moe"] |= {"scaling": 0.5, "shared_factor": 0.5}
    dense = list_dense_layers(config, layers, first)
    if dense:
        add_dense_layers(tables, config.read("prefix_dense_intermediate_size", int, ffn), dense)
    names = name_experts(f"{LAYER}.mlp", shared="shared_experts")
    tables["tensors"] |= {key: name for key, name in names.items() if key != "choice_bias"}
    if config.read("prefix_dense_sliding_window_pattern", int, 1) == 1:
        still = tables.pop("other_rope", {"layers": []})["layers"]
        tables |= omit_positions(layer for layer in still if layer not in dense)
    return tables


def describe_olmo(config: Config) -> Tables:
    """The first OLMo: LayerNorm without weights, and cut queries, keys and values."""
    config = config.change({"mlp_bias": False})
    tables = describe_llama(config)
    tables["norm"] = {"kind": "layernorm", "epsilon": 1e-5, "weights": False}
    if config.has("clip_qkv"):
        tables["attention"]["clip"] = config.read("clip_qkv", float)
    return tables


def describe_olmo2(config: Config) -> Tables:
    """Llama whose norms come after attention and FFN, and norms of all heads together."""
    tables = describe_decoder(config)
    bias = config.read("attention_bias", bool, False)
    tables["norm"] = {
        "epsilon": config.read("rms_norm_eps", float, 1e-5),
        "inputs": False,
        "outputs": True,
    }
    tables["attention"] = {
        "qkv_bias": bias,
        "output_bias": bias,
        "head_norm": True,
        "head_norm_of": "all",
    }
    return tables


def describe_olmo3(config: Config) -> Tables:
    """OLMo 2 with a window in three layers of four, whose positions are not scaled."""
    tables = describe_olmo2(config)
    layers = tables["shape"]["layers"]
    tables["attention"] |= read_window(config, layers, has_cycle(4), width=4096)
    theta = config.read("rope_theta", float, 500_000.0)
    both = config.read_table("rope_parameters")
    full, local = both.read_table("full_attention"), both.read_table("sliding_attention")
    if not both.has("full_attention") and not both.has("sliding_attention"):
        full = both if both.has("rope_type") else config.read_table("rope_scaling")
    # The original code looks for it outside of the two tables.
    full = full.change({"truncate": both.read("truncate", bool, True)})
    full, local = (table.set_default("rope_theta", theta) for table in (full, local))
    add_turns(config, tables, full, local)
    return tables


def describe_olmoe(config: Config) -> Tables:
    """OLMoE: norms of all heads together, experts that a softmax weights."""
    tables = describe_decoder(config)
    bias = config.read("attention_bias", bool, False)
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, 1e-5)
    tables["attention"] = {
        "qkv_bias": bias,
        "output_bias": bias,
        "head_norm": True,
        "head_norm_of": "all",
    }
    if config.has("clip_qkv"):
        tables["attention"]["clip"] = config.read("clip_qkv", float)
    tables["moe"] = {
        "experts": config.read_first(("num_experts", "num_local_experts"), int),
        "active_experts": config.read("num_experts_per_tok", int, 8),
        "normalise_weights": config.read("norm_topk_prob", bool, False),
    }
    tables["tensors"] = name_experts(f"{LAYER}.mlp", shared="shared_experts")
    return tables


def describe_flex_olmo(config: Config) -> Tables:
    """OLMo 2 with OLMoE's experts."""
    mixture = describe_olmoe(config)
    mixture["moe"]["active_experts"] = config.read("num_experts_per_tok", int, 5)
    tables = describe_olmo2(config)
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, 1e-6)
    return tables | {key: mixture[key] for key in ("moe", "tensors")}


def describe_nanochat(config: Config) -> Tables:
    """Norms without weights, of embeddings and turned heads too, and the square of ReLU without
    gates."""
    config = config.set_default("hidden_act", "relu2").change({"mlp_bias": False})
    tables = describe_llama(config)
    tables["norm"] |= {"weights": False, "embedding": True}
    tables["rope"]["pairs"] = "swapped"
    tables["attention"] |= {
        "head_norm": True,
        "head_norm_weights": False,
        "head_norm_place": "after",
    }
    tables["ffn"]["gated"] = False
    cap = config.read_limit("final_logit_softcapping", 15.0)
    if cap is not None:
        tables["logit_softcap"] = cap
    tables["tensors"] = {
        "up": f"{LAYER}.mlp.fc1.weight",
        "down": f"{LAYER}.mlp.fc2.weight",
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
    "cohere": describe_cohere,
    "cohere2": describe_cohere2,
    "cohere2_moe": describe_cohere2_moe,
    "flex_olmo": describe_flex_olmo,
    "olmo": describe_olmo,
    "olmo2": describe_olmo2,
    "olmo3": describe_olmo3,
    "olmoe": describe_olmoe,
    "nanochat": describe_nanochat,
}
