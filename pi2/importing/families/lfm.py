"""LFM, Llama 4, AFMoE and MiMo."""

from __future__ import annotations

from pi2.importing.config import SPLIT_EXPERTS, Config, read_rope, read_window
from pi2.importing.families.decoders import (
    LAYER,
    Tables,
    add_dense_layers,
    add_experts,
    add_kinds,
    add_listed_experts,
    add_sigmoids,
    add_turns,
    describe_decoder,
    list_dense_layers,
    omit_positions,
)

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


def describe_afmoe(config: Config) -> Tables:
    """AFMoE: norms before and after, gates of what heads mix, positions where there is a
    window."""
    tables = describe_decoder(config)
    layers = tables["shape"]["layers"]
    tables["norm"] |= {"epsilon": config.read("rms_norm_eps", float, 1e-5), "outputs": True}
    bias = config.read("attention_bias", bool, False)
    tables["attention"] = {"qkv_bias": bias, "output_bias": bias}
    tables["attention"] |= {"head_norm": True, "output_gate": True}
    cycle = config.read("global_attn_every_n_layers", int, 4)
    if cycle < 1:
        raise config.refuse(f"global_attn_every_n_layers is {cycle}")
    window = read_window(config, layers, lambda layer: (layer + 1) % cycle != 0, width=1024)
    tables["attention"] |= window
    turned = window.get("window_layers", range(layers)) if window else ()
    tables |= omit_positions(set(range(layers)) - set(turned))
    if config.read("mup_enabled", bool, False):
        tables["multipliers"] = {"embedding": tables["shape"]["hidden"] ** 0.5}
    add_listed_experts(config, tables, config.read("num_dense_layers", int, 1))
    tables["moe"] |= {"router": "sigmoid", "choice_bias": True}
    tables["moe"]["scaling"] = config.read("route_scale", float, 1.0)
    tables["tensors"] |= {
        "query_gate": f"{LAYER}.self_attn.gate_proj.weight",
        "attention_output_norm": f"{LAYER}.post_attention_layernorm.weight",
        "ffn_norm": f"{LAYER}.pre_mlp_layernorm.weight",
        "ffn_output_norm": f"{LAYER}.post_mlp_layernorm.weight",
        "router": f"{LAYER}.mlp.router.gate.weight",
        "choice_bias": f"{LAYER}.mlp.expert_bias",
    }
    return tables


_THETA, _LOCAL_THETA, _SHARE = 5_000_000.0, 10_000.0, 0.334


def describe_mimo_v2_flash(config: Config) -> Tables:
    """MiMo V2 Flash: layers with a window have twice as many keys, and sinks; values are narrower
    than keys."""
    config = config.set_default("head_dim", 192).set_default("num_key_value_heads", 4)
    tables = describe_decoder(config)
    shape = tables["shape"]
    layers, dense = shape["layers"], shape["ffn"]
    epsilon = config.read("layernorm_epsilon", float, 1e-5)
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, epsilon)
    window = read_window(_name_window(config), layers, _has_window, width=129)
    local = window.get("window_layers", list(range(layers))) if window else []
    width = config.read("v_head_dim", int, 128)
    if not 1 <= width <= shape["head_dim"]:
        raise config.refuse(f"v_head_dim is {width}, head_dim {shape['head_dim']}")
    scale = config.values.get("attention_value_scale", 0.707)
    tables["attention"] = {
        "qkv_bias": config.read("attention_bias", bool, False),
        "value_width": width,
        "value_scale": 1.0 if scale is None else config.read("attention_value_scale", float, 0.707),
        **window,
    }
    if local:
        tables["attention"] |= {"sinks": True, "sink_layers": local}
        _add_heads(config, tables, local)
    _add_turns(config, tables)
    values = {"first_k_dense_replace": 0, "n_shared_experts": 0}
    if config.values.get("routed_scaling_factor") is None:
        values["routed_scaling_factor"] = 1
    add_experts(config.change(values), tables)
    add_dense_layers(tables, dense, list_dense_layers(config, layers, 1))
    add_sigmoids(config, tables, 1, 1)
    tables["tensors"]["sinks"] = f"{LAYER}.self_attn.attention_sink_bias"
    return tables


