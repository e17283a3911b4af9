"""Qwen 2, 3, 3-Next and 3.5, with experts and without."""

from __future__ import annotations

from collections.abc import Callable

from pi2.importing.config import Config, read_whole_window, read_window
from pi2.importing.families.decoders import LAYER, Tables, describe_decoder
from pi2.importing.families.experts import add_dense_layers
from pi2.importing.families.states import add_kinds


def describe_qwen2(config: Config) -> Tables:
    """Llama with biases of query, key and value, and a window in late layers."""
    tables = describe_decoder(config)
    window = {}
    if config.read("use_sliding_window", bool, False):
        window = read_window(config, tables["shape"]["layers"], _is_late(config))
    tables["attention"] = {"qkv_bias": True, **window}
    # No configuration says so: it is what GGUF files have.
    tables["head_bias"] = config.read("lm_head_bias", bool, False)
    return tables


def _is_late(config: Config) -> Callable[[int], bool]:
    """Whether a layer is one of those that have a window, in Qwen2."""
    first = config.read("max_window_layers", int, 28)
    return lambda layer: layer >= first


def describe_qwen3(config: Config) -> Tables:
    """Qwen2 with norms of heads, and fewer biases."""
    tables = describe_qwen2(config)
    bias = config.read("attention_bias", bool, False)
    tables["attention"] |= {"qkv_bias": bias, "output_bias": bias, "head_norm": True}
    return tables


def describe_qwen2_moe(config: Config) -> Tables:
    """Experts that are chosen, and shared ones."""
    tables = describe_decoder(config)
    bias, last = config.read("qkv_bias", bool, True), config.read("max_window_layers", int, 28)
    tables["attention"] = {"qkv_bias": bias}
    if config.read("use_sliding_window", bool, False):
        tables["attention"] |= read_window(
            config, tables["shape"]["layers"], lambda n: n % 2 == 0 and n < last, width=4096
        )
    add_qwen_experts(config, tables)
    add_shared_experts(config, tables)
    return tables


def add_shared_experts(config: Config, tables: Tables) -> None:
    """Qwen's shared experts, which have a router of their own."""
    ffn, shared = tables["shape"]["ffn"], config.read("shared_expert_intermediate_size", int, 0)
    if shared:
        tables["moe"] |= {"shared_experts": -(-shared // ffn), "shared_gate": True}
        tables["moe"] |= {"shared_ffn": shared} if shared % ffn else {}


def describe_qwen3_moe(config: Config) -> Tables:
    """Qwen3 with experts, and a window in all layers or none."""
    tables = describe_qwen3(config)
    tables["attention"].pop("sliding_window", None)
    tables["attention"].pop("window_layers", None)
    if config.read("use_sliding_window", bool, False):
        tables["attention"] |= read_whole_window(config)
    add_qwen_experts(config, tables)
    return tables


def describe_qwen3_vl_moe(config: Config) -> Tables:
    """The text of Qwen3-VL with experts, whose weights always add up to 1."""
    tables = describe_qwen3_moe(config)
    tables["moe"]["normalise_weights"] = True
    return tables


def add_qwen_experts(config: Config, tables: Tables) -> None:
    """The table ``[moe]``, names and sizes of Qwen's experts."""
    dense, layers = tables["shape"]["ffn"], tables["shape"]["layers"]
    every = max(1, config.read("decoder_sparse_step", int, 1))
    only = config.read_list("mlp_only_layers")
    ffn = config.read("moe_intermediate_size", int)
    if ffn < 1:
        raise config.refuse(f"moe_intermediate_size is {ffn}")
    tables["shape"]["ffn"] = ffn
    tables["moe"] = {
        "experts": config.read_first(("num_experts", "num_local_experts"), int),
        "active_experts": config.read("num_experts_per_tok", int),
        "normalise_weights": config.read("norm_topk_prob", bool, False),
    }
    add_dense_layers(tables, dense, [n for n in range(layers) if n in only or (n + 1) % every != 0])
    expert = f"{LAYER}.mlp.experts.{{expert}}"
    tables["tensors"] |= {
        "router": f"{LAYER}.mlp.gate.weight",
        **{part: f"{expert}.{part}_proj.weight" for part in ("gate", "up", "down")},
    }


def describe_qwen3_next(config: Config) -> Tables:
    """Gated DeltaNet beside gated attention, with experts; the rows of a projection are in groups,
    one for each key head."""
    tables = _describe_hybrid(config)
    add_qwen_experts(config, tables)
    tables["moe"]["normalise_weights"] = config.read("norm_topk_prob", bool, True)
    add_shared_experts(config, tables)
    tables["tensors"] |= {
        "state_order": "grouped",
        "state_in": f"{LAYER}.linear_attn.in_proj_qkvz.weight",
        "state_beta": f"{LAYER}.linear_attn.in_proj_ba.weight",
    }
    return tables


def describe_qwen3_5(config: Config) -> Tables:
    """Qwen3-Next without experts, its projections apart."""
    return _describe_hybrid(config)


def describe_qwen3_5_moe(config: Config) -> Tables:
    """The same with experts."""
    tables = _describe_hybrid(config.change({"intermediate_size": 1}))
    add_qwen_experts(config, tables)
    tables["moe"]["normalise_weights"] = True
    add_shared_experts(config, tables)
    return tables


def _describe_hybrid(config: Config) -> Tables:
    """Gated DeltaNet beside gated attention, with a dense FFN."""
    defaults = {} if config.has("head_dim") else {"head_dim": 256}
    tables = describe_decoder(config.change(defaults), rotated=0.25)
    if tables["ffn"]["activation"] != "silu":
        raise config.refuse("hidden_act is not silu, which its convolutions apply")
    tables["norm"]["weight_offset"] = 1.0
    bias = config.read("attention_bias", bool, False)
    tables["attention"] = {
        "qkv_bias": bias,
        "output_bias": bias,
        "head_norm": True,
        "output_gate": True,
    }
    interval = config.read("full_attention_interval", int, 4)
    if interval < 1:
        raise config.refuse(f"full_attention_interval is {interval}")
    add_kinds(config, tables, "delta", lambda layer: (layer + 1) % interval == 0)
    tables["recurrence"] = {
        "key_heads": config.read("linear_num_key_heads", int, 16),
        "value_heads": config.read("linear_num_value_heads", int, 32),
        "key_dim": config.read("linear_key_head_dim", int, 128),
        "value_dim": config.read("linear_value_head_dim", int, 128),
        "kernel": config.read("linear_conv_kernel_dim", int, 4),
    }
    return tables


FAMILIES = {
    "qwen2": describe_qwen2,
    "qwen2_5_vl_text": describe_qwen2,
    "qwen2_moe": describe_qwen2_moe,
    "qwen2_vl_text": describe_qwen2,
    "qwen3": describe_qwen3,
    "qwen3_5_moe_text": describe_qwen3_5_moe,
    "qwen3_5_text": describe_qwen3_5,
    "qwen3_moe": describe_qwen3_moe,
    "qwen3_next": describe_qwen3_next,
    "qwen3_vl_moe_text": describe_qwen3_vl_moe,
    "qwen3_vl_text": describe_qwen3,
}
