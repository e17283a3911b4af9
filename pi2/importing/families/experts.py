"""Experts as DeepSeek names them: shared ones, routers with sigmoids, a bias to choose by, groups,
a factor, and layers that are no mixture."""

from __future__ import annotations

from pi2.importing.config import Config
from pi2.importing.families.decoders import LAYER, Tables

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


def add_listed_experts(config: Config, tables: Tables, first: int) -> None:
    """Experts of families that list the layers without them; ``first``: their number where there
    is no list."""
    dense, layers = tables["shape"]["ffn"], tables["shape"]["layers"]
    shared = config.read("num_shared_experts", int, 1)
    values = {
        "n_routed_experts": config.read_first(("num_experts", "num_local_experts"), int),
        "n_shared_experts": config.read("n_shared_experts", int, shared),
        "first_k_dense_replace": 0,
    }
    add_experts(config.change(values), tables)
    add_dense_layers(tables, dense, list_dense_layers(config, layers, first))


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
    """Layers that are no mixture: those of ``mlp_layer_types``, else of ``moe_layer_freq`` where
    that is a list, as in older configurations, else the ``first`` ones."""
    kinds, older = config.read_list("mlp_layer_types"), config.values.get("moe_layer_freq")
    if not kinds and isinstance(older, list):
        if len(older) != layers:
            raise config.refuse(f"moe_layer_freq is not a list of {layers} numbers")
        return [layer for layer, is_mixture in enumerate(older) if not is_mixture]
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
