"""Model documents of the families that `pi2 model new` knows, from their ``config.json``.

A family is a function from the configuration to the tables of a model document; what it leaves
out has the document's default.  Names of tensors are those of the checkpoints on the hub.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pi2.importing.config import Config, read_activation, read_rope, read_window

Tables = dict[str, Any]

_LAYER = "model.layers.{layer}"
_LAYERS = ("num_hidden_layers", "n_layer")
_LIMITS = {
    **dict.fromkeys(_LAYERS, 1024),
    "hidden_size": 2**20,
    "max_position_embeddings": 2**40,
}
"""No model document states more; families may count through layers, and take roots of sizes."""


def _describe_llama(config: Config) -> Tables:
    """Llama and everything that has its names."""
    tables = _describe_decoder(config)
    bias = config.read("attention_bias", bool, False)
    tables["attention"] |= {"qkv_bias": bias, "output_bias": bias}
    tables["ffn"]["bias"] = config.read("mlp_bias", bool, False)
    return tables


def _describe_decoder(config: Config, rotated: float = 1.0) -> Tables:
    """What Llama's descendants share: RMSNorm, gated FFN, rotary positions.

    ``rotated`` is the part of a head that is rotated where the configuration states none.
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


def _describe_mistral(config: Config) -> Tables:
    tables = _describe_decoder(config)
    tables["attention"] = read_window(config, tables["shape"]["layers"])
    return tables


def _describe_bamboo(config: Config) -> Tables:
    """Mistral with dReLU, which its configuration calls ReLU."""
    tables = _describe_mistral(config)
    tables["ffn"] = {"activation": "drelu"}
    return tables


def _describe_qwen2(config: Config) -> Tables:
    tables = _describe_decoder(config)
    window = read_window(config, tables["shape"]["layers"])
    if not config.read("use_sliding_window", bool, False):
        window = {}
    tables["attention"] = {"qkv_bias": True, **window}
    return tables


def _describe_qwen3(config: Config) -> Tables:
    tables = _describe_qwen2(config)
    bias = config.read("attention_bias", bool, False)
    tables["attention"] |= {"qkv_bias": bias, "output_bias": bias, "head_norm": True}
    return tables


def _describe_gemma(config: Config) -> Tables:
    tables = _describe_decoder(config)
    tables["norm"]["weight_offset"] = 1.0
    tables["multipliers"] = {"embedding": tables["shape"]["hidden"] ** 0.5}
    bias = config.read("attention_bias", bool, False)
    tables["attention"] = {"qkv_bias": bias, "output_bias": bias}
    if tables["ffn"]["activation"] == "gelu":
        # The first releases say gelu and mean its approximation.
        tables["ffn"]["activation"] = "gelu_tanh"
    tables["tied_head"] = config.read("tie_word_embeddings", bool, True)
    return tables


def _describe_granite(config: Config) -> Tables:
    tables = _describe_llama(config)
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


def _describe_phi3(config: Config) -> Tables:
    tables = _describe_decoder(config)
    tables["attention"] = read_window(config, tables["shape"]["layers"])
    tables["tensors"] = {
        "fused_qkv": f"{_LAYER}.self_attn.qkv_proj.weight",
        "fused_gate_up": f"{_LAYER}.mlp.gate_up_proj.weight",
    }
    return tables


def _describe_glm(config: Config) -> Tables:
    tables = _describe_decoder(config, rotated=0.5)
    tables["attention"] = {"qkv_bias": config.read("attention_bias", bool, False)}
    tables["rope"]["pairs"] = "neighbours"
    tables["tensors"] = {"fused_gate_up": f"{_LAYER}.mlp.gate_up_proj.weight"}
    return tables


def _describe_stablelm(config: Config) -> Tables:
    config.demand("qk_layernorm", False, False)
    tables = _describe_decoder(config, rotated=0.25)
    epsilon = config.read("layer_norm_eps", float, 1e-5)
    tables["norm"] = {"kind": "layernorm", "epsilon": epsilon, "bias": True}
    tables["attention"] = {"qkv_bias": config.read("use_qkv_bias", bool, False)}
    if config.read("use_parallel_residual", bool, False):
        tables["residual"] = "parallel"
        tables["tensors"] = {
            "ffn_norm": f"{_LAYER}.input_layernorm.weight",
            "ffn_norm_bias": f"{_LAYER}.input_layernorm.bias",
        }
    return tables


def _describe_starcoder2(config: Config) -> Tables:
    tables = _describe_decoder(config)
    bias = config.read("use_bias", bool, True)
    epsilon = config.read("norm_epsilon", float, 1e-5)
    tables["norm"] = {"kind": "layernorm", "epsilon": epsilon, "bias": True}
    window = read_window(config, tables["shape"]["layers"])
    tables["attention"] = {"qkv_bias": bias, "output_bias": bias, **window}
    tables["ffn"] |= {"gated": False, "bias": bias}
    tables["tied_head"] = config.read("tie_word_embeddings", bool, True)
    tables["tensors"] = _name_plain_ffn(f"{_LAYER}.mlp.c_fc", f"{_LAYER}.mlp.c_proj")
    return tables


