"""MiniCPM 3."""

from __future__ import annotations

import math

from pi2.importing.config import Config
from pi2.importing.families.decoders import Tables
from pi2.importing.families.deepseek import describe_latent


def describe_minicpm3(config: Config) -> Tables:
    """MiniCPM 3: latent attention in a dense model, with factors of depth and width."""
    layers, hidden = config.read("num_hidden_layers", int), config.read("hidden_size", int)
    heads = config.read("num_attention_heads", int)
    for key, value in (
        ("v_head_dim", hidden // max(1, heads)),
        ("kv_lora_rank", 256),
        ("qk_nope_head_dim", 64),
        ("qk_rope_head_dim", 32),
    ):
        config = config.set_default(key, value)
    tables = describe_latent(config)
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, 1e-5)
    tables["tied_head"] = config.read("tie_word_embeddings", bool, True)
    tables["ffn"]["bias"] = config.read("mlp_bias", bool, False)
    root = math.sqrt(layers)
    depth = config.read_limit("scale_depth", 1.4)
    base = config.read_limit("dim_model_base", 256.0)
    tables["multipliers"] = {
        "embedding": config.read("scale_emb", float, 12.0),
        "residual": 1.0 if depth is None else depth / root,
        "logits": 1.0 if base is None else base / hidden,
    }
    return tables


FAMILIES = {"minicpm3": describe_minicpm3}
