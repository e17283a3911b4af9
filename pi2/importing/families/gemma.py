"""Gemma, Hunyuan, ERNIE, Aria, SmallThinker and Solar."""

from __future__ import annotations

from pi2.importing.config import ACTIVATIONS, Config, read_window, scale_rope
from pi2.importing.families.decoders import (
    LAYER,
    Tables,
    add_dense_layers,
    add_experts,
    add_listed_experts,
    add_sigmoids,
    add_turns,
    describe_decoder,
    has_cycle,
    name_experts,
    omit_positions,
)
from pi2.importing.families.llama import describe_llama


def describe_hunyuan(config: Config) -> Tables:
    """Llama with norms of heads after they are rotated."""
    tables = describe_llama(config)
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, 1e-5)
    # The code has no biases in the FFN, whatever the configuration says.
    tables["ffn"]["bias"] = False
    tables["attention"] |= {"head_norm": True, "head_norm_place": "after"}
    names = {"query_norm": "query_layernorm", "key_norm": "key_layernorm"}
    tables["tensors"] = {key: f"{LAYER}.self_attn.{name}.weight" for key, name in names.items()}
    scaling = config.read_table("rope_parameters")
    if not scaling.has("rope_type") and not scaling.has("rope_theta"):
        scaling = config.read_table("rope_scaling")
    alpha, size = scaling.read("alpha", float, 0.0), tables["shape"]["head_dim"]
    kind = scaling.read("rope_type", str, scaling.read("type", str, "default"))
    if kind == "dynamic" and alpha > 0 and size > 2:
        tables["rope"]["theta"] *= alpha ** (size / (size - 2))
    return tables


def describe_hunyuan_moe(config: Config) -> Tables:
    """Hunyuan with experts, and a shared one of the same size."""
    tables = describe_hunyuan(config)
    experts, active = (
        _read_same(config, names)
        for names in (("num_experts", "num_local_experts"), ("moe_topk", "num_experts_per_tok"))
    )
    tables["moe"] = {"experts": experts, "active_experts": active, "shared_experts": 1}
    parts = ("gate", "up", "down")
    tables["tensors"] |= {
        "router": f"{LAYER}.mlp.gate.wg.weight",
        **{part: f"{LAYER}.mlp.experts.{{expert}}.{part}_proj.weight" for part in parts},
        **{f"shared_{part}": f"{LAYER}.mlp.shared_mlp.{part}_proj.weight" for part in parts},
    }
    return tables


def _read_same(config: Config, names: tuple[str, ...]) -> int:
    found = next((config.read_list(name) for name in names if config.has(name)), [1])
    if len(set(map(str, found))) != 1 or type(found[0]) is not int:
        raise config.refuse(f"{names[0]} is not the same number in every layer")
    number: int = found[0]
    return number


def describe_hunyuan3(config: Config) -> Tables:
    """Hunyuan 3: norms of heads before they turn, and experts that sigmoids weight."""
    config.demand("mlp_bias", False, False)
    tables = describe_decoder(config)
    bias = config.read("attention_bias", bool, False)
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, 1e-5)
    tables["attention"] = {"qkv_bias": bias, "output_bias": bias, "head_norm": True}
    add_listed_experts(config, tables, 1)
    tables["moe"] |= {"router": "sigmoid", "choice_bias": True}
    tables["moe"]["scaling"] = config.read("router_scaling_factor", float, 2.826)
    tables["tensors"] |= name_experts(f"{LAYER}.mlp", shared="shared_mlp")
    tables["tensors"] |= {
        "router": f"{LAYER}.mlp.router.gate.weight",
        "choice_bias": f"{LAYER}.mlp.expert_bias",
    }
    return tables


def describe_ernie(config: Config) -> Tables:
    """ERNIE 4.5: neighbours are rotated."""
    tables = describe_decoder(config)
    bias = config.read("use_bias", bool, False)
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, 1e-5)
    tables["rope"]["pairs"] = "neighbours"
    tables["attention"] = {"qkv_bias": bias, "output_bias": bias}
    tables["ffn"]["bias"] = bias
    tables["tied_head"] = config.read("tie_word_embeddings", bool, True)
    return tables


