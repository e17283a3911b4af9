"""Rules about families, names of tensors, claimed rates, and selectors of layers."""

import re
from collections import Counter
from collections.abc import Iterator

from pi2.model.states import describe_state, list_state_tensors
from pi2.model.tensor import Place as TensorPlace
from pi2.plan.checking import Facts, Finding, Origin, rule
from pi2.plan.documents.common import Origin as Source
from pi2.plan.documents.common import find_type, list_known_keys, suggest
from pi2.plan.documents.family import Sections
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_parts import TENSOR_OPTIONS
from pi2.plan.documents.plan_units import list_layers
from pi2.plan.documents.private import walk_values
from pi2.plan.toml.expressions import is_expression, parse_expression
from pi2.plan.toml.text import KeyPath, format_path


@rule("P403", "warning", "plan", "device")
def check_plan_rests_on_claims(facts: Facts) -> Iterator[Finding]:
    claimed = [path for path, figure in _list_rates(facts) if figure.status == "vendor-claimed"]
    if not claimed:
        return
    places = tuple(
        Origin("device", (*path, "status"), 'status = "vendor-claimed"') for path in claimed
    )
    count = "a read rate" if len(claimed) == 1 else f"{len(claimed)} read rates"
    yield Finding(
        ("device",),
        f"the plan rests on {count} that only the vendor claims",
        "on the device, `pi2 probe -o FILE` measures it; until then, predicted ranges are wide",
        origins=places,
    )


def _list_rates(facts: Facts) -> Iterator[tuple[KeyPath, Source]]:
    device = facts.device
    if device.memory.read_bandwidth is not None:
        yield ("memory", "read_bandwidth"), device.memory.read_bandwidth
    for name in sorted({*facts.plan.layers.split, *_list_overridden(facts)}):
        unit = device.units.get(name)
        if unit is not None and unit.read_bandwidth is not None:
            yield ("units", name, "read_bandwidth"), unit.read_bandwidth
    # A pattern that was measured too does not rest on what is claimed.
    layers = facts.plan.layers
    hots = [layers.hot, *(item.hot for item in layers.overrides)]
    is_read = facts.plan.memory.embedding == "flash" or any(x is not None and x < 1 for x in hots)
    reads = device.storage.reads if is_read else ()
    known = {figure.pattern for figure in reads if figure.status != "vendor-claimed"}
    for number, figure in enumerate(reads):
        if figure.pattern not in known:
            yield ("storage", "reads", number), figure


def _list_overridden(facts: Facts) -> Iterator[str]:
    for override in facts.plan.layers.overrides:
        yield from override.split or ()


_PARTS = ("gate", "up", "down")


def _list_sections(facts: Facts) -> Iterator[tuple[KeyPath, Sections]]:
    yield (), facts.family
    for name, when in facts.family.when.items():
        yield ("when", name), when


@rule("P295", "error", "family")
def check_model_keys(facts: Facts) -> Iterator[Finding]:
    for base, sections in _list_sections(facts):
        for section in ("read", "set"):
            for path, _ in walk_values(getattr(sections, section), (*base, section)):
                own = path[len(base) + 1 :]
                is_known = not own or find_type(Model, own) is not None
                if not is_known and (len(own) == 1 or find_type(Model, own[:-1]) is not None):
                    yield _report_key(path, own)
        for key in sections.names:
            for part in _PARTS if "{part}" in key else ("",):
                own = ("tensors", key.replace("{part}", part))
                if find_type(Model, own) is None:
                    yield _report_key((*base, "names", key), own)


def _report_key(path: KeyPath, own: KeyPath) -> Finding:
    near = suggest(str(own[-1]), list_known_keys(Model, own[:-1]))
    return Finding(
        path,
        f"model documents have no key `{format_path(own)}`",
        None if near is None else f"did you mean `{near}`?",
        at="key",
    )


