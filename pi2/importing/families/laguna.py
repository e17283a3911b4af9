"""Laguna."""

from __future__ import annotations

from pi2.importing.config import Config, read_window
from pi2.importing.families.decoders import LAYER, Tables, add_turns, describe_decoder
from pi2.importing.families.experts import add_dense_layers, list_dense_layers
from pi2.importing.families.qwen import add_qwen_experts, add_shared_experts

_FULL = {"rope_theta": 500_000.0, "partial_rotary_factor": 0.5}
_LOCAL = {"rope_theta": 10_000.0, "partial_rotary_factor": 1.0}


def describe_laguna(config: Config) -> Tables:
    """Laguna: AFMoE's experts, gates of what heads mix, and layers that differ in their heads."""
    config.demand("moe_apply_router_weight_on_input", False, False)
    if config.read("moe_router_logit_softcapping", float, 0.0) > 0.0:
        raise config.refuse("moe_router_logit_softcapping is not 0")
    tables = describe_decoder(config.set_default("head_dim", 128))
    layers, dense = tables["shape"]["layers"], tables["shape"]["ffn"]
    bias = config.read("attention_bias", bool, False)
    is_whole = config.values.get("gating", True) not in (True, "per-head")
    tables["attention"] = {
        "qkv_bias": bias,
        "output_bias": bias,
        "head_norm": True,
        "output_gate": True,
        "output_gate_of": "element" if is_whole else "head",
        "output_gate_function": "softplus",
    }
    _add_heads(config, tables)
    tables["attention"] |= read_window(config, layers, lambda layer: False, width=512)
    both = config.read_table("rope_parameters")
    stated = both.has("full_attention") or both.has("sliding_attention")
    full, local = (
        both.read_table(key) if stated else both.change(default)
        for key, default in (("full_attention", _FULL), ("sliding_attention", _LOCAL))
    )
    full, local = (
        table.set_default("rope_theta", default["rope_theta"])
        for table, default in ((full, _FULL), (local, _LOCAL))
    )
    add_turns(config, tables, full, local, share=1.0)
    add_qwen_experts(config, tables)
    add_shared_experts(config.set_default("shared_expert_intermediate_size", 512), tables)
    for key in ("shared_gate", "dense_layers", "dense_ffn"):
        tables["moe"].pop(key, None)
    add_dense_layers(tables, dense, list_dense_layers(config, layers, 1))
    tables["moe"] |= {"router": "sigmoid", "choice_bias": True, "normalise_weights": True}
    tables["moe"]["scaling"] = config.read("moe_routed_scaling_factor", float, 1.0)
    tables["tensors"] |= {
        "query_gate": f"{LAYER}.self_attn.g_proj.weight",
        "choice_bias": f"{LAYER}.mlp.experts.e_score_correction_bias",
    }
    return tables


def _add_heads(config: Config, tables: Tables) -> None:
    """State the query heads of layers, which have the same keys and values."""
    shape = tables["shape"]
    counts = config.read_list("num_attention_heads_per_layer")
    if not counts:
        return
    if len(counts) != shape["layers"] or not all(type(item) is int for item in counts):
        raise config.refuse(
            f"num_attention_heads_per_layer is not a list of {shape['layers']} numbers"
        )
    found = sorted(set(counts))
    if len(found) > 2:
        raise config.refuse(f"layers have {len(found)} numbers of heads, pi2 computes two")
    shape["heads"] = found[0]
    if len(found) == 2:
        tables["other_heads"] = {
            "layers": [layer for layer, count in enumerate(counts) if count == found[1]],
            "heads": found[1],
            "kv_heads": shape["kv_heads"],
            "head_dim": shape["head_dim"],
        }


FAMILIES = {"laguna": describe_laguna}