def describe_ernie_moe(config: Config) -> Tables:
    """ERNIE 4.5 with experts that a softmax weights and a bias helps to choose."""
    config.demand("use_bias", False, False)
    tables = describe_ernie(config)
    layers, dense = tables["shape"]["layers"], tables["shape"]["ffn"]
    if config.read("moe_norm_min", float, 1e-12) > 1e-6:
        raise config.refuse(f"moe_norm_min is {config.read('moe_norm_min', float)}")
    tables["shape"]["ffn"] = config.read("moe_intermediate_size", int)
    tables["moe"] = {
        "experts": config.read_first(("moe_num_experts", "num_experts"), int),
        "active_experts": config.read_first(("moe_k", "num_experts_per_tok"), int),
        "shared_experts": config.read("moe_num_shared_experts", int, 0),
        "choice_bias": True,
    }
    first, last = config.read("moe_layer_start_index", int, 1), layers - 1
    if config.read("moe_layer_end_index", int, -1) != -1:
        last = config.read("moe_layer_end_index", int)
    every = max(1, config.read("moe_layer_interval", int, 1))
    mixed = [n for n in range(layers) if (n + 1) % every == 0 and first <= n <= last]
    add_dense_layers(tables, dense, [n for n in range(layers) if n not in mixed])
    tables["tensors"] = name_experts(f"{LAYER}.mlp", shared="shared_experts")
    tables["tensors"]["choice_bias"] = f"{LAYER}.mlp.moe_statics.e_score_correction_bias"
    return tables


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


def describe_smallthinker(config: Config) -> Tables:
    """Experts with ReLU, chosen by the layer's input."""
    config.demand("moe_enable_early_router", True, True)
    config.demand("moe_enable_secondary_experts", False, False)
    values = {"hidden_act": "relu", "intermediate_size": config.read("moe_ffn_hidden_size", int)}
    tables = describe_decoder(config.change(values))
    layers = tables["shape"]["layers"]
    turned = config.read_list("rope_layout") or [1] * layers
    narrow = config.read_list("sliding_window_layout") or [0] * layers
    for key, flags in (("rope_layout", turned), ("sliding_window_layout", narrow)):
        if len(flags) != layers:
            raise config.refuse(f"{key} is not a list of {layers} numbers")
    window = [layer for layer in range(layers) if narrow[layer]]
    if window:
        tables["attention"]["sliding_window"] = config.read("sliding_window_size", int, 4096)
        if len(window) < layers:
            tables["attention"]["window_layers"] = window
    softmax = config.read("moe_primary_router_apply_softmax", bool, False)
    tables["moe"] = {
        "experts": config.read("moe_num_primary_experts", int),
        "active_experts": config.read("moe_num_active_primary_experts", int),
        "router": "softmax" if softmax else "sigmoid",
        "router_input": "layer",
    }
    tables["tied_head"] = config.read("tie_word_embeddings", bool, True)
    block = f"{LAYER}.block_sparse_moe"
    tables["tensors"] = {
        "router": f"{block}.primary_router.weight",
        **{part: f"{block}.experts.{{expert}}.{part}.weight" for part in ("gate", "up", "down")},
    }
    return tables | omit_positions(layer for layer in range(layers) if not turned[layer])


def describe_solar_open(config: Config) -> Tables:
    """Solar Open: GLM 4.5 that turns whole heads, with experts in all layers."""
    ffn = config.read("moe_intermediate_size", int)
    tables = describe_decoder(config.change({"intermediate_size": ffn}))
    tables["attention"] = {"qkv_bias": config.read("attention_bias", bool, False)}
    add_experts(config.change({"first_k_dense_replace": 0}), tables)
    add_sigmoids(config, tables, 1, 1)
    return tables


def describe_gemma(config: Config) -> Tables:
    """Llama with GELU, norms that are stored less 1, and scaled embeddings."""
    tables = describe_decoder(config)
    tables["norm"]["weight_offset"] = 1.0
    tables["multipliers"] = {"embedding": tables["shape"]["hidden"] ** 0.5}
    bias = config.read("attention_bias", bool, False)
    tables["attention"] = {"qkv_bias": bias, "output_bias": bias}
    if tables["ffn"]["activation"] == "gelu":
        # The first releases say gelu and mean its approximation.
        tables["ffn"]["activation"] = "gelu_tanh"
    tables["tied_head"] = config.read("tie_word_embeddings", bool, True)
    return tables


