"""Drafts of new documents: texts that are sound and say what to change."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pi2.authoring.writing import write_tables
from pi2.fitting import list_usual_backends
from pi2.fitting.completion import FindMemory, StoreOrigin, complete_plan, resolve_values
from pi2.plan.arithmetic.sizes import count_ffn_bytes
from pi2.plan.documents.common import SCHEMA_VERSION
from pi2.plan.documents.device import Device, UnitKind
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import Plan
from pi2.plan.documents.quantities import approximate_bytes, format_bytes, round_size
from pi2.plan.toml.text import KeyPath, write_key, write_value
from pi2.plan.weights.layout import ScalesPlace


def write_overlay(
    base: str,
    changes: Mapping[str, object],
    remarks: Sequence[str] = (),
    key: Literal["extends", "weights"] = "extends",
) -> str:
    """A plan that extends ``base`` or runs this file of weights; None removes a value."""
    lines = [f"# {remark}" for remark in remarks]
    value = base if key == "weights" else [base]
    lines += [f"schema_version = {SCHEMA_VERSION}", f"{key} = {write_value(value)}"]
    dropped = [key for key, value in changes.items() if value is None]
    if dropped:
        lines.append(f"remove = {write_value(dropped)}")
    stated = {key: value for key, value in changes.items() if value is not None}
    return "\n".join([*lines, "", write_changes(stated)])


def write_changes(changes: Mapping[str, object]) -> str:
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
    place = file.parent.resolve() / file.name  # a link of the hub's cache has the better name
    reference = os.path.relpath(place, target.resolve().parent)
    return reference if reference.startswith(".") else f"./{reference}"


def explain_backends(kinds: Iterable[UnitKind]) -> str | None:
    """Why the backends of a plan compute nothing; None where they compute."""
    usual = list_usual_backends()
    missing = sorted(kind for kind in set(kinds) if kind not in usual)
    return (
        f"null counts and computes nothing: no backend serves {missing[0]} yet" if missing else None
    )


@dataclass(frozen=True, kw_only=True)
class Wish:
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
    """The store's place for the scales of quantised weights."""


def draft_plan(
    wish: Wish, device: Device, model: Model, find_memory: FindMemory | None = None
) -> str:
    """A plan that states the wish and leaves the rest to be derived; raises as `complete_plan`."""
    values: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "name": wish.name,
        "weights": wish.store,
        "device": wish.device,
        "model": wish.model,
    }
    tables: dict[str, dict[str, object]] = {"memory": {}}
    if wish.budget_bytes is not None:
        tables["memory"]["budget"] = format_bytes(round_size(wish.budget_bytes))
    if wish.scales != "inline":
        tables["bundle"] = {"scales": wish.scales}
    if wish.context is not None:
        tables["kv"] = {"context": wish.context}
    found = complete_plan({**values, **tables}, device, StoreOrigin(model), find_memory)
    final = resolve_values(found.values, device, model)
    tables["memory"]["budget"] = format_bytes(final.plan.memory.budget)
    whole, hot = count_ffn_bytes(final), final.needs.hot.bytes
    head = [
        f"# All neurons take {approximate_bytes(whole)} in the store; {hot / whole:.0%} of them "
        "stay in memory.",
        *_describe_units(final.device),
        "# `pi2 show FILE` prints derived values, `pi2 explain KEY FILE` explains one.",
    ]
    sampling, remarks = recommend_sampling(model)
    remarks[("weights",)] = "relative to this file; `pi2 convert` makes it"
    remarks[("memory", "budget")] = describe_budget(device)
    document = {**values, **tables, **sampling}
    return "\n".join([*head, *write_tables(Plan, (), document, remarks.get)]) + "\n"


def describe_budget(device: Device) -> str:
    """Remark of a plan's budget; phones have UFS."""
    limit = "limit of the whole process"
    if device.storage.kind != "ufs":
        return limit
    return f"{limit}; Android 17 limits anonymous memory: adb shell am memory-limiter status"


def _describe_units(device: Device) -> list[str]:
    others = sorted({unit.kind for unit in device.units.values()} - {"cpu"})
    if not others:
        return []
    names = " and ".join(others)
    return [f"# The cpu computes everything; `pi2 plan` divides the work with the {names}."]


def recommend_sampling(model: Model) -> tuple[dict[str, object], dict[KeyPath, str]]:
    """A plan's table ``sampling``, if the model's authors recommend something, and remarks."""
    if model.sampling is None:
        return {}, {}
    values = model.sampling.model_dump(mode="json", exclude_unset=True)
    remark = "as the model's authors recommend"
    return {"sampling": values}, {("sampling", key): remark for key in values}


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


def draft_device(name: str) -> str:
    """Text of a device called ``name``, which is like this machine; figures are not measured."""
    from pi2.machine import describe_cpu, detect_machine, inspect_storage, round_capacity

    machine, block_bytes = detect_machine(), inspect_storage(Path()).block_bytes
    values: dict[str, object] = {
        "schema_version": 2,
        "id": name,
        "name": name,
        "units": {"cpu": describe_cpu(machine.cpu, machine.cpu.cores_online)},
        "memory": {"capacity": format_bytes(round_capacity(machine.memory.installed_bytes))},
    }
    if block_bytes is not None:
        values["storage"] = {"block_size": format_bytes(block_bytes)}
    head = (
        "# A kind of machine: no serial numbers, host names or accounts.",
        "# Rates are left out: state measured or published ones, with their source.",
    )
    return "\n".join([*head, *write_tables(Device, (), values)]) + "\n"


def draft_model(name: str, shape: Mapping[str, int], activation: str) -> str:
    """Text of a model called ``name``: ``shape`` has the keys of `Shape`."""
    values = {
        "schema_version": 2,
        "id": name,
        "name": name,
        "shape": shape,
        "ffn": {"activation": activation},
    }
    advice = (
        "",
        "# State known statistics of the activations, with their source; plans use them:",
        "# [sparsity]",
        "# active = 0.1",
        '# status = "published"',
        '# source = "..."',
    )
    return "\n".join([*write_tables(Model, (), values), *advice]) + "\n"
