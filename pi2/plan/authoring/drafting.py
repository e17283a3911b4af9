"""Drafts of new documents: texts that are sound and say what to change.

A plan's draft fits its segments to the model by the arithmetic of `pi2.plan.arithmetic.sizes`; how
well it runs is a matter for the planner and for measurements.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pi2.diagnostics import UserError
from pi2.plan.arithmetic.costs import USUAL_CHUNK, list_chunks
from pi2.plan.arithmetic.fitting import MIB, Shortage, fit_plan, write_memory
from pi2.plan.arithmetic.resolved import ResolvedPlan, has_packable_shape
from pi2.plan.arithmetic.sizes import count_ffn_bytes, find_block_bytes
from pi2.plan.documents.backends import list_usual_backends
from pi2.plan.documents.device import Device, UnitKind
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import Plan, Segments
from pi2.plan.documents.quantities import (
    approximate_bytes,
    compare_bytes,
    format_bytes,
    round_size,
    write_least,
)
from pi2.plan.toml.text import write_key, write_value
from pi2.plan.weights.layout import ScalesPlace, round_up


def write_overlay(
    base: str,
    changes: Mapping[str, object],
    remarks: Sequence[str] = (),
    key: Literal["extends", "weights"] = "extends",
) -> str:
    """Text of a plan that extends ``base``, or runs this file of weights; a value of None drops
    what is inherited."""
    lines = [f"# {remark}" for remark in remarks]
    value = base if key == "weights" else [base]
    lines += ["schema_version = 2", f"{key} = {write_value(value)}"]
    dropped = [key for key, value in changes.items() if value is None]
    if dropped:
        lines.append(f"remove = {write_value(dropped)}")
    stated = {key: value for key, value in changes.items() if value is not None}
    return "\n".join([*lines, "", write_tables(stated)])


def write_tables(changes: Mapping[str, object]) -> str:
    """Values by dotted key as TOML tables."""
    plain: list[str] = []
    tables: dict[str, list[str]] = {}
    for key, value in changes.items():
        if isinstance(value, Mapping):
            rows = [f"{write_key(str(name))} = {write_value(item)}" for name, item in value.items()]
            tables.setdefault(key, []).extend(rows)
            continue
        table, _, name = key.rpartition(".")
        rows = tables.setdefault(table, []) if table else plain
        rows.append(f"{write_key(name)} = {write_value(value)}")
    parts = ["\n".join([*plain, ""])] if plain else []
    parts += ["\n".join([f"[{name}]", *rows, ""]) for name, rows in sorted(tables.items())]
    return "\n".join(parts)


def refer_from(file: Path, target: Path) -> str:
    """The file as an ``extends`` of the document ``target`` names it."""
    reference = os.path.relpath(file.resolve(), target.resolve().parent)
    return reference if reference.startswith(".") else f"./{reference}"


MOST_CONTEXT = 4096
LONG_CHUNK_SHARE = 1 / 128
"""Part of the budget that a prompt's longer chunks may take: about as much of the cache less is
missed more often."""


def choose_backends(kinds: Iterable[UnitKind]) -> dict[str, str]:
    """Backends of a plan that uses units of ``kinds``: those that compute, or, where there is none
    for one of them, ``null`` for all, with which the plan can be simulated and run dry."""
    wanted, usual = sorted(set(kinds)), list_usual_backends()
    if all(kind in usual for kind in wanted):
        return {kind: usual[kind] for kind in wanted}
    return dict.fromkeys(wanted, "null")


def write_backends(kinds: Iterable[UnitKind]) -> str:
    """The line of a plan that names its backends."""
    wanted = sorted(set(kinds))
    line = f"backends = {write_value(choose_backends(wanted))}"
    usual = list_usual_backends()
    missing = [kind for kind in wanted if kind not in usual]
    if missing:
        line += f"  # null counts and computes nothing: no backend serves {missing[0]} yet"
    return line


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What somebody wants a plan for."""

    device: str
    """Reference to the device, as the plan states it."""
    model: str
    store: str
    budget_bytes: int | None
    """Maximum resident set size of the process; None for the least that keeps all in memory."""
    context: int | None = None
    """Tokens; None takes the model's, at most 4096."""
    name: str = ""
    scales: ScalesPlace = "inline"
    """Where the store has the scales of quantised weights."""


def draft_plan(wish: Wish, device: Device, model: Model) -> str:
    """Text of a plan whose segments hold what they have to.

    Raises `UserError` P026 where the memory is not enough, P242 where predictors cannot be
    packed.
    """
    if not has_packable_shape(model):
        raise UserError.of("P242", "the rank of the model's predictors is not a multiple of 32")
    values = _begin(wish, device, model)
    budget = None if wish.budget_bytes is None else round_size(wish.budget_bytes)
    values["prefill"]["chunk"] = _choose_chunk(values, device, model, budget)
    try:
        fitted = fit_plan(_resolve(values, device, model), budget)
    except Shortage as shortage:
        assert budget is not None
        has, needs = compare_bytes(budget, shortage.needed_bytes)
        raise UserError.of(
            "P026",
            f"{has} is not enough: this plan needs at least {needs}",
            help=f"--memory '{write_least(shortage.needed_bytes)}', or a shorter --context",
            notes=[f"{name}: {approximate_bytes(n)}" for name, n in shortage.sizes.items() if n],
        ) from None
    values["memory"] = write_memory(fitted.plan)
    values["layers"]["hot"] = fitted.plan.layers.hot
    return _write(wish, values, fitted)


