"""Gemma: norms with weights that are stored less 1 (not those of Gemma 4), scaled embeddings."""

from __future__ import annotations

from pi2.importing.config import ACTIVATIONS, Config, read_window, scale_rope
from pi2.importing.families.decoders import LAYER, Tables, add_turns, describe_decoder, has_cycle


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
    """Shares of gates that cutoffs close, by layer."""
    shares = config.read_list("activation_sparsity_pattern")
    if not config.has("activation_sparsity_pattern"):
        shares = [0.95 if layer < 10 < layers else 0.0 for layer in range(layers)]
    if len(shares) != layers or not all(
        type(share) in (int, float) and 0 <= share < 1 for share in shares
    ):
        raise config.refuse(f"activation_sparsity_pattern is not a list of {layers} shares")
    return {"gate_sparsity": [float(share) for share in shares]} if any(shares) else {}


def _add_local_turns(config: Config, tables: Tables) -> None:
    """State rotary positions, which layers with a window have of their own."""
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
    """Experts beside the FFN that the others have alone."""
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
    """Rotary positions of layers with a window, and of those without."""
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
    "gemma": describe_gemma,
    "gemma2": describe_gemma2,
    "gemma3_text": describe_gemma3,
    "gemma3n_text": describe_gemma3n,
    "gemma4_text": describe_gemma4,
    "gemma4_unified_text": describe_gemma4_unified,
    "vaultgemma": describe_vaultgemma,
}
