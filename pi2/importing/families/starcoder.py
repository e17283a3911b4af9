"""StarCoder 1 and 2."""

from __future__ import annotations

from pi2.importing.config import Config, read_activation, read_whole_window
from pi2.importing.families.decoders import LAYER, Tables, describe_decoder, name_plain_ffn


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


FAMILIES = {
    "gpt_bigcode": describe_gpt_bigcode,
    "starcoder2": describe_starcoder2,
}