def _begin(wish: Wish, device: Device, model: Model) -> dict[str, Any]:
    shape = model.shape
    context = wish.context or min(shape.context, MOST_CONTEXT)
    unit = next((name for name, item in device.units.items() if item.kind == "cpu"), None)
    if unit is None:
        raise UserError.of(
            "P026",
            f"the device {device.id} has no CPU, and nothing else computes yet",
            help="add a unit of the kind cpu to the device",
        )
    values: dict[str, Any] = {
        "schema_version": 2,
        "device": wish.device,
        "model": wish.model,
        "store": wish.store,
        "backends": choose_backends({"cpu"}),
        "memory": {"budget": "0 B", "segments": dict.fromkeys(Segments.model_fields, "0 B")},
        "bundle": {"stride": "1 B", "scales": wish.scales},
        "layers": {"split": {unit: 1.0}, "hot": 1.0},
        "prefill": {"chunk": min(USUAL_CHUNK, context)},
        "decode": choose_decoding(model),
        "kv": {"context": context},
    }
    used = _resolve(values, device, model).bundle.used_bytes
    stride = round_up(used, find_block_bytes(device))
    values["bundle"]["stride"] = format_bytes(stride)
    return values


def _choose_chunk(
    values: Mapping[str, Any], device: Device, model: Model, budget: int | None
) -> int:
    """Tokens of a prompt's chunk: the most that are of use to the model, as far as those beyond the
    usual take little of the ``budget``."""
    usual: int = values["prefill"]["chunk"]

    def count_bytes(chunk: int) -> int:
        changed = {**values, "prefill": {"chunk": chunk}}
        return _resolve(changed, device, model).needs.workspace.bytes

    longest = list_chunks(model, values["kv"]["context"])[-1]
    if budget is None or longest == usual:
        return longest
    if count_bytes(longest) - count_bytes(usual) > LONG_CHUNK_SHARE * budget:
        return usual
    try:
        fit_plan(_resolve({**values, "prefill": {"chunk": longest}}, device, model), budget)
    except Shortage:
        return usual
    return longest


def _resolve(values: Mapping[str, Any], device: Device, model: Model) -> ResolvedPlan:
    plan = Plan.model_validate_json(json.dumps(values))
    return ResolvedPlan(plan=plan, device=device, model=model)


def choose_decoding(model: Model) -> dict[str, Any]:
    """Table ``decode`` of a plan for ``model``, where nobody has said more."""
    predictor = choose_predictor(model)
    # A router that looks ahead loses nothing, and stops where it does not pay.
    return {"predictor": predictor} | ({"look_ahead": "layer"} if predictor == "router" else {})


def choose_predictor(model: Model) -> str:
    """``decode.predictor`` of a plan for ``model``, where nobody has said which."""
    if model.predictor is not None:
        return "low-rank"
    if model.moe is not None:
        return "router"
    return "none" if model.is_smooth and not model.cut_layers else "gate"


SEGMENT_REMARKS = {
    "runtime": "Python and libraries",
    "attention": "embeddings, attention, norms",
    "kv": "keys and values of the context",
    "state": "states of layers without keys and values",
    "predictor": "predictors of active neurons",
    "hot": "hot neurons",
    "cold": "cache of cold neurons",
    "workspace": "activations and staging",
}
"""What a plan's segments hold, for those who read it."""


def name_segments(model: Model) -> dict[str, str]:
    """What the segments of a plan for ``model`` hold: those that it needs."""
    has_states = bool(model.state_layers)
    return {name: text for name, text in SEGMENT_REMARKS.items() if has_states or name != "state"}


def _describe_units(device: Device) -> list[str]:
    others = sorted({unit.kind for unit in device.units.values()} - {"cpu"})
    if not others:
        return []
    names = " and ".join(others)
    return [f"# The cpu computes everything; `pi2 plan` divides the work with the {names}."]


