"""GPT-J and GPT-NeoX."""

from __future__ import annotations

from pi2.importing.config import Config, read_activation
from pi2.importing.families.decoders import Tables, describe_decoder, name_plain_ffn


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
    "gpt_neox": describe_gpt_neox,
    "gptj": describe_gptj,
}