def describe_gemma2(config: Config) -> Tables:
    """Gemma with norms of outputs, soft caps, and a window in every other layer."""
    tables = _describe_later(config, cycle=2)
    tables["attention"]["softcap"] = config.read_limit("attn_logit_softcapping", 50.0)
    tables["logit_softcap"] = config.read_limit("final_logit_softcapping", 30.0)
    return tables


def describe_vaultgemma(config: Config) -> Tables:
    """Gemma 2 without norms of outputs."""
    tables = describe_gemma2(config)
    tables["norm"]["outputs"] = False
    return tables


def describe_gemma3(config: Config) -> Tables:
    """Gemma with norms of heads and outputs, whose layers with a window have other positions."""
    tables = _describe_later(config, config.read("sliding_window_pattern", int, 6))
    tables["attention"]["head_norm"] = True
    # The original code takes a cap of scores from the configuration and does not use it.
    tables["logit_softcap"] = config.read_limit("final_logit_softcapping", None)
    _add_local_turns(config, tables)
    return tables


def describe_gemma4(config: Config) -> Tables:
    """Gemma whose layers without a window have other heads, with norms of values and a factor for
    every layer; the small ones have embeddings of their own in every layer, and last layers without
    keys and values."""
    if config.has("use_bidirectional_attention"):
        config.demand("use_bidirectional_attention", "vision", "vision")
    tables = describe_decoder(config)
    layers, context = tables["shape"]["layers"], tables["shape"]["context"]
    is_narrow = has_cycle(6)
    kinds = config.read_list("layer_types") or [
        "sliding_attention" if is_narrow(layer) else "full_attention" for layer in range(layers)
    ]
    # The last layer has no window, whatever the configuration says.
    config = config.change({"layer_types": [*kinds[:-1], "full_attention"]})
    tables["multipliers"] = {"embedding": tables["shape"]["hidden"] ** 0.5}
    tables["tied_head"] = config.read("tie_word_embeddings", bool, True)
    tables["logit_softcap"] = config.read_limit("final_logit_softcapping", None)
    tables["layer_scale"] = True
    tables["norm"]["outputs"] = True
    bias = config.read("attention_bias", bool, False)
    window = read_window(config, layers, is_narrow, width=512)
    tables["attention"] = {"qkv_bias": bias, "output_bias": bias, "scale": 1.0, **window}
    tables["attention"] |= {"head_norm": True, "value_norm": True}
    chosen = window.get("window_layers", list(range(layers)) if window else [])
    full = [layer for layer in range(layers) if layer not in chosen]
    tables |= _read_other_heads(config, tables, full) | _read_turns(config, context, full)
    tables["tensors"] = {"ffn_norm": f"{LAYER}.pre_feedforward_layernorm.weight"}
    shared = config.read("num_kv_shared_layers", int, 0)
    if shared:
        tables["attention"]["kv_shared_layers"] = shared
    width = config.read("hidden_size_per_layer_input", int, 256)
    if width:
        tables["layer_embedding"] = describe_layer_embedding(config, tables, width)
    if config.read("enable_moe_block", bool, False):
        _add_experts(config, tables)
    elif shared and config.read("use_double_wide_mlp", bool, False):
        _widen_last_layers(tables, layers - shared)
    return tables


def describe_gemma4_unified(config: Config) -> Tables:
    """The 12B of Gemma 4: no experts, and no embeddings of layers."""
    plain = {"hidden_size_per_layer_input": 0, "enable_moe_block": False}
    return describe_gemma4(config.change(plain).set_default("sliding_window", 1024))


