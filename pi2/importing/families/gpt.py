"""GPT-2 and its relatives, gpt-oss, OPT, Falcon and StarCoder."""

from __future__ import annotations

from pi2.importing.config import (
    FUSED_ORDER,
    SPLIT_EXPERTS,
    Config,
    read_activation,
    read_rope,
    read_whole_window,
    read_window,
)
from pi2.importing.families.decoders import LAYER, Tables, describe_decoder, name_plain_ffn

SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""How positions are scaled where a configuration says nothing."""


def describe_gpt_oss(config: Config) -> Tables:
    """Experts whose matrices are in one tensor, columns where others have rows."""
    if not config.has("rope_parameters") and not config.has("rope_scaling"):
        config = config.change({"rope_parameters": SCALING})
    tables = describe_decoder(config)
    layers, context = tables["shape"]["layers"], tables["shape"]["context"]
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, 1e-5)
    tables["rope"] = read_rope(config, context, theta=150000.0)
    bias = config.read("attention_bias", bool, True)
    window = read_window(config, layers, lambda layer: layer % 2 == 0, width=128)
    tables["attention"] = {"qkv_bias": bias, "output_bias": bias, "sinks": True, **window}
    limit = config.read("swiglu_limit", float, 7.0)
    if limit <= 0:
        raise config.refuse(f"swiglu_limit is {limit}")
    tables["ffn"] = {
        # The code computes this, whatever hidden_act says.
        "activation": "silu",
        "bias": True,
        "slope": config.read("swiglu_alpha", float, 1.702),
        "limit": limit,
        "up_offset": 1.0,
    }
    tables["moe"] = {
        "experts": config.read_first(("num_local_experts", "num_experts"), int),
        "active_experts": config.read_first(("num_experts_per_tok", "experts_per_token"), int),
        "router_bias": True,
    }
    experts = f"{LAYER}.mlp.experts"
    tables["tensors"] = {
        "router": f"{LAYER}.mlp.router.weight",
        "router_bias": f"{LAYER}.mlp.router.bias",
        "sinks": f"{LAYER}.self_attn.sinks",
    }
    if config.read(SPLIT_EXPERTS, bool, False):
        for part in ("gate", "up", "down"):
            tables["tensors"] |= {
                part: f"{experts}.{{expert}}.{part}_proj.weight",
                f"{part}_bias": f"{experts}.{part}_proj_bias",
            }
        return tables
    tables["tensors"] |= {
        "fused_gate_up": f"{experts}.gate_up_proj.{{expert}}",
        "fused_gate_up_bias": f"{experts}.gate_up_proj_bias",
        "gate_up_order": "neighbours",
        "down": f"{experts}.down_proj.{{expert}}",
        "down_bias": f"{experts}.down_proj_bias",
        "experts_turned": True,
    }
    return tables


def describe_opt(config: Config) -> Tables:
    """Learned positions, ReLU, and biases everywhere."""
    config.demand("do_layer_norm_before", True, True)
    config.demand("_remove_final_layer_norm", False, False)
    config.demand("layer_norm_elementwise_affine", True, True)
    hidden, heads = config.read("hidden_size", int), config.read("num_attention_heads", int)
    config.demand("word_embed_proj_dim", hidden, hidden)
    bias = config.read("enable_bias", bool, True)
    layer = "model.decoder.layers.{layer}"
    attention = f"{layer}.self_attn"
    return {
        "shape": {
            "layers": config.read("num_hidden_layers", int),
            "hidden": hidden,
            "ffn": config.read("ffn_dim", int),
            "heads": heads,
            "kv_heads": heads,
            "head_dim": hidden // max(1, heads),
            "vocab": config.read("vocab_size", int),
            "context": config.read("max_position_embeddings", int),
        },
        "norm": {"kind": "layernorm", "epsilon": 1e-5, "bias": True},
        "rope": {"kind": "none"},
        "positions": {"offset": 2},
        "attention": {"qkv_bias": bias, "output_bias": bias},
        "ffn": {
            "activation": read_activation(config, "activation_function"),
            "gated": False,
            "bias": bias,
        },
        "tied_head": config.read("tie_word_embeddings", bool, True),
        "tensors": {
            "embedding": "model.decoder.embed_tokens.weight",
            "positions": "model.decoder.embed_positions.weight",
            "attention_norm": f"{attention}_layer_norm.weight",
            "attention_norm_bias": f"{attention}_layer_norm.bias",
            **{name: f"{attention}.{name[0]}_proj.weight" for name in ("query", "key", "value")},
            **{f"{name}_bias": f"{attention}.{name[0]}_proj.bias" for name in ("query", "key")},
            "value_bias": f"{attention}.v_proj.bias",
            "output": f"{attention}.out_proj.weight",
            "output_bias": f"{attention}.out_proj.bias",
            "ffn_norm": f"{layer}.final_layer_norm.weight",
            "ffn_norm_bias": f"{layer}.final_layer_norm.bias",
            **name_plain_ffn(f"{layer}.fc1", f"{layer}.fc2"),
            "final_norm": "model.decoder.final_layer_norm.weight",
            "final_norm_bias": "model.decoder.final_layer_norm.bias",
        },
    }


def describe_falcon(config: Config) -> Tables:
    """Query, key and value in one tensor; one or two norms before attention and FFN."""
    config.demand("alibi", False, False)
    hidden = config.read("hidden_size", int)
    heads = config.read_first(("num_attention_heads", "n_head"), int)
    newer = config.read("new_decoder_architecture", bool, False)
    multi_query = config.read("multi_query", bool, True)
    kv_heads = config.read_first(("num_kv_heads", "n_head_kv"), int) if newer else 1
    if not newer and not multi_query:
        kv_heads = heads
    parallel = newer or config.read("parallel_attn", bool, True)
    bias = config.read("bias", bool, False)
    head_dim = hidden // max(1, heads)
    context = config.read("max_position_embeddings", int, 2048)
    epsilon = config.read("layer_norm_epsilon", float, 1e-5)
    layer = "transformer.h.{layer}"
    norms = {"attention_norm": "input_layernorm", "ffn_norm": "input_layernorm"}
    if newer and config.read("num_ln_in_parallel_attn", int, 2) == 2:
        norms = {"attention_norm": "ln_attn", "ffn_norm": "ln_mlp"}
    elif not parallel:
        norms["ffn_norm"] = "post_attention_layernorm"
    names = {key: f"{layer}.{name}.weight" for key, name in norms.items()}
    names |= {f"{key}_bias": f"{layer}.{name}.bias" for key, name in norms.items()}
    activation = "gelu"
    if config.has("activation") or config.has("hidden_act"):
        activation = read_activation(config, "activation", "hidden_act")
    return {
        "shape": {
            "layers": config.read_first(("num_hidden_layers", "n_layer"), int),
            "hidden": hidden,
            "ffn": config.read("ffn_hidden_size", int, 4 * hidden),
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "vocab": config.read("vocab_size", int),
            "context": context,
        },
        "norm": {"kind": "layernorm", "epsilon": epsilon, "bias": True},
        "rope": read_rope(config, context),
        "attention": {"qkv_bias": bias, "output_bias": bias},
        "residual": "parallel" if parallel else "sequential",
        "ffn": {"activation": activation, "gated": False, "bias": bias},
        "tied_head": config.read("tie_word_embeddings", bool, True),
        "tensors": {
            "embedding": "transformer.word_embeddings.weight",
            **names,
            "fused_qkv": f"{layer}.self_attention.query_key_value.weight",
            "fused_qkv_bias": f"{layer}.self_attention.query_key_value.bias",
            "fused_order": config.read(FUSED_ORDER, str, "grouped"),
            "output": f"{layer}.self_attention.dense.weight",
            "output_bias": f"{layer}.self_attention.dense.bias",
            **name_plain_ffn(f"{layer}.mlp.dense_h_to_4h", f"{layer}.mlp.dense_4h_to_h"),
            "final_norm": "transformer.ln_f.weight",
            "final_norm_bias": "transformer.ln_f.bias",
        },
    }


def describe_gpt_bigcode(config: Config) -> Tables:
    """Learned positions, biases everywhere, and one key head for all queries, or one for each."""
    config.demand("add_cross_attention", False, False)
    hidden, heads = config.read("n_embd", int), config.read("n_head", int)
    if heads < 1 or hidden % heads or hidden < heads:
        raise config.refuse(f"n_embd {hidden} is not divided by {heads} heads")
    is_shared = config.read("multi_query", bool, True)
    layer = "transformer.h.{layer}"
    norms = {"attention_norm": f"{layer}.ln_1", "ffn_norm": f"{layer}.ln_2"}
    norms["final_norm"] = "transformer.ln_f"
    tables: Tables = {
        "shape": {
            "layers": config.read("n_layer", int),
            "hidden": hidden,
            "ffn": config.read("n_inner", int, 4 * hidden),
            "heads": heads,
            "kv_heads": 1 if is_shared else heads,
            "head_dim": hidden // heads,
            "vocab": config.read("vocab_size", int),
            "context": config.read("n_positions", int),
        },
        "norm": {
            "kind": "layernorm",
            "epsilon": config.read("layer_norm_epsilon", float, 1e-5),
            "bias": True,
        },
        "rope": {"kind": "none"},
        "positions": {},
        "attention": {"qkv_bias": True, "output_bias": True},
        "ffn": {
            "activation": read_activation(config, "activation_function"),
            "gated": False,
            "bias": True,
        },
        "tied_head": config.read("tie_word_embeddings", bool, True),
        "tensors": {
            "embedding": "transformer.wte.weight",
            "positions": "transformer.wpe.weight",
            **{key: f"{name}.weight" for key, name in norms.items()},
            **{f"{key}_bias": f"{name}.bias" for key, name in norms.items()},
            "fused_qkv": f"{layer}.attn.c_attn.weight",
            "fused_qkv_bias": f"{layer}.attn.c_attn.bias",
            "fused_order": "stacked" if is_shared else "grouped",
            "output": f"{layer}.attn.c_proj.weight",
            "output_bias": f"{layer}.attn.c_proj.bias",
            **name_plain_ffn(f"{layer}.mlp.c_fc", f"{layer}.mlp.c_proj"),
        },
    }
    if not config.read("scale_attn_weights", bool, True):
        tables["attention"]["scale"] = 1.0
    return tables


def describe_starcoder2(config: Config) -> Tables:
    """Mistral with LayerNorm, biases, and an FFN without gates."""
    tables = describe_decoder(config)
    bias = config.read("use_bias", bool, True)
    epsilon = config.read("norm_epsilon", float, 1e-5)
    tables["norm"] = {"kind": "layernorm", "epsilon": epsilon, "bias": True}
    window = read_whole_window(config)
    tables["attention"] = {"qkv_bias": bias, "output_bias": bias, **window}
    tables["ffn"] |= {"gated": False, "bias": bias}
    tables["tied_head"] = config.read("tie_word_embeddings", bool, True)
    tables["tensors"] = name_plain_ffn(f"{LAYER}.mlp.c_fc", f"{LAYER}.mlp.c_proj")
    return tables


def describe_gptj(config: Config) -> Tables:
    """Like Phi, without biases in attention; neighbours are rotated."""
    hidden, heads = config.read("n_embd", int), config.read("n_head", int)
    if heads < 1 or hidden % heads or hidden < heads:
        raise config.refuse(f"n_embd {hidden} is not divided by {heads} heads")
    head_dim = hidden // heads
    rotated = config.read("rotary_dim", int)
    layer = "transformer.h.{layer}"
    norms = {"attention_norm": "ln_1", "ffn_norm": "ln_1"}
    attention = {"query": "q", "key": "k", "value": "v", "output": "out"}
    return {
        "shape": {
            "layers": config.read("n_layer", int),
            "hidden": hidden,
            "ffn": config.read("n_inner", int, 4 * hidden),
            "heads": heads,
            "kv_heads": heads,
            "head_dim": head_dim,
            "vocab": config.read("vocab_size", int),
            "context": config.read("n_positions", int),
        },
        "norm": {
            "kind": "layernorm",
            "epsilon": config.read("layer_norm_epsilon", float, 1e-5),
            "bias": True,
        },
        "rope": {"share": rotated / head_dim, "pairs": "neighbours"},
        "residual": "parallel",
        "ffn": {
            "activation": read_activation(config, "activation_function"),
            "gated": False,
            "bias": True,
        },
        "tied_head": config.read("tie_word_embeddings", bool, False),
        "head_bias": True,
        "tensors": {
            "embedding": "transformer.wte.weight",
            **{key: f"{layer}.{name}.weight" for key, name in norms.items()},
            **{f"{key}_bias": f"{layer}.{name}.bias" for key, name in norms.items()},
            **{key: f"{layer}.attn.{name}_proj.weight" for key, name in attention.items()},
            **name_plain_ffn(f"{layer}.mlp.fc_in", f"{layer}.mlp.fc_out"),
            "final_norm": "transformer.ln_f.weight",
            "final_norm_bias": "transformer.ln_f.bias",
        },
    }


def describe_gpt_neox(config: Config) -> Tables:
    """Query, key and value in one tensor; a quarter of each head is rotated."""
    tables = describe_decoder(config, rotated=0.25)
    bias = config.read("attention_bias", bool, True)
    epsilon = config.read("layer_norm_eps", float, 1e-5)
    layer = "gpt_neox.layers.{layer}"
    tables["norm"] = {"kind": "layernorm", "epsilon": epsilon, "bias": True}
    tables["rope"]["theta"] = config.read("rotary_emb_base", float, tables["rope"]["theta"])
    tables["shape"]["kv_heads"] = tables["shape"]["heads"]
    tables["attention"] = {"qkv_bias": bias, "output_bias": bias}
    tables["ffn"] |= {"gated": False, "bias": True}
    if config.read("use_parallel_residual", bool, True):
        tables["residual"] = "parallel"
    tables["tensors"] = {
        "embedding": "gpt_neox.embed_in.weight",
        "attention_norm": f"{layer}.input_layernorm.weight",
        "attention_norm_bias": f"{layer}.input_layernorm.bias",
        "fused_qkv": f"{layer}.attention.query_key_value.weight",
        "fused_qkv_bias": f"{layer}.attention.query_key_value.bias",
        "fused_order": "grouped",
        "output": f"{layer}.attention.dense.weight",
        "output_bias": f"{layer}.attention.dense.bias",
        "ffn_norm": f"{layer}.post_attention_layernorm.weight",
        "ffn_norm_bias": f"{layer}.post_attention_layernorm.bias",
        **name_plain_ffn(f"{layer}.mlp.dense_h_to_4h", f"{layer}.mlp.dense_4h_to_h"),
        "final_norm": "gpt_neox.final_layer_norm.weight",
        "final_norm_bias": "gpt_neox.final_layer_norm.bias",
        "head": "embed_out.weight",
    }
    return tables


FAMILIES = {
    "gpt_oss": describe_gpt_oss,
    "opt": describe_opt,
    "falcon": describe_falcon,
    "gpt_bigcode": describe_gpt_bigcode,
    "starcoder2": describe_starcoder2,
    "gpt_neox": describe_gpt_neox,
    "gptj": describe_gptj,
}