def _has_window(layer: int) -> bool:
    return layer != 0 and (layer + 1) % 6 != 0


def _name_window(config: Config) -> Config:
    """The configuration with what older ones say of windows in newer words: their width leaves the
    query's own token out."""
    changes: dict[str, object] = {}
    if config.has("sliding_window_size"):
        changes["sliding_window"] = config.read("sliding_window_size", int) + 1
    older = config.read_list("hybrid_layer_pattern")
    if older and not config.read_list("layer_types"):
        kinds = ("full_attention", "sliding_attention")
        changes["layer_types"] = [kinds[bool(has_window)] for has_window in older]
    return config.change(changes)


def _add_heads(config: Config, tables: Tables, local: list[int]) -> None:
    shape = tables["shape"]
    count = config.read("swa_num_key_value_heads", int, 2 * shape["kv_heads"])
    if count != shape["kv_heads"]:
        tables["other_heads"] = {
            "layers": local,
            "kv_heads": count,
            "head_dim": shape["head_dim"],
        }


def _add_turns(config: Config, tables: Tables) -> None:
    both = config.read_table("rope_parameters")
    if both.has("full_attention"):
        full, local = (both.read_table(f"{kind}_attention") for kind in ("full", "sliding"))
    else:
        share = config.read("partial_rotary_factor", float, _SHARE)
        full, local = (
            both.change({"rope_theta": theta, "partial_rotary_factor": share})
            for theta in (
                config.read("rope_theta", float, _THETA),
                config.read("swa_rope_theta", float, _LOCAL_THETA),
            )
        )
    add_turns(config, tables, full, local, share=1.0)