def describe_gemma3n(config: Config) -> Tables:
    """Gemma with several residual streams, LAuReL, embeddings that layers have of their own, last
    layers without keys and values, and cutoffs of gates."""
    widths = config.read_list("intermediate_size")
    if any(width != widths[0] for width in widths):
        raise config.refuse("intermediate_size is not the same for all layers")
    if widths:
        config = config.change({"intermediate_size": widths[0]})
    tables = describe_decoder(config)
    shape, layers = tables["shape"], tables["shape"]["layers"]
    width = config.read("hidden_size_per_layer_input", int, 256)
    if not width:
        raise config.refuse("hidden_size_per_layer_input is 0: layers without embeddings")
    config.demand("altup_active_idx", 0, 0)
    tables["multipliers"] = {"embedding": shape["hidden"] ** 0.5}
    tables["tied_head"] = config.read("tie_word_embeddings", bool, True)
    tables["logit_softcap"] = config.read_limit("final_logit_softcapping", 30.0)
    tables["norm"]["outputs"] = True
    bias = config.read("attention_bias", bool, False)
    is_narrow = has_cycle(5)
    window = read_window(config, layers, is_narrow, width=512)
    tables["attention"] = {"qkv_bias": bias, "output_bias": bias, "scale": 1.0, **window}
    tables["attention"] |= {"head_norm": True, "value_norm": True}
    shared = config.read("num_kv_shared_layers", int, 15)
    if shared:
        tables["attention"]["kv_shared_layers"] = shared
    _add_local_turns(config, tables)
    tables["tensors"] = {"ffn_norm": f"{LAYER}.pre_feedforward_layernorm.weight"}
    tables["layer_embedding"] = describe_layer_embedding(config, tables, width)
    tables["altup"] = {
        "streams": config.read("altup_num_inputs", int, 4),
        "laurel_rank": config.read("laurel_rank", int, 64),
        "scaled": config.read("altup_correct_scale", bool, True),
    }
    tables["ffn"] |= _read_gate_sparsity(config, layers)
    return tables


def _read_gate_sparsity(config: Config, layers: int) -> Tables:
    shares = config.read_list("activation_sparsity_pattern")
    if not config.has("activation_sparsity_pattern"):
        shares = [0.95 if layer < 10 < layers else 0.0 for layer in range(layers)]
    if len(shares) != layers or not all(
        type(share) in (int, float) and 0 <= share < 1 for share in shares
    ):
        raise config.refuse(f"activation_sparsity_pattern is not a list of {layers} shares")
    return {"gate_sparsity": [float(share) for share in shares]} if any(shares) else {}


def _add_local_turns(config: Config, tables: Tables) -> None:
    both = config.read_table("rope_parameters")
    full, local = both.read_table("full_attention"), both.read_table("sliding_attention")
    if config.has("rope_scaling"):
        full = config.read_table("rope_scaling")
    full = full.set_default("rope_theta", config.read("rope_theta", float, 1_000_000.0))
    theta = config.read("rope_local_base_freq", float, 10_000.0)
    add_turns(config, tables, full, local.set_default("rope_theta", theta))


def describe_layer_embedding(config: Config, tables: Tables, width: int) -> Tables:
    """Embeddings that every layer has of its own, ``width`` elements each."""
    vocab = tables["shape"]["vocab"]
    rows = config.read("vocab_size_per_layer_input", int, vocab)
    return {
        "width": width,
        "vocab": rows if rows < vocab else None,
        "factor": max(1, width) ** 0.5,
        "projection_factor": max(1, tables["shape"]["hidden"]) ** -0.5,
    }


def _widen_last_layers(tables: Tables, first: int) -> None:
    """Layers from ``first`` on have an FFN of twice the width, which is stored in two halves."""
    tables["moe"] = {"experts": 2, "active_experts": 2, "router": "none"}
    if first > 0:
        tables["moe"] |= {
            "dense_layers": list(range(first)),
            "dense_ffn": tables["shape"]["ffn"],
        }


