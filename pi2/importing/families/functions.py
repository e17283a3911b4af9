"""Functions that family documents name: values in expressions, and what only code can describe."""

import math
import sys
from collections.abc import Mapping
from typing import Any

from pi2.importing.config import ACTIVATIONS, Config, Layer, describe_layers, scale_rope
from pi2.importing.families.interpreter import Completed, Description


def has(scope: Completed, key: str) -> bool:
    return scope.raw.has(key)


def states(scope: Completed, key: str) -> bool:
    return key in scope.raw.values


def limit(scope: Completed, key: str, default: float | None) -> float | None:
    """A number, or None where ``key`` is null; ``default`` where it is not stated."""
    return scope.config.read_limit(key, default)


def divide(scope: Completed, key: str, other: str) -> int:
    """Quotient of two keys; `UserError` P544 unless it is whole."""
    value, divisor = scope.find(key), scope.find(other)
    if divisor < 1 or value % divisor:
        raise scope.config.refuse(f"{key} {value} is not divided by {other} {divisor}")
    quotient: int = value // divisor
    return quotient


def listed(scope: Completed, key: str) -> list[Any]:
    return scope.config.read_list(key)


def activation(scope: Completed, name: str | None) -> str:
    if name not in ACTIVATIONS:
        raise scope.config.refuse(f"the activation {name!r} is unknown")
    return ACTIVATIONS[name]


def whole(scope: Completed, number: float) -> int:
    return int(number)


def length(scope: Completed, items: list[Any]) -> int:
    return len(items)


def least(scope: Completed, *numbers: float) -> float:
    return min(numbers)


def most(scope: Completed, *numbers: float) -> float:
    return max(numbers)


def has_window(scope: Description, layer: int) -> bool:
    return layer in scope.windowed


def cycles(scope: Completed, layer: int, length: int) -> bool:
    """Whether a layer is not the last one of ``length``."""
    return length < 1 or (layer + 1) % length != 0


def dense_layers(scope: Description, first: int) -> list[int]:
    """Layers without experts: from ``mlp_layer_types``, else from ``moe_layer_freq`` if that is a
    list, as in older configurations, else the ``first`` ones."""
    config, layers = scope.config, scope.layers
    names, older = config.read_list("mlp_layer_types"), config.values.get("moe_layer_freq")
    if not names and isinstance(older, list):
        if len(older) != layers:
            raise config.refuse(f"moe_layer_freq is not a list of {layers} numbers")
        return [layer for layer, is_mixture in enumerate(older) if not is_mixture]
    if not names:
        return list(range(min(first, layers)))
    if len(names) != layers or not all(name in ("dense", "sparse") for name in names):
        raise config.refuse(f"mlp_layer_types is not a list of {layers} kinds of FFNs")
    return [layer for layer, name in enumerate(names) if name == "dense"]


def stated(scope: Completed, key: str) -> Any:
    """The configuration's statement, even if the family fixes a value."""
    return scope.raw.values.get(key)


def either(scope: Completed, key: str, other: str) -> Any:
    """The first of two keys, if it is stated, else the second."""
    return stated(scope, key) if has(scope, key) else scope.find(other)


def without(scope: Completed, table: Any, key: str) -> Any:
    if not isinstance(table, Mapping):
        return table
    return {name: value for name, value in table.items() if name != key}


def within(scope: Completed, table: str, key: str, default: Any) -> Any:
    """What a table of the configuration has; ``default`` where it has nothing, or is not there."""
    found = scope.config.read_table(table).values.get(key)
    return default if found is None else found


