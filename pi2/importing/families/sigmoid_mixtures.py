"""Mixtures that route as DeepSeek V3 does: sigmoids, a bias to choose by, groups, a factor, shared
experts, and layers that are no mixture."""

from __future__ import annotations

from pi2.importing.config import Config, read_whole_window, read_window
from pi2.importing.families.decoders import (
    LAYER,
    Tables,
    describe_decoder,
    describe_glm,
    describe_mistral,
)

SHARED = f"{LAYER}.mlp.shared_experts"


def add_experts(config: Config, tables: Tables, active: int | None = None) -> None:
    """The table ``[moe]``, names and sizes of experts, which all of these families share."""
    ffn = config.read("moe_intermediate_size", int)
    if ffn < 1:
        raise config.refuse(f"moe_intermediate_size is {ffn}")
    tables["moe"] = {
        "experts": config.read_first(("n_routed_experts", "num_local_experts"), int),
        "active_experts": config.read("num_experts_per_tok", int, active),
        "shared_experts": config.read("n_shared_experts", int, 0),
        "scaling": config.read("routed_scaling_factor", float, 1.0),
    }
    dense = tables["shape"]["ffn"]
    tables["shape"]["ffn"] = ffn
    tables["tensors"] |= name_experts(f"{LAYER}.mlp", shared="shared_experts")
    add_dense_layers(tables, dense, range(config.read("first_k_dense_replace", int, 0)))


def name_experts(block: str, shared: str) -> Tables:
    """Names of router, experts and shared experts."""
    parts = ("gate", "up", "down")
    return {
        "router": f"{block}.gate.weight",
        "choice_bias": f"{block}.gate.e_score_correction_bias",
        **{part: f"{block}.experts.{{expert}}.{part}_proj.weight" for part in parts},
        **{f"shared_{part}": f"{block}.{shared}.{part}_proj.weight" for part in parts},
    }


def add_dense_layers(tables: Tables, ffn: int, layers: range | list[int]) -> None:
    """State the layers that have one FFN of ``ffn`` neurons."""
    # A checkpoint may state any number of them: only those that there are can be gone through.
    chosen = [layer for layer in range(tables["shape"]["layers"]) if layer in layers]
    if chosen:
        tables["moe"] |= {"dense_layers": chosen, "dense_ffn": ffn}


def list_dense_layers(config: Config, layers: int, first: int) -> list[int]:
    """Layers that are no mixture: those of ``mlp_layer_types``, else the ``first`` ones."""
    kinds = config.read_list("mlp_layer_types")
    if not kinds:
        return list(range(min(first, layers)))
    if len(kinds) != layers or not all(kind in ("dense", "sparse") for kind in kinds):
        raise config.refuse(f"mlp_layer_types is not a list of {layers} kinds of FFNs")
    return [layer for layer, kind in enumerate(kinds) if kind == "dense"]


def add_sigmoids(config: Config, tables: Tables, groups: int, active_groups: int) -> None:
    """Routing as DeepSeek V3 does it."""
    tables["moe"] |= {
        "router": "sigmoid",
        "choice_bias": True,
        "normalise_weights": config.read("norm_topk_prob", bool, True),
        "groups": config.read("n_group", int, groups),
        "active_groups": config.read("topk_group", int, active_groups),
    }


def describe_glm4_moe(config: Config) -> Tables:
    """GLM 4.5: half of each head is rotated."""
    tables = describe_glm(config)
    tables["rope"]["pairs"] = "halves"
    tables["attention"]["head_norm"] = config.read("use_qk_norm", bool, False)
    tables["tensors"] = {}
    add_experts(config, tables)
    add_sigmoids(config, tables, 1, 1)
    return tables


def describe_dots1(config: Config) -> Tables:
    """dots.1: norms of heads, as Qwen3 has them."""
    tables = describe_decoder(config)
    layers = tables["shape"]["layers"]
    bias = config.read("attention_bias", bool, False)
    first = config.read("max_window_layers", int, 62)
    tables["attention"] = {"qkv_bias": bias, "output_bias": bias, "head_norm": True}
    if config.has("sliding_window"):
        tables["attention"] |= read_window(config, layers, lambda layer: layer >= first)
    add_experts(config, tables)
    add_sigmoids(config, tables, 1, 1)
    tables["moe"]["normalise_weights"] = config.read("norm_topk_prob", bool, False)
    return tables


def describe_minimax_m2(config: Config) -> Tables:
    """MiniMax M2: Mixtral whose queries have one norm for all heads, as its keys."""
    head_dim = config.read("head_dim", int, 128)
    rotated = 1.0
    if config.has("rotary_dim") and head_dim > 0:
        rotated = config.read("rotary_dim", int) / head_dim
    tables = describe_decoder(config.change({"head_dim": head_dim}), rotated=rotated)
    tables["attention"] = {"head_norm": True, "head_norm_of": "all"}
    tables["moe"] = {
        "experts": config.read_first(("num_local_experts", "num_experts"), int),
        "active_experts": config.read("num_experts_per_tok", int),
        "router": "sigmoid",
        "choice_bias": True,
    }
    block = f"{LAYER}.block_sparse_moe"
    tables["tensors"] = {
        "router": f"{block}.gate.weight",
        "choice_bias": f"{block}.e_score_correction_bias",
        **{
            part: f"{block}.experts.{{expert}}.{name}.weight"
            for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        },
    }
    return tables