def _describe_cohere(config: Config) -> Tables:
    config.demand("use_qk_norm", False, False)
    tables = _describe_llama(config)
    epsilon = config.read("layer_norm_eps", float, 1e-5)
    tables["norm"] = {"kind": "layernorm", "epsilon": epsilon}
    tables["rope"]["pairs"] = "neighbours"
    tables["residual"] = "parallel"
    tables["multipliers"] = {"logits": config.read("logit_scale", float, 0.0625)}
    tables["tied_head"] = config.read("tie_word_embeddings", bool, True)
    tables["tensors"] = {"ffn_norm": f"{_LAYER}.input_layernorm.weight"}
    return tables


def _name_plain_ffn(up: str, down: str) -> Tables:
    return {
        "up": f"{up}.weight",
        "up_bias": f"{up}.bias",
        "down": f"{down}.weight",
        "down_bias": f"{down}.bias",
    }


def _describe_opt(config: Config) -> Tables:
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
            **_name_plain_ffn(f"{layer}.fc1", f"{layer}.fc2"),
            "final_norm": "model.decoder.final_layer_norm.weight",
            "final_norm_bias": "model.decoder.final_layer_norm.bias",
        },
    }


def _describe_falcon(config: Config) -> Tables:
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
            "fused_order": "grouped",
            "output": f"{layer}.self_attention.dense.weight",
            "output_bias": f"{layer}.self_attention.dense.bias",
            **_name_plain_ffn(f"{layer}.mlp.dense_h_to_4h", f"{layer}.mlp.dense_4h_to_h"),
            "final_norm": "transformer.ln_f.weight",
            "final_norm_bias": "transformer.ln_f.bias",
        },
    }


def _describe_gpt_neox(config: Config) -> Tables:
    tables = _describe_decoder(config, rotated=0.25)
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
        **_name_plain_ffn(f"{layer}.mlp.dense_h_to_4h", f"{layer}.mlp.dense_4h_to_h"),
        "final_norm": "gpt_neox.final_layer_norm.weight",
        "final_norm_bias": "gpt_neox.final_layer_norm.bias",
        "head": "embed_out.weight",
    }
    return tables


def _describe_mixtral(config: Config) -> Tables:
    tables = _describe_mistral(config)
    tables["moe"] = {
        "experts": config.read("num_local_experts", int),
        "active_experts": config.read("num_experts_per_tok", int),
    }
    expert = f"{_LAYER}.block_sparse_moe.experts.{{expert}}"
    tables["tensors"] = {
        "router": f"{_LAYER}.block_sparse_moe.gate.weight",
        "gate": f"{expert}.w1.weight",
        "up": f"{expert}.w3.weight",
        "down": f"{expert}.w2.weight",
    }
    return tables


def _describe_turbosparse_mixtral(config: Config) -> Tables:
    """Mixtral with dReLU, which its configuration calls ReLU, and a predictor in every expert."""
    tables = _describe_mixtral(config)
    tables["ffn"] = {"activation": "drelu"}
    predictor = f"{_LAYER}.block_sparse_moe.experts.{{expert}}.predictor"
    tables["tensors"] |= {
        "predictor_in": f"{predictor}.fc1.weight",
        "predictor_out": f"{predictor}.fc2.weight",
        "predictor_bias": f"{predictor}.bias",
    }
    return tables


FAMILIES: dict[str, Callable[[Config], Tables]] = {
    "bamboo": _describe_bamboo,
    "cohere": _describe_cohere,
    "falcon": _describe_falcon,
    "gemma": _describe_gemma,
    "glm": _describe_glm,
    "gpt_neox": _describe_gpt_neox,
    "granite": _describe_granite,
    "llama": _describe_llama,
    "mistral": _describe_mistral,
    "mixtral": _describe_mixtral,
    "opt": _describe_opt,
    "phi3": _describe_phi3,
    "qwen2": _describe_qwen2,
    "qwen3": _describe_qwen3,
    "sparsellama": _describe_llama,
    "stablelm": _describe_stablelm,
    "starcoder2": _describe_starcoder2,
    "turbosparsemixtral": _describe_turbosparse_mixtral,
}
"""By ``model_type``."""


def describe_family(config: Config) -> Tables:
    """Tables of the model document; `UserError` P544 if the family or an option is unknown."""
    kind = config.read("model_type", str)
    family = FAMILIES.get(kind)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise config.refuse(f"the family {kind!r} is unknown (known: {known})")
    for key, most in _LIMITS.items():
        if config.has(key) and not 1 <= config.read(key, int) <= most:
            raise config.refuse(f"{key} is {config.read(key, int)}, not in 1..{most}")
    return family(config)