def ceiling(scope: Completed, number: int, divisor: int) -> int:
    return -(-number // divisor)


_KINDS = {
    "full_attention": "attention",
    "attention": "attention",
    "linear_attention": "linear",
    "mamba": "linear",
    "conv": "linear",
}
"""Whether layers are attention, by their names in configurations."""


def kinds(scope: Description, kind: str, attends: list[bool]) -> list[str] | None:
    """What mixes the tokens of each layer: ``layer_types``, else what ``attends`` says."""
    config, layers = scope.config, scope.layers
    names = config.read_list("layer_types") or config.read_list("layers_block_type")
    names = names or ["attention" if flag else "linear_attention" for flag in attends]
    if len(names) != layers or not all(type(item) is str and item in _KINDS for item in names):
        raise config.refuse(f"layer_types is not a list of {layers} kinds of layers")
    found = [kind if _KINDS[item] == "linear" else "attention" for item in names]
    return found if kind in found else None


def _find_scaling(config: Config) -> Config:
    scaling = config.read_table("rope_parameters")
    if scaling.has("rope_type") or scaling.has("rope_theta"):
        return scaling
    return config.read_table("rope_scaling")


def score_scale(scope: Description, width: int) -> float | None:
    """Scale of scores of ``width`` elements if scaled positions multiply them, in addition to their
    effect on sines and cosines."""
    scaling = _find_scaling(scope.config)
    kind = scaling.read("rope_type", str, scaling.read("type", str, "default"))
    all_dims = scaling.read("mscale_all_dim", float, 0.0)
    factor = scaling.read("factor", float, 1.0)
    if kind == "default" or not all_dims or factor <= 1:
        return None
    growth = (0.1 * all_dims * math.log(factor) + 1.0) ** 2
    return None if growth == 1.0 else growth / math.sqrt(max(1, width))


def grow(scope: Description) -> None:
    """Queries that grow with the position, if positions are scaled so."""
    scaling = _find_scaling(scope.config)
    growth = scaling.read("llama_4_scaling_beta", float, 0.0)
    if growth:
        scope.put("attention.growth", growth)
        original = scaling.read("original_max_position_embeddings", int)
        scope.put("rope.original_context", original)


def read_two_factors(scope: Description) -> None:
    """Factors of sines and cosines, which Phi-3.5-MoE states for short and long sequences."""
    scaling = scope.config.read_table("rope_parameters")
    if not scaling.has("short_mscale"):
        scaling = scope.config.read_table("rope_scaling")
    if scope.find("rope.kind") == "longrope" and scaling.has("short_mscale"):
        scope.put("rope.attention_factor", scaling.read("short_mscale", float))
        if scaling.has("long_mscale"):
            scope.put("rope.long_attention_factor", scaling.read("long_mscale", float))


def shared_indexes(scope: Description) -> list[int]:
    """Layers of GLM 5 that share the choice of an earlier one."""
    config, layers = scope.config, range(scope.layers)
    kinds = config.read_list("indexer_types")
    pattern = config.values.get("index_topk_pattern")
    if not kinds and isinstance(pattern, str | list):
        kinds = ["shared" if own in ("S", "shared") else "full" for own in pattern]
    if kinds:
        return [layer for layer in layers if layer < len(kinds) and kinds[layer] == "shared"]
    every = max(1, config.read("index_topk_freq", int, 1))
    offset = config.read("index_skip_topk_offset", int, 2)
    return [layer for layer in layers if max(layer - offset + 1, 0) % every]


def heads_of_layers(scope: Description) -> None:
    """Laguna's heads, of which layers may have two numbers."""
    config, layers = scope.config, scope.layers
    counts = config.read_list("num_attention_heads_per_layer")
    if not counts:
        return
    if len(counts) != layers or not all(type(item) is int for item in counts):
        raise config.refuse(f"num_attention_heads_per_layer is not a list of {layers} numbers")
    found = sorted(set(counts))
    if len(found) > 2:
        raise config.refuse(f"layers have {len(found)} numbers of heads, pi2 computes two")
    kv_heads, width = scope.find("shape.kv_heads"), scope.find("shape.head_dim")
    scope.tables["shape.heads"] = found[0]
    if len(found) == 2:
        others = [layer for layer, count in enumerate(counts) if count == found[1]]
        other = {"layers": others, "heads": found[1], "kv_heads": kv_heads, "head_dim": width}
        scope.put("other_heads", other)


def _turn(scope: Description, full: Config, local: Config, share: float | None = None) -> None:
    """State rotary positions of layers without a window, by the table ``full``, and of those with
    one, by ``local``; both state the base.  ``share``: see `scale_rope`."""
    rope, other = (
        scale_rope(
            scope.config, table, table.read("rope_theta", float), scope.find("shape.context"), share
        )
        for table in (full, local)
    )
    scope.replace("rope", rope)
    if scope.windowed and other != rope:
        scope.put("other_rope", {**other, "layers": scope.windowed})


def _read_both(config: Config) -> tuple[Config, Config, Config]:
    """The table of positions, and those in it of layers without and with a window."""
    both = config.read_table("rope_parameters")
    return both, both.read_table("full_attention"), both.read_table("sliding_attention")


def turn_olmo3(scope: Description) -> None:
    config = scope.config
    theta = config.read("rope_theta", float, 500_000.0)
    both, full, local = _read_both(config)
    if not both.has("full_attention") and not both.has("sliding_attention"):
        full = both if both.has("rope_type") else config.read_table("rope_scaling")
    # The original code looks for it outside of the two tables.
    full = full.change({"truncate": both.read("truncate", bool, True)})
    _turn(scope, full.set_default("rope_theta", theta), local.set_default("rope_theta", theta))


def turn_mellum(scope: Description) -> None:
    _, full, local = _read_both(scope.config)
    full = full.set_default("rope_theta", 500_000.0)
    _turn(scope, full, local.set_default("rope_theta", 10_000.0), share=1.0)


def turn_laguna(scope: Description) -> None:
    """Laguna: half of a head turns in layers without a window."""
    both, full, local = _read_both(scope.config)
    defaults = (
        {"rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
        {"rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
    )
    if not both.has("full_attention") and not both.has("sliding_attention"):
        full, local = (both.change(default) for default in defaults)
    full, local = (
        table.set_default("rope_theta", default["rope_theta"])
        for table, default in zip((full, local), defaults, strict=True)
    )
    _turn(scope, full, local, share=1.0)


def turn_gemma3(scope: Description) -> None:
    config = scope.config
    _, full, local = _read_both(config)
    if config.has("rope_scaling"):
        full = config.read_table("rope_scaling")
    full = full.set_default("rope_theta", config.read("rope_theta", float, 1_000_000.0))
    theta = config.read("rope_local_base_freq", float, 10_000.0)
    _turn(scope, full, local.set_default("rope_theta", theta))


def turn_mimo(scope: Description) -> None:
    config = scope.config
    both, full, local = _read_both(config)
    if not both.has("full_attention"):
        share = config.read("partial_rotary_factor", float, 0.334)
        bases = ("rope_theta", 5_000_000.0), ("swa_rope_theta", 10_000.0)
        full, local = (
            both.change(
                {"rope_theta": config.read(key, float, theta), "partial_rotary_factor": share}
            )
            for key, theta in bases
        )
    _turn(scope, full, local, share=1.0)


def turn_lfm3(scope: Description) -> None:
    whole = {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6}
    config = scope.config.set_default("rope_parameters", {"full_attention": whole})
    _, full, local = _read_both(config)
    scope.windowed = scope.find("attention.window_layers")
    full = full.set_default("rope_theta", 1_000_000.0)
    _turn(scope, full, local.set_default("rope_theta", 10_000.0), share=1.0)


def turn_gemma4(scope: Description) -> None:
    """Gemma 4: `rope` belongs to layers with a window."""
    config, full = scope.config, _list_full(scope)
    if not config.has("rope_parameters"):
        whole = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
        config = config.change({"rope_parameters": {"full_attention": whole}})
    _, wide, local = _read_both(config)
    wide, local = (table.set_default("rope_theta", 10_000.0) for table in (wide, local))
    scope.windowed = full
    _turn(scope, local, wide, share=1.0)


def turn_pooled(scope: Description) -> None:
    """DeepSeek V4: what scales positions is of layers with pooled vectors, and multiplies no sines
    and cosines."""
    _, full, local = _read_both(scope.config)
    blocks = scope.find("attention.pooled.blocks")
    scope.windowed = [layer for layer, block in enumerate(blocks) if not block]
    _turn(scope, full.set_default("attention_factor", 1.0), local, share=1.0)
    for key in ["rope", "other_rope"][: 1 + ("other_rope.layers" in scope.tables)]:
        scope.put(f"{key}.pairs", "neighbours")


def _list_full(scope: Description) -> list[int]:
    return [layer for layer in range(scope.layers) if layer not in scope.windowed]


def turn_granite(scope: Description) -> None:
    config, layers = scope.config, scope.layers
    bases = config.read_list("layer_rope_theta")
    if not bases:
        return
    if len(bases) != layers or not all(type(item) in (int, float) for item in bases):
        raise config.refuse(f"layer_rope_theta is not a list of {layers} numbers")
    found = sorted({float(item) for item in bases}, reverse=True)
    if len(found) > 2:
        raise config.refuse(f"layer_rope_theta has {len(found)} bases, pi2 computes two")
    own = {k[5:]: value for k, value in scope.tables.items() if k.startswith("rope.")}
    turns = [{**own, "theta": base} if base else {"kind": "none"} for base in found]
    scope.replace("rope", turns[0])
    if len(found) == 2:
        chosen = [layer for layer, item in enumerate(bases) if float(item) == found[1]]
        scope.put("other_rope", {**turns[1], "layers": chosen})


def stretch_base(scope: Description) -> None:
    """Hunyuan: the base of rotary positions grows with `alpha`."""
    scaling = _find_scaling(scope.config)
    alpha, size = scaling.read("alpha", float, 0.0), scope.find("shape.head_dim")
    kind = scaling.read("rope_type", str, scaling.read("type", str, "default"))
    if kind == "dynamic" and alpha > 0 and size > 2:
        scope.tables["rope.theta"] *= alpha ** (size / (size - 2))


def same(scope: Description, *keys: str) -> int:
    """The number that the first stated key has for every layer."""
    config = scope.config
    found = next((config.read_list(key) for key in keys if config.has(key)), [1])
    if len(set(map(str, found))) != 1 or type(found[0]) is not int:
        raise config.refuse(f"{keys[0]} is not the same number in every layer")
    number: int = found[0]
    return number


def same_width(scope: Completed) -> Any:
    """Gemma 3n's width of FFNs, of which its configuration has one for each layer."""
    widths = scope.raw.read_list("intermediate_size")
    if any(width != widths[0] for width in widths):
        raise scope.raw.refuse("intermediate_size is not the same for all layers")
    return widths[0] if widths else None


def shares(scope: Description, key: str) -> list[float] | None:
    """A share for each layer; None where all are 0."""
    found = scope.config.read_list(key)
    if len(found) != scope.layers or not all(
        type(share) in (int, float) and 0 <= share < 1 for share in found
    ):
        raise scope.config.refuse(f"{key} is not a list of {scope.layers} shares")
    return [float(share) for share in found] if any(found) else None


def windowed(scope: Description) -> list[int]:
    return scope.windowed


def kinds_of_mimo(scope: Completed) -> list[str]:
    """Kinds of layers by what older configurations of MiMo say of them."""
    flags = scope.raw.read_list("hybrid_layer_pattern")
    return ["sliding_attention" if flag else "full_attention" for flag in flags]


def kinds_of_gemma4(scope: Completed) -> list[str]:
    """Kinds of layers; the last one never has a window."""
    found = scope.raw.read_list("layer_types") or [
        "sliding_attention" if cycles(scope, layer, 6) else "full_attention"
        for layer in range(scope.layers)
    ]
    return [*found[:-1], "full_attention"]


def heads_of_gemma4(scope: Description) -> None:
    """Heads of layers without a window: stated for each, or for all as in the first releases."""
    config, layers, full = scope.config, scope.layers, _list_full(scope)
    shares_keys = config.read("attention_k_eq_v", bool, False)
    own = {key: scope.find(f"shape.{key}") for key in ("kv_heads", "head_dim")}
    if config.has("per_layer_config"):
        tables = config.read_table("per_layer_config")
        found = [
            {
                key: tables.read_table(str(layer)).read(name, int, own[key])
                for key, name in (("kv_heads", "num_key_value_heads"), ("head_dim", "head_dim"))
            }
            for layer in range(layers)
        ]
    else:
        kv_heads = own["kv_heads"]
        if shares_keys or config.has("gguf_other_heads"):
            kv_heads = config.read("num_global_key_value_heads", int, kv_heads)
        wide = {"kv_heads": kv_heads, "head_dim": config.read("global_head_dim", int, 512)}
        found = [wide if layer in full else own for layer in range(layers)]
    others = [layer for layer, heads in enumerate(found) if heads != own]
    if any(found[n] != found[others[0]] for n in others) or (others and others != full):
        raise config.refuse("per_layer_config does not divide layers as layer_types does")
    if full and (others or shares_keys):
        other = {"layers": full, **found[full[0]], "keys_are_values": shares_keys}
        scope.put("other_heads", other)


def step_limit(scope: Description, place: int) -> float | None:
    """The shortest or the longest step that Mamba-2 takes; None where there is no longest."""
    config = scope.config
    limits = [
        math.inf if isinstance(item, dict) else item for item in config.read_list("time_step_limit")
    ] or [0.0, math.inf]
    if len(limits) != 2 or not all(type(item) in (int, float) and item >= 0 for item in limits):
        raise config.refuse("time_step_limit is not two numbers")
    # An integer may be larger than any float.
    limit = math.inf if limits[place] > sys.float_info.max else float(limits[place])
    if math.isinf(limit) and not place:
        raise config.refuse("time_step_limit begins with no number that a step can have")
    return limit if math.isfinite(limit) else None


def _list_blocks(config: Config) -> list[Layer]:
    layers = describe_layers(config.values)
    if isinstance(layers, str):
        raise config.refuse(layers)
    return layers


def count_blocks(scope: Completed) -> int:
    return len(_list_blocks(scope.raw))


def layer_mixers(scope: Description, layer: int) -> str:
    return "+".join(_list_blocks(scope.raw)[layer].mixers) or "none"


def layer_ffn(scope: Description, layer: int) -> str:
    """``mlp`` or ``moe``; nothing of a layer without an FFN."""
    return _list_blocks(scope.raw)[layer].ffn


def has_experts(scope: Completed) -> bool:
    return any(layer.ffn == "moe" for layer in _list_blocks(scope.raw))
