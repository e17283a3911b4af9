"""Functions that family documents name: values in expressions, and what only code can describe."""

import math
import sys
from collections.abc import Mapping
from typing import Any

from pi2.importing.config import (
    ACTIVATIONS,
    HUGE,
    ROTATED_SHARE,
    TABLE,
    TURN_FACTOR,
    Config,
    Layer,
    describe_layers,
)
from pi2.importing.families.interpreter import Completed, Description, read_family
from pi2.plan.reading.references import list_shipped


def has(scope: Completed, key: str) -> bool:
    return scope.raw.has(key)


def states(scope: Completed, key: str) -> bool:
    return key in scope.raw.values


def limit(scope: Completed, key: str, default: float | None) -> float | None:
    """A number, or None where ``key`` is null; ``default`` where it is not stated."""
    config = scope.config
    if config.has(key):
        return config.read(key, float)
    return None if key in config.values else default


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
    if name is None or name not in ACTIVATIONS:
        raise scope.config.refuse(f"the activation {name!r} is unknown")
    return ACTIVATIONS[name]


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


def without(scope: Completed, table: Any, key: str) -> Any:
    if not isinstance(table, Mapping):
        return table
    return {name: value for name, value in table.items() if name != key}


def within(scope: Completed, table: str, key: str, default: Any) -> Any:
    """What a table of the configuration has; ``default`` where it has nothing, or is not there."""
    found = scope.config.read_table(table).values.get(key)
    return default if found is None else found


_KINDS: Mapping[str, str] = TABLE["mixers"]
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


def scaled(scope: Description, key: str, default: Any) -> Any:
    """What the scaling of positions states; ``default`` where it does not."""
    found = _find_scaling(scope.config).values.get(key)
    return default if found is None else found


_SHARES = ("rope_pct", "rotary_pct", "partial_rotary_factor")
_ORIGINAL = "original_max_position_embeddings"
_UNSCALED = ("default", "mrope", "dynamic")
"""Kinds of scaling that leave positions as they are."""


def _scale(
    scope: Description, scaling: Config, theta: float, share: float | None
) -> dict[str, Any]:
    """The model document's table for the ``scaling`` of positions; ``share``: rotated part if none
    is stated, None to rotate whole heads."""
    config, family = scope.config, read_family(list_shipped("family")["_rope"])
    kind = scaling.read("rope_type", str, scaling.read("type", str, "default"))
    if kind not in (*_UNSCALED, *family.when, "su"):
        raise config.refuse(f"the position scaling {kind!r} is unknown")
    keys = (*_SHARES, _ORIGINAL, ROTATED_SHARE, TURN_FACTOR)
    own = {key: config.values.get(key) for key in keys}
    own |= {key: value for key, value in scaling.values.items() if value is not None}
    own |= {"kind": kind, "theta": theta, "turned": share, "context": scope.find("shape.context")}
    own["stated_original"] = config.values.get(_ORIGINAL)
    described = Description(Config(config.file, own), family, sys.modules[__name__]).describe()
    rope: dict[str, Any] = described["rope"]
    return rope


def rope(scope: Description) -> None:
    """Positions as one table of the configuration states them, or older keys."""
    scaling = _find_scaling(scope.config)
    theta = scaling.read("rope_theta", float, scope.config.read("rope_theta", float, 10000.0))
    scope.put("rope", _scale(scope, scaling, theta, scope.family.rotated))


def numbers(scope: Completed, key: str) -> list[float]:
    found = scope.config.read_list(key)
    if not all(type(item) in (int, float) and 0 < item < HUGE for item in found):
        raise scope.config.refuse(f"{key} is not a list of positive numbers")
    return [float(item) for item in found]


def grown(scope: Completed, over: float | None, under: float | None, factor: float) -> float | None:
    """What YaRN multiplies sines and cosines by if both factors of its growth are stated."""
    if not over or not under:
        return None
    growth = 0.1 * math.log(factor) if factor > 1 else 0.0
    over, under = over * growth + 1.0, under * growth + 1.0
    if over <= 0 or under <= 0:
        problem = f"mscale and mscale_all_dim scale attention by {over:g} / {under:g}"
        raise scope.config.refuse(problem)
    return over / under


def _find_turns(scope: Description) -> tuple[Config, Config]:
    """The tables of positions of layers without and with a window.  If `rope_parameters` has
    neither, it is of the former itself, or older keys are.  Bases that no table states are the
    configuration's `full_theta` and `local_theta`."""
    both = scope.config.read_table("rope_parameters")
    full, local = both.read_table("full_attention"), both.read_table("sliding_attention")
    if not full.values:
        full = both if both.has("rope_type") else scope.config.read_table("rope_scaling")
    full = full.set_default("truncate", both.values.get("truncate"))
    local = local.set_default(ROTATED_SHARE, scope.find("swa_rotary_factor"))
    return (
        full.set_default("rope_theta", scope.find("full_theta")),
        local.set_default("rope_theta", scope.find("local_theta")),
    )


def _turn(scope: Description, full: Config, local: Config) -> None:
    """State positions of layers without a window, by ``full``, and of those with one; heads turn as
    a whole where `turns_whole` is true and no share is stated."""
    share = 1.0 if scope.find("turns_whole") else None
    own, other = (
        _scale(scope, table, table.read("rope_theta", float), share) for table in (full, local)
    )
    scope.replace("rope", own)
    if scope.windowed and other != own:
        scope.put("other_rope", {**other, "layers": scope.windowed})


def turn(scope: Description) -> None:
    """Positions of layers without a window, and other ones of layers with one."""
    scope.windowed = scope.windowed or scope.find("attention.window_layers") or []
    _turn(scope, *_find_turns(scope))


def turn_around(scope: Description) -> None:
    """The same, but `rope` belongs to layers with a window."""
    full, local = _find_turns(scope)
    scope.windowed = _list_full(scope)
    _turn(scope, local, full)


def turn_pooled(scope: Description) -> None:
    """DeepSeek V4: what scales positions is of layers with pooled vectors, and multiplies no sines
    and cosines."""
    full, local = _find_turns(scope)
    blocks = scope.find("attention.pooled.blocks")
    scope.windowed = [layer for layer, block in enumerate(blocks) if not block]
    _turn(scope, full.set_default("attention_factor", 1.0), local)
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


def of_layers(scope: Completed, key: str, default: int) -> list[int]:
    """A number of each layer in `per_layer_config`; ``default`` for layers without one."""
    tables = scope.config.read_table("per_layer_config")
    return [tables.read_table(str(n)).read(key, int, default) for n in range(scope.layers)]


def windowed(scope: Description) -> list[int]:
    return scope.windowed


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
