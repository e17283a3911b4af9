"""Gemma: norms with weights that are stored less 1, scaled embeddings."""

from __future__ import annotations

from pi2.importing.config import ACTIVATIONS, Config, read_window, scale_rope
from pi2.importing.families.decoders import LAYER, Tables, describe_decoder, has_cycle


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


def describe_gemma3(config: Config) -> Tables:
    """Gemma with norms of heads and outputs, whose layers with a window have other positions."""
    tables = _describe_later(config, config.read("sliding_window_pattern", int, 6))
    tables["attention"]["head_norm"] = True
    # The original code takes a cap of scores from the configuration and does not use it.
    tables["logit_softcap"] = config.read_limit("final_logit_softcapping", None)
    context, layers = tables["shape"]["context"], tables["shape"]["layers"]
    both = config.read_table("rope_parameters")
    full, local = both.read_table("full_attention"), both.read_table("sliding_attention")
    if config.has("rope_scaling"):
        full = config.read_table("rope_scaling")
    theta = config.read("rope_theta", float, 1_000_000.0)
    tables["rope"] = scale_rope(config, full, full.read("rope_theta", float, theta), context)
    theta = config.read("rope_local_base_freq", float, 10_000.0)
    other = scale_rope(config, local, local.read("rope_theta", float, theta), context)
    chosen = tables["attention"].get("window_layers", list(range(layers)))
    if "sliding_window" in tables["attention"] and other != tables["rope"]:
        tables["other_rope"] = {**other, "layers": chosen}
    return tables


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
}
