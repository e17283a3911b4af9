"""AFMoE, which Arcee's Trinity is."""

from __future__ import annotations

from pi2.importing.config import Config, read_window
from pi2.importing.families.decoders import LAYER, Tables, describe_decoder, omit_positions
from pi2.importing.families.experts import add_listed_experts


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


FAMILIES = {"afmoe": describe_afmoe}