def describe_ernie(config: Config) -> Tables:
    """ERNIE 4.5: neighbours are rotated."""
    tables = describe_decoder(config)
    bias = config.read("use_bias", bool, False)
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, 1e-5)
    tables["rope"]["pairs"] = "neighbours"
    tables["attention"] = {"qkv_bias": bias, "output_bias": bias}
    tables["ffn"]["bias"] = bias
    tables["tied_head"] = config.read("tie_word_embeddings", bool, True)
    return tables


def describe_ernie_moe(config: Config) -> Tables:
    """ERNIE 4.5 with experts that a softmax weights and a bias helps to choose."""
    config.demand("use_bias", False, False)
    tables = describe_ernie(config)
    layers, dense = tables["shape"]["layers"], tables["shape"]["ffn"]
    if config.read("moe_norm_min", float, 1e-12) > 1e-6:
        raise config.refuse(f"moe_norm_min is {config.read('moe_norm_min', float)}")
    tables["shape"]["ffn"] = config.read("moe_intermediate_size", int)
    tables["moe"] = {
        "experts": config.read_first(("moe_num_experts", "num_experts"), int),
        "active_experts": config.read_first(("moe_k", "num_experts_per_tok"), int),
        "shared_experts": config.read("moe_num_shared_experts", int, 0),
        "choice_bias": True,
    }
    first, last = config.read("moe_layer_start_index", int, 1), layers - 1
    if config.read("moe_layer_end_index", int, -1) != -1:
        last = config.read("moe_layer_end_index", int)
    every = max(1, config.read("moe_layer_interval", int, 1))
    mixed = [n for n in range(layers) if (n + 1) % every == 0 and first <= n <= last]
    add_dense_layers(tables, dense, [n for n in range(layers) if n not in mixed])
    tables["tensors"] = name_experts(f"{LAYER}.mlp", shared="shared_experts")
    tables["tensors"]["choice_bias"] = f"{LAYER}.mlp.moe_statics.e_score_correction_bias"
    return tables


def describe_olmoe(config: Config) -> Tables:
    """OLMoE: norms of all heads together, experts that a softmax weights."""
    tables = describe_decoder(config)
    bias = config.read("attention_bias", bool, False)
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, 1e-5)
    tables["attention"] = {
        "qkv_bias": bias,
        "output_bias": bias,
        "head_norm": True,
        "head_norm_of": "all",
    }
    if config.has("clip_qkv"):
        tables["attention"]["clip"] = config.read("clip_qkv", float)
    tables["moe"] = {
        "experts": config.read_first(("num_experts", "num_local_experts"), int),
        "active_experts": config.read("num_experts_per_tok", int, 8),
        "normalise_weights": config.read("norm_topk_prob", bool, False),
    }
    tables["tensors"] = name_experts(f"{LAYER}.mlp", shared="shared_experts")
    return tables


def describe_phimoe(config: Config) -> Tables:
    """Phi-3.5-MoE: LayerNorm, biases, and two experts that SparseMixer chooses."""
    tables = describe_mistral(config)
    bias = config.read("attention_bias", bool, False)
    epsilon = config.read("rms_norm_eps", float, 1e-5)
    tables["norm"] = {"kind": "layernorm", "epsilon": epsilon, "bias": True}
    tables["attention"] = {"qkv_bias": bias, "output_bias": bias, **read_whole_window(config)}
    tables["head_bias"] = config.read("lm_head_bias", bool, False)
    _read_scales(config, tables)
    tables["moe"] = {
        "experts": config.read("num_local_experts", int),
        # The code takes two, whatever num_experts_per_tok says.
        "active_experts": 2,
        "router": "mixer",
        "tolerance": config.read("router_jitter_noise", float, 0.01),
    }
    block = f"{LAYER}.block_sparse_moe"
    tables["tensors"] = {
        "router": f"{block}.gate.weight",
        **{
            part: f"{block}.experts.{{expert}}.{name}.weight"
            for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        },
    }
    return tables


def _read_scales(config: Config, tables: Tables) -> None:
    """Factors of sines and cosines, which Phi-3.5-MoE states for short and long sequences."""
    scaling = config.read_table("rope_parameters")
    if not scaling.has("short_mscale"):
        scaling = config.read_table("rope_scaling")
    if tables["rope"].get("kind") == "longrope" and scaling.has("short_mscale"):
        tables["rope"]["attention_factor"] = scaling.read("short_mscale", float)
        if scaling.has("long_mscale"):
            tables["rope"]["long_attention_factor"] = scaling.read("long_mscale", float)


FAMILIES = {
    "dots1": describe_dots1,
    "ernie4_5": describe_ernie,
    "ernie4_5_moe": describe_ernie_moe,
    "glm4_moe": describe_glm4_moe,
    "minimax_m2": describe_minimax_m2,
    "olmoe": describe_olmoe,
    "phimoe": describe_phimoe,
}
