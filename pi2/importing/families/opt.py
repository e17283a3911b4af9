"""OPT."""

from __future__ import annotations

from pi2.importing.config import Config, read_activation
from pi2.importing.families.decoders import Tables, name_plain_ffn


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


FAMILIES = {"opt": describe_opt}