def describe_lfm2(config: Config) -> Tables:
    """Short convolutions beside attention whose heads are normalised."""
    size = config.read_first(("block_ff_dim", "intermediate_size"), int)
    if config.read("block_auto_adjust_ff_dim", bool, True):
        size = int(2 * size / 3)
        size = int(config.read("block_ffn_dim_multiplier", float, 1.0) * size)
        multiple = config.read("block_multiple_of", int, 256)
        if multiple < 1:
            raise config.refuse(f"block_multiple_of is {multiple}")
        size = -(-size // multiple) * multiple
    tables = _describe_lfm2(config, size)
    tables["tensors"] |= _name_lfm2_ffn()
    return tables


def describe_lfm3(config: Config) -> Tables:
    """LFM3: LFM2 with norms of outputs, a gate for each head, and a window in some layers."""
    layers = config.read("num_hidden_layers", int)
    kinds = config.read_list("layer_types")
    if not kinds:
        places = ["sliding_attention", "conv", "full_attention", "conv"]
        kinds = [places[n % 4] if n else "conv" for n in range(layers)]
    others = ["full_attention" if kind == "sliding_attention" else kind for kind in kinds]
    size = config.read("intermediate_size", int)
    tables = _describe_lfm2(
        config.change({"layer_types": others}).set_default("conv_L_cache", 7), size
    )
    narrow = [n for n, kind in enumerate(kinds) if kind == "sliding_attention"]
    bias = config.read("attention_bias", bool, False)
    tables["attention"] |= {"qkv_bias": bias, "output_bias": bias}
    if config.read("use_attention_gate", bool, True):
        tables["attention"] |= {"output_gate": True, "output_gate_of": "head"}
        tables["tensors"]["query_gate"] = f"{LAYER}.self_attn.gate_proj.weight"
    if narrow:
        width = config.read("sliding_window", int, 256)
        tables["attention"] |= {"sliding_window": width, "window_layers": narrow}
    whole = {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6}
    both = config.set_default("rope_parameters", {"full_attention": whole})
    both = both.read_table("rope_parameters")
    full, local = (
        both.read_table(f"{kind}_attention").set_default("rope_theta", theta)
        for kind, theta in (("full", 1_000_000.0), ("sliding", 10_000.0))
    )
    add_turns(config, tables, full, local, share=1.0)
    names = {"query_norm": "q_norm", "key_norm": "k_norm", "output": "o_proj"}
    tables["tensors"] |= {key: f"{LAYER}.self_attn.{name}.weight" for key, name in names.items()}
    if config.read("use_sandwich_norm", bool, True):
        tables["norm"]["outputs"] = True
        tables["tensors"] |= {
            "attention_output_norm": f"{LAYER}.post_operator_norm.weight",
            "ffn_output_norm": f"{LAYER}.post_ffn_norm.weight",
        }
    tables["tensors"] |= _name_lfm2_ffn()
    return tables


def _name_lfm2_ffn() -> Tables:
    names = (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    return {part: f"{LAYER}.feed_forward.{name}.weight" for part, name in names}


def describe_lfm2_moe(config: Config) -> Tables:
    """LFM2 with experts behind its first layers, weighted by sigmoids."""
    tables = _describe_lfm2(config, config.read("intermediate_size", int))
    dense, ffn = tables["shape"]["ffn"], config.read("moe_intermediate_size", int)
    if ffn < 1:
        raise config.refuse(f"moe_intermediate_size is {ffn}")
    tables["shape"]["ffn"] = ffn
    tables["moe"] = {
        "experts": config.read_first(("num_experts", "num_local_experts"), int),
        "active_experts": config.read("num_experts_per_tok", int, 4),
        "router": "sigmoid",
        "choice_bias": config.read("use_expert_bias", bool, True),
        "normalise_weights": config.read("norm_topk_prob", bool, True),
        "scaling": config.read("routed_scaling_factor", float, 1.0),
    }
    add_dense_layers(tables, dense, range(config.read("num_dense_layers", int, 2)))
    block = f"{LAYER}.feed_forward"
    tables["tensors"] |= {
        "router": f"{block}.gate.weight",
        "choice_bias": f"{block}.expert_bias",
    }
    for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        tables["tensors"] |= {
            part: f"{block}.experts.{{expert}}.{name}.weight",
            f"dense_{part}": f"{block}.{name}.weight",
        }
    return tables


def _describe_lfm2(config: Config, ffn: int) -> Tables:
    """What LFM2 with and without experts share."""
    theta = config.read("theta", float, config.read("rope_theta", float, 1_000_000.0))
    tables = describe_decoder(
        config.change({"intermediate_size": ffn, "hidden_act": "silu", "rope_theta": theta})
    )
    epsilon = config.read("block_norm_eps", float, config.read("norm_eps", float, 1e-5))
    tables["norm"] = {"epsilon": config.read("norm_eps", float, epsilon)}
    tables["attention"] = {"head_norm": True}
    tables["tied_head"] = config.read(
        "tie_word_embeddings", bool, config.read("tie_embedding", bool, True)
    )
    chosen = config.read_list("full_attn_idxs")
    add_kinds(config, tables, "convolution", lambda layer: not chosen or layer in chosen)
    tables["convolution"] = {
        "width": tables["shape"]["hidden"],
        "kernel": config.read("conv_L_cache", int, 3),
        "bias": config.read("conv_bias", bool, False),
    }
    conv = f"{LAYER}.conv"
    tables["tensors"] |= {
        "attention_norm": f"{LAYER}.operator_norm.weight",
        "ffn_norm": f"{LAYER}.ffn_norm.weight",
        "final_norm": "model.embedding_norm.weight",
        "query_norm": f"{LAYER}.self_attn.q_layernorm.weight",
        "key_norm": f"{LAYER}.self_attn.k_layernorm.weight",
        "output": f"{LAYER}.self_attn.out_proj.weight",
        "state_order": "convolution",
        "state_in": f"{conv}.in_proj.weight",
        "state_in_bias": f"{conv}.in_proj.bias",
        "state_convolution": f"{conv}.conv.weight",
        "state_convolution_bias": f"{conv}.conv.bias",
        "state_output": f"{conv}.out_proj.weight",
        "state_output_bias": f"{conv}.out_proj.bias",
    }
    return tables


FAMILIES = {
    "llama4_text": describe_llama4,
    "afmoe": describe_afmoe,
    "mimo_v2_flash": describe_mimo_v2_flash,
    "lfm2": describe_lfm2,
    "lfm2_moe": describe_lfm2_moe,
    "lfm3": describe_lfm3,
}
