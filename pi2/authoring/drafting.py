"""Drafts of new documents: texts that are sound and say what to change."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pi2.fitting import list_usual_backends
from pi2.fitting.budget import MIB
from pi2.fitting.completion import SEGMENT_REASONS, choose_backends, complete_plan, resolve_values
from pi2.fitting.sizes import find_needs
from pi2.plan.arithmetic.sizes import count_ffn_bytes
from pi2.plan.documents.device import Device, UnitKind
from pi2.plan.documents.model import Model
from pi2.plan.documents.quantities import (
    approximate_bytes,
    format_bytes,
    round_size,
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
    """Text of a plan that states what is wished for; the rest is derived when it is read.

    Raises `UserError` as `complete_plan`.
    """
    values: dict[str, Any] = {
        "schema_version": 2,
        "name": wish.name,
        "device": wish.device,
        "model": wish.model,
        "store": wish.store,
    }
    tables: dict[str, dict[str, object]] = {"memory": {}}
    if wish.budget_bytes is not None:
        tables["memory"]["budget"] = format_bytes(round_size(wish.budget_bytes))
    if wish.scales != "inline":
        tables["bundle"] = {"scales": wish.scales}
    if wish.context is not None:
        tables["kv"] = {"context": wish.context}
    found = complete_plan({**values, **tables}, device, model)
    final = resolve_values(found.values, device, model)
    tables["memory"]["budget"] = format_bytes(final.plan.memory.budget)
    whole, hot = count_ffn_bytes(final), find_needs(final).hot.bytes
    lines = [
        f"# All neurons take {approximate_bytes(whole)} in the store; {hot / whole:.0%} of them "
        "stay in memory.",
        *_describe_units(final.device),
        "# `pi2 show FILE` shows what is derived, `pi2 explain KEY FILE` explains a value.",
        *(f"{key} = {write_value(value)}" for key, value in values.items()),
    ]
    lines[-1] += "  # relative to this file; `pi2 convert` makes it"
    for name, table in tables.items():
        lines += ["", f"[{name}]"]
        lines += [f"{write_key(key)} = {write_value(value)}" for key, value in table.items()]
        if name == "memory":
            lines[-1] += "  # limit of the whole process"
    return "\n".join([*lines, *write_sampling(model)]) + "\n"


def name_segments(model: Model) -> dict[str, str]:
    """What the segments of a plan for ``model`` hold: those that it needs."""
    has_states = bool(model.state_layers)
    return {name: text for name, text in SEGMENT_REASONS.items() if has_states or name != "state"}


def _describe_units(device: Device) -> list[str]:
    others = sorted({unit.kind for unit in device.units.values()} - {"cpu"})
    if not others:
        return []
    names = " and ".join(others)
    return [f"# The cpu computes everything; `pi2 plan` divides the work with the {names}."]


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
