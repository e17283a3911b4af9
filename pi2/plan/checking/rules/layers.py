"""Rules about layers: their kinds, tensors and overrides."""

import re
from collections.abc import Iterator

from pi2.model.states import describe_state, list_state_tensors
from pi2.model.tensor import Place
from pi2.plan.checking.findings import Facts, Finding, Origin, rule
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_tensors import TENSOR_OPTIONS
from pi2.plan.documents.plan_units import parse_selector

_ONCE = frozenset(
    {
        *("embedding", "positions", "final_norm", "final_norm_bias", "head", "head_bias"),
        *("layer_embedding", "layer_projection", "layer_projection_norm"),
        *("stream_in", "stream_out", "embedding_norm", "embedding_norm_bias"),
    }
)
_BIASES = frozenset({"gate_bias", "up_bias", "down_bias"})
_PER_EXPERT = frozenset({"predictor_in", "predictor_out", "predictor_bias"})
_MAYBE_PER_EXPERT = _BIASES | {"gate", "up", "down", "fused_gate_up", "fused_gate_up_bias"}
"""Parts of an FFN, which a checkpoint may have for all experts in one tensor."""
_PLACEHOLDER = re.compile(r"\{[^{}]*\}|[{}]")


@rule("P247", "error", "model")
def check_tensor_names_layers(facts: Facts) -> Iterator[Finding]:
    model = facts.model
    numbered = _list_numbered(model)
    for key, name in model.tensors:
        if key in TENSOR_OPTIONS or name is None or (key in _BIASES and not model.ffn.bias):
            continue
        if key in ("gate", "up") and model.tensors.fused_gate_up is not None:
            continue
        wanted = {"{layer}"} if key not in _ONCE else set()
        if key in ("stream_in", "stream_out"):
            wanted.add("{stream}")
        if model.moe is not None and key in _PER_EXPERT:
            wanted.add("{expert}")
        if key in numbered:
            wanted.add("{mixer}")
        if model.predictor is None and key.startswith("predictor"):
            continue
        found = set(_PLACEHOLDER.findall(name))
        if model.shape.layers == 1:
            wanted &= found | {"{expert}", "{mixer}", "{stream}"}
        if model.moe is not None and key in _MAYBE_PER_EXPERT:
            wanted |= found & {"{expert}"}
        if key.startswith("state_") or key == "inner_norm":
            wanted |= found & {"{mixer}"}
        for placeholder in sorted(found - wanted):
            yield Finding(
                ("tensors", key),
                f"`{placeholder}` stands for nothing in the name of {key}",
                f"its placeholders: {', '.join(sorted(wanted)) or 'none'}",
            )
        for placeholder in sorted(wanted - found):
            subject = placeholder.strip("{}")
            yield Finding(
                ("tensors", key),
                f"the name of {key} is the same for every {subject}",
                f"put {placeholder} where the {subject}'s number is",
            )


def _list_numbered(model: Model) -> frozenset[str]:
    """Keys of the names that mixers of a layer must not share: norms, and what belongs to the state
    that each of them has."""
    shape, found = describe_state(model), set[str]()
    if any(len(block.mixers) > 2 for block in model.blocks):
        found.add("inner_norm")
    if shape is not None and any(len(block.states) > 1 for block in model.blocks):
        tensors = list_state_tensors(Place(model), shape)
        found |= {source.key for tensor in tensors for source in tensor.sources}
    return frozenset(found)


@rule("P215", "error", "plan")
def check_overrides_named_once(facts: Facts) -> Iterator[Finding]:
    first: dict[str, int] = {}
    for number, override in enumerate(facts.plan.layers.overrides):
        name = override.id
        if name is None:
            continue
        if name in first:
            path = ("layers", "overrides", first[name], "id")
            yield Finding(
                ("layers", "overrides", number, "id"),
                f"another override is called `{name}` too",
                "give it another name, or none",
                origins=(Origin("plan", path, "the first one"),),
            )
        first.setdefault(name, number)


Range = tuple[int, int]


@rule("P213", "warning", "plan")
def check_selectors_disjoint(facts: Facts) -> Iterator[Finding]:
    overrides = facts.plan.layers.overrides
    ranges = [parse_selector(override.select) for override in overrides]
    for number, override in enumerate(overrides):
        path = ("layers", "overrides", number, "select")
        repeated = _find_repetition(ranges[number])
        if repeated is not None:
            yield Finding(
                path, f"the selector names {_name_layers(repeated)} twice", "name every layer once"
            )
        keys = [key for key in ("split", "hot") if getattr(override, key) is not None]
        coverers = [_find_coverers(facts, ranges, number, key) for key in keys]
        if coverers and all(coverers):
            last = max(item for found in coverers for item in found)
            names = " and ".join(f"`{key}`" for key in keys)
            yield Finding(
                path,
                f"this override does nothing: later ones set {names} of all its layers",
                "put it after them, or remove it",
                origins=(
                    Origin(
                        "plan",
                        ("layers", "overrides", last, "select"),
                        f'set again for "{overrides[last].select.strip()}"',
                    ),
                ),
            )


def _find_coverers(facts: Facts, ranges: list[list[Range]], number: int, key: str) -> list[int]:
    """Later overrides that together set ``key`` of all the layers; empty if some are left."""
    left = [item for item in ranges[number] if item[0] <= item[1]]
    found = []
    overrides = facts.plan.layers.overrides
    for later in range(number + 1, len(overrides)):
        if left and getattr(overrides[later], key) is not None:
            rest = _subtract(left, ranges[later])
            if rest != left:
                found.append(later)
            left = rest
    return [] if left else found


def _subtract(left: list[Range], right: list[Range]) -> list[Range]:
    """The layers of ``left`` that are not in ``right``."""
    for first, last in right:
        rest = []
        for low, high in left:
            if last < low or high < first or first > last:
                rest.append((low, high))
                continue
            if low < first:
                rest.append((low, first - 1))
            if last < high:
                rest.append((last + 1, high))
        left = rest
    return left


def _find_repetition(ranges: list[Range]) -> Range | None:
    for number, (first, last) in enumerate(ranges):
        for other_first, other_last in ranges[:number]:
            low, high = max(first, other_first), min(last, other_last)
            if low <= high:
                return low, high
    return None


def _name_layers(layers: Range) -> str:
    first, last = layers
    return f"layer {first}" if first == last else f"layers {first} to {last}"


@rule("P212", "error", "plan", "model")
def check_selectors_in_range(facts: Facts) -> Iterator[Finding]:
    count = facts.model.shape.layers
    tables = [
        (("layers", "overrides", number, "select"), item.select)
        for number, item in enumerate(facts.plan.layers.overrides)
    ] + [
        (("experts", "layers", number, "select"), item.select)
        for number, item in enumerate(facts.plan.experts.layers)
    ]
    for path, selector in tables:
        for first, last in parse_selector(selector):
            if first > last:
                yield Finding(
                    path,
                    f"the range {first}-{last} is reversed and selects nothing",
                    f'write "{last}-{first}"',
                )
            elif last >= count:
                yield Finding(
                    path,
                    f"there is no layer {last}: the model has the layers 0 to {count - 1}",
                    f'write "{first}-{count - 1}"' if first < count - 1 else None,
                    origins=(Origin("model", ("shape", "layers"), f"layers = {count}"),),
                )
