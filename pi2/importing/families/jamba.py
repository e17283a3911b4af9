"""Jamba: the first Mamba, attention in one layer of eight, and experts in every other one."""

from __future__ import annotations

from pi2.importing.config import Config
from pi2.importing.families.decoders import LAYER, Tables, describe_decoder
from pi2.importing.families.experts import add_dense_layers
from pi2.importing.families.states import add_first_mamba

_FFN = f"{LAYER}.feed_forward"
_PARTS = ("gate", "up", "down")


def describe_jamba(config: Config) -> Tables:
    """No positions are turned; weights of experts are shares of all of them."""
    tables = describe_decoder(config)
    layers, hidden = tables["shape"]["layers"], tables["shape"]["hidden"]
    tables["rope"] = {"kind": "none"}
    attends = _list_chosen(config, "attn_layer", layers, (8, 4))
    kinds = ["attention" if layer in attends else "mamba1" for layer in range(layers)]
    tables["layers"] = {"kinds": kinds}
    tables["tensors"] = {
        "ffn_norm": f"{LAYER}.pre_ff_layernorm.weight",
        "final_norm": "model.final_layernorm.weight",
    }
    if "mamba1" in kinds:
        rank = None if config.values.get("mamba_dt_rank", "auto") == "auto" else "mamba_dt_rank"
        width = config.read("mamba_expand", int, 2) * hidden
        add_first_mamba(config, tables, width, rank, f"{LAYER}.mamba")
        tables["recurrence"] |= {"part_norm": "weighted", "part_epsilon": tables["norm"]["epsilon"]}
    _add_experts(config, tables)
    return tables


def _add_experts(config: Config, tables: Tables) -> None:
    """Experts of the layers that have them; FFNs of the others are as large as one of these."""
    layers, experts = tables["shape"]["layers"], 16
    if config.has("num_experts") or config.has("num_local_experts"):
        experts = config.read_first(("num_experts", "num_local_experts"), int)
    mixed = _list_chosen(config, "expert_layer", layers, (2, 1)) if experts > 1 else []
    plain = {part: f"{_FFN}.{part}_proj.weight" for part in _PARTS}
    if not mixed:
        tables["tensors"] |= plain
        return
    tables["moe"] = {
        "experts": experts,
        "active_experts": config.read("num_experts_per_tok", int, 2),
        "normalise_weights": False,
    }
    dense = [layer for layer in range(layers) if layer not in mixed]
    add_dense_layers(tables, tables["shape"]["ffn"], dense)
    tables["tensors"] |= {f"dense_{part}": name for part, name in plain.items()}
    tables["tensors"]["router"] = f"{_FFN}.router.weight"
    for part in _PARTS:
        tables["tensors"][part] = f"{_FFN}.experts.{{expert}}.{part}_proj.weight"


def _list_chosen(config: Config, name: str, layers: int, default: tuple[int, int]) -> list[int]:
    """Layers that one of a period of layers is: keys that begin with ``name`` say which."""
    period = config.read(f"{name}_period", int, default[0])
    offset = config.read(f"{name}_offset", int, default[1])
    if period < 1:
        raise config.refuse(f"{name}_period is {period}")
    return [layer for layer in range(layers) if layer % period == offset]


FAMILIES = {"jamba": describe_jamba}
