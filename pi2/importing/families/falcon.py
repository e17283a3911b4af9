"""Falcon."""

from __future__ import annotations

from pi2.importing.config import FUSED_ORDER, Config, read_activation, read_rope
from pi2.importing.families.decoders import Tables, name_plain_ffn


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


FAMILIES = {"falcon": describe_falcon}
