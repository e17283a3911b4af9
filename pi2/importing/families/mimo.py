"""MiMo V2 Flash."""

from __future__ import annotations

from pi2.importing.config import Config, read_window
from pi2.importing.families.decoders import LAYER, Tables, add_turns, describe_decoder
from pi2.importing.families.experts import (
    add_dense_layers,
    add_experts,
    add_sigmoids,
    list_dense_layers,
)

_THETA, _LOCAL_THETA, _SHARE = 5_000_000.0, 10_000.0, 0.334


def describe_mimo_v2_flash(config: Config) -> Tables:
    """MiMo V2 Flash: layers with a window have twice as many keys, and sinks; values are narrower
    than keys."""
    config = config.set_default("head_dim", 192).set_default("num_key_value_heads", 4)
    tables = describe_decoder(config)
    shape = tables["shape"]
    layers, dense = shape["layers"], shape["ffn"]
    epsilon = config.read("layernorm_epsilon", float, 1e-5)
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, epsilon)
    window = read_window(_name_window(config), layers, _has_window, width=129)
    local = window.get("window_layers", list(range(layers))) if window else []
    width = config.read("v_head_dim", int, 128)
    if not 1 <= width <= shape["head_dim"]:
        raise config.refuse(f"v_head_dim is {width}, head_dim {shape['head_dim']}")
    scale = config.values.get("attention_value_scale", 0.707)
    tables["attention"] = {
        "qkv_bias": config.read("attention_bias", bool, False),
        "value_width": width,
        "value_scale": 1.0 if scale is None else config.read("attention_value_scale", float, 0.707),
        **window,
    }
    if local:
        tables["attention"] |= {"sinks": True, "sink_layers": local}
        _add_heads(config, tables, local)
    _add_turns(config, tables)
    values = {"first_k_dense_replace": 0, "n_shared_experts": 0}
    if config.values.get("routed_scaling_factor") is None:
        values["routed_scaling_factor"] = 1
    add_experts(config.change(values), tables)
    add_dense_layers(tables, dense, list_dense_layers(config, layers, 1))
    add_sigmoids(config, tables, 1, 1)
    tables["tensors"]["sinks"] = f"{LAYER}.self_attn.attention_sink_bias"
    return tables


def _has_window(layer: int) -> bool:
    return layer != 0 and (layer + 1) % 6 != 0


def _name_window(config: Config) -> Config:
    """The configuration with what older ones say of windows in newer words: their width leaves the
    query's own token out."""
    changes: dict[str, object] = {}
    if config.has("sliding_window_size"):
        changes["sliding_window"] = config.read("sliding_window_size", int) + 1
    older = config.read_list("hybrid_layer_pattern")
    if older and not config.read_list("layer_types"):
        kinds = ("full_attention", "sliding_attention")
        changes["layer_types"] = [kinds[bool(has_window)] for has_window in older]
    return config.change(changes)


def _add_heads(config: Config, tables: Tables, local: list[int]) -> None:
    """State the keys of layers with a window: twice as many as in the others."""
    shape = tables["shape"]
    count = config.read("swa_num_key_value_heads", int, 2 * shape["kv_heads"])
    if count != shape["kv_heads"]:
        tables["other_heads"] = {
            "layers": local,
            "kv_heads": count,
            "head_dim": shape["head_dim"],
        }


def _add_turns(config: Config, tables: Tables) -> None:
    """State rotary positions, whose bases are two."""
    both = config.read_table("rope_parameters")
    if both.has("full_attention"):
        full, local = (both.read_table(f"{kind}_attention") for kind in ("full", "sliding"))
    else:
        share = config.read("partial_rotary_factor", float, _SHARE)
        full, local = (
            both.change({"rope_theta": theta, "partial_rotary_factor": share})
            for theta in (
                config.read("rope_theta", float, _THETA),
                config.read("swa_rope_theta", float, _LOCAL_THETA),
            )
        )
    add_turns(config, tables, full, local, share=1.0)


FAMILIES = {"mimo_v2_flash": describe_mimo_v2_flash}