@rule("P296", "error", "family")
def check_expressions(facts: Facts) -> Iterator[Finding]:
    for base, sections in _list_sections(facts):
        texts = {(*base, "require", name): text for name, text in sections.require.items()}
        for section in ("assume", "fix", "set"):
            walked = walk_values(getattr(sections, section), (*base, section))
            texts |= {path: str(value) for path, value in walked if is_expression(value)}
        if sections.window is not None:
            texts[(*base, "window", "layers")] = sections.window.layers
        if base:
            texts[(*base, "test")] = facts.family.when[str(base[1])].test
        for path, text in texts.items():
            try:
                parse_expression(text)
            except ValueError as error:
                yield Finding(path, f"`{text}`: {error}")
        for path, value in walk_values(sections.read, (*base, "read")):
            if not isinstance(value, dict) and not (
                isinstance(value, list) and value and isinstance(value[0], str)
            ):
                yield Finding(
                    path,
                    f"`{format_path(path)}` is no array of keys to read",
                    'write ["key"], or ["key", default]; a fixed value belongs in [set]',
                )


_BIASES = frozenset({"gate_bias", "up_bias", "down_bias"})
_PER_EXPERT = frozenset({"predictor_in", "predictor_out", "predictor_bias"})
_MAYBE_PER_EXPERT = _BIASES | {"gate", "up", "down", "fused_gate_up", "fused_gate_up_bias"}
"""Parts of an FFN, which a checkpoint may have for all experts in one tensor."""
_FIELD = re.compile(r"\{[^{}]*\}|[{}]")


@rule("P247", "error", "model")
def check_tensor_names_layers(facts: Facts) -> Iterator[Finding]:
    model = facts.model
    numbered = _list_numbered(model)
    for key, name in model.tensors:
        if key in TENSOR_OPTIONS or name is None or (key in _BIASES and not model.ffn.bias):
            continue
        if key in ("gate", "up") and model.tensors.fused_gate_up is not None:
            continue
        usual = type(model.tensors).model_fields[key].default
        wanted = set(_FIELD.findall(usual or "{layer}")) - {"{mixer}"}
        if model.moe is not None and key in _PER_EXPERT:
            wanted.add("{expert}")
        if key in numbered:
            wanted.add("{mixer}")
        if model.predictor is None and key.startswith("predictor"):
            continue
        found = set(_FIELD.findall(name))
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
        tensors = list_state_tensors(TensorPlace(model), shape)
        found |= {source.key for tensor in tensors for source in tensor.sources}
    return frozenset(found)


@rule("P213", "warning", "plan")
def check_selectors_disjoint(facts: Facts) -> Iterator[Finding]:
    overrides = facts.plan.layers.overrides
    layers = [list(list_layers(override.select, _MOST_LAYERS)) for override in overrides]
    for number, override in enumerate(overrides):
        path = ("layers", "overrides", number, "select")
        twice = {layer for layer, times in Counter(layers[number]).items() if times > 1}
        if twice:
            first = last = min(twice)
            while last + 1 in twice:
                last += 1
            name = f"layer {first}" if first == last else f"layers {first} to {last}"
            yield Finding(path, f"the selector names {name} twice", "name every layer once")
        keys = [key for key in ("split", "hot") if getattr(override, key) is not None]
        coverers = [_find_coverers(facts, layers, number, key) for key in keys]
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


_MOST_LAYERS = 1024
"""Layers that models have at most: what selectors name beyond them is no layer."""


def _find_coverers(facts: Facts, layers: list[list[int]], number: int, key: str) -> list[int]:
    """Later overrides that together set ``key`` of all the layers; empty if some are left."""
    left, found = set(layers[number]), []
    overrides = facts.plan.layers.overrides
    for later in range(number + 1, len(overrides)):
        if getattr(overrides[later], key) is not None and not left.isdisjoint(layers[later]):
            found.append(later)
            left.difference_update(layers[later])
    return [] if left else found
