"""LFM 2 and 3: short convolutions beside attention."""

from __future__ import annotations

from pi2.importing.config import Config
from pi2.importing.families.decoders import LAYER, Tables, add_turns, describe_decoder
from pi2.importing.families.experts import add_dense_layers
from pi2.importing.families.states import add_kinds


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
    """Names of an FFN that is no mixture."""
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
    "lfm2": describe_lfm2,
    "lfm2_moe": describe_lfm2_moe,
    "lfm3": describe_lfm3,
}