def _add_experts(config: Config, tables: Tables) -> None:
    tables["side_ffn"] = {"width": tables["shape"]["ffn"]}
    tables["shape"]["ffn"] = config.read("moe_intermediate_size", int)
    tables["moe"] = {
        "experts": config.read("num_experts", int),
        "active_experts": config.read("top_k_experts", int),
        "router_input": "stream",
        "input_scale": max(1, tables["shape"]["hidden"]) ** -0.5,
        "expert_scale": True,
    }
    tables["tensors"] = {
        "ffn_norm": f"{LAYER}.pre_feedforward_layernorm_2.weight",
        "router": f"{LAYER}.router.proj.weight",
        "fused_gate_up": f"{LAYER}.experts.gate_up_proj.{{expert}}",
        "down": f"{LAYER}.experts.down_proj.{{expert}}",
    }


def _read_other_heads(config: Config, tables: Tables, full: list[int]) -> Tables:
    """Heads of layers without a window: stated for each, or for all as in the first releases."""
    shape, shares = tables["shape"], config.read("attention_k_eq_v", bool, False)
    own = {"kv_heads": shape["kv_heads"], "head_dim": shape["head_dim"]}
    if config.has("per_layer_config"):
        stated = config.read_table("per_layer_config")
        found = [_read_heads(stated.read_table(str(n)), own) for n in range(shape["layers"])]
    else:
        kv_heads = own["kv_heads"]
        if shares:
            kv_heads = config.read("num_global_key_value_heads", int, kv_heads)
        wide = {"kv_heads": kv_heads, "head_dim": config.read("global_head_dim", int, 512)}
        found = [wide if n in full else own for n in range(shape["layers"])]
    others = [n for n, heads in enumerate(found) if heads != own]
    if any(found[n] != found[others[0]] for n in others) or (others and others != full):
        raise config.refuse("per_layer_config does not divide layers as layer_types does")
    if not full or not (others or shares):
        return {}
    return {"other_heads": {"layers": full, **found[full[0]], "keys_are_values": shares}}


def _read_heads(config: Config, own: dict[str, int]) -> dict[str, int]:
    keys = {"kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
    return {key: config.read(name, int, own[key]) for key, name in keys.items()}


def _read_turns(config: Config, context: int, full: list[int]) -> Tables:
    both = config.read_table("rope_parameters")
    if not config.has("rope_parameters"):
        whole = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
        both = both.change({"full_attention": whole})
    found = []
    for kind in ("sliding_attention", "full_attention"):
        stated = both.read_table(kind)
        theta = stated.read("rope_theta", float, 10_000.0)
        found.append(scale_rope(config, stated, theta, context, share=1.0))
    rope, other = found
    if not full or rope == other:
        return {"rope": rope}
    return {"rope": rope, "other_rope": {**other, "layers": full}}


def _describe_later(config: Config, cycle: int) -> Tables:
    config.demand("use_bidirectional_attention", False, False)
    tables = describe_gemma(config)
    tables["norm"]["outputs"] = True
    name = config.read("hidden_activation", str, "gelu_pytorch_tanh")
    if name not in ACTIVATIONS:
        raise config.refuse(f"the activation {name!r} is unknown")
    tables["ffn"]["activation"] = ACTIVATIONS[name]
    scale = config.read("query_pre_attn_scalar", float, 256.0)
    if scale <= 0.0:
        raise config.refuse(f"query_pre_attn_scalar is {scale}")
    window = read_window(config, tables["shape"]["layers"], has_cycle(cycle), width=4096)
    tables["attention"] |= {"scale": scale**-0.5, **window}
    tables["tensors"] = {"ffn_norm": f"{LAYER}.pre_feedforward_layernorm.weight"}
    return tables


FAMILIES = {
    "hunyuan_v1_dense": describe_hunyuan,
    "hunyuan_v1_moe": describe_hunyuan_moe,
    "hy_v3": describe_hunyuan3,
    "ernie4_5": describe_ernie,
    "ernie4_5_moe": describe_ernie_moe,
    "aria_text": describe_aria,
    "smallthinker": describe_smallthinker,
    "solar_open": describe_solar_open,
    "gemma": describe_gemma,
    "gemma2": describe_gemma2,
    "gemma3_text": describe_gemma3,
    "gemma3n_text": describe_gemma3n,
    "gemma4_text": describe_gemma4,
    "gemma4_unified_text": describe_gemma4_unified,
    "vaultgemma": describe_vaultgemma,
}