def _write(wish: Wish, values: dict[str, Any], final: ResolvedPlan) -> str:
    whole, hot = count_ffn_bytes(final), final.needs.hot.bytes
    lines = [
        f"# All neurons take {approximate_bytes(whole)} in the store; {hot / whole:.0%} of them "
        "stay in memory.",
        *_describe_units(final.device),
        "# `pi2 show FILE` shows what each segment needs, `pi2 explain KEY FILE` explains a value.",
        "schema_version = 2",
        f"name = {write_value(wish.name)}",
    ]
    lines += [f"{key} = {write_value(values[key])}" for key in ("device", "model")]
    lines += [
        f"store = {write_value(values['store'])}  # relative to this file; `pi2 convert` makes it",
        write_backends({"cpu"}),
        "",
        "[memory]",
        f"budget = {write_value(values['memory']['budget'])}  # limit of the whole process",
        "",
        "[memory.segments]",
    ]
    for name, remark in name_segments(final.model).items():
        lines.append(f"{name} = {write_value(values['memory']['segments'][name])}  # {remark}")
    used = final.bundle.used_bytes
    lines += ["", "[bundle]", f"stride = {write_value(values['bundle']['stride'])}"]
    lines[-1] += f"  # {used} bytes are used"
    if final.bundle.scales != "inline":
        lines.append(f"scales = {write_value(final.bundle.scales)}  # in files of their own")
    lines += ["", "[layers]"]
    lines += [f"split = {write_value(values['layers']['split'])}"]
    lines += [
        f"hot = {write_value(values['layers']['hot'])}  # share of neurons that stay in memory"
    ]
    for key in ("prefill", "decode", "kv"):
        lines += ["", f"[{key}]"]
        lines += [f"{write_key(name)} = {write_value(v)}" for name, v in values[key].items()]
    lines += write_sampling(final.model)
    return "\n".join(lines) + "\n"


def write_sampling(model: Model) -> list[str]:
    """Lines of a plan's table ``sampling``, if the model's authors recommend something."""
    if model.sampling is None:
        return []
    values = model.sampling.model_dump(exclude_unset=True)
    lines = [f"{write_key(key)} = {write_value(value)}" for key, value in values.items()]
    return ["", "[sampling]  # as the model's authors recommend", *lines]


def draft_like(name: str, reference: str) -> str:
    """Text of a device or model called ``name`` that begins with another one."""
    lines = [
        "# State the differences here; `pi2 show FILE` shows every value.",
        "schema_version = 2",
        f"extends = [{write_value(reference)}]",
        f"id = {write_value(name)}",
        f"name = {write_value(name)}",
    ]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """What the system says of this machine."""

    processor: str
    architecture: str
    features: tuple[str, ...]
    clusters: tuple[tuple[int, float | None, str | None], ...]
    """Cores, highest clock in Hz and micro-architecture of every kind of core."""
    installed_bytes: int
    block_bytes: int | None


def draft_device(name: str, facts: MachineFacts) -> str:
    """Text of a device called ``name``, which is like this machine; figures are not measured."""
    from pi2.plan.documents.device import IsaFeature
    from pi2.plan.documents.quantities import HERTZ_UNITS, format_quantity

    known = [item for item in get_args(IsaFeature) if item in facts.features]
    lines = [
        "# A kind of machine: no serial numbers, host names or accounts.",
        "# Rates are left out: state those that somebody measured or published, with their source.",
        "schema_version = 2",
        f"id = {write_value(name)}",
        f"name = {write_value(name)}",
        "",
        "[units.cpu]",
        'kind = "cpu"',
        f"model = {write_value(facts.processor[:120])}",
    ]
    if facts.architecture in ("x86-64", "aarch64"):
        lines.append(f"architecture = {write_value(facts.architecture)}")
        lines.append(f"features = {write_value(known)}")
    for number, (cores, clock_hz, core) in enumerate(facts.clusters):
        lines += ["", "[[units.cpu.clusters]]"]
        lines += [f'id = "cores{number or ""}"', f"cores = {cores}"]
        if clock_hz:
            clock = format_quantity(round(clock_hz / 1e6) * 10**6, HERTZ_UNITS)
            lines.append(f"frequency = {write_value(clock)}")
        if core:
            lines.append(f"core = {write_value(core)}")
    size = round_up(
        facts.installed_bytes - 512 * MIB, 1024 * MIB
    )  # systems keep some for themselves
    lines += ["", "[memory]", f"capacity = {write_value(format_bytes(max(size, 512 * MIB)))}"]
    if facts.block_bytes is not None:
        lines += ["", "[storage]", f"block_size = {write_value(format_bytes(facts.block_bytes))}"]
    return "\n".join(lines) + "\n"


def draft_model(name: str, shape: Mapping[str, int], activation: str) -> str:
    """Text of a model called ``name``: ``shape`` has the keys of `Shape`."""
    lines = [
        "schema_version = 2",
        f"id = {write_value(name)}",
        f"name = {write_value(name)}",
        "",
        "[shape]",
        *(f"{key} = {value}" for key, value in shape.items()),
        "",
        "[ffn]",
        f"activation = {write_value(activation)}",
        "",
        "# Say what is known of the activations, with its source, and the plan can count on it:",
        "# [sparsity]",
        "# active = 0.1",
        '# status = "published"',
        '# source = "..."',
    ]
    return "\n".join(lines) + "\n"
