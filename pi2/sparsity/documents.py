"""What a plan needs to run with thresholds: values to load it with, and a plan that extends it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.plan_sparsity import Sparsity
from pi2.plan.documents.quantities import format_bytes
from pi2.plan.reading.thresholds import Thresholds
from pi2.plan.toml.text import write_key, write_value
from pi2.sparsity.goals import Goal

_KIB = 1024


def describe_changes(
    resolved: ResolvedPlan, thresholds: Thresholds, goal: Goal, file: str
) -> dict[str, object]:
    """Values of the plan, by key, with ``thresholds`` in ``file``: gates first, with room for the
    gate rows and for the neurons that they open.  The budget grows where it must."""
    sparsity: dict[str, object] = {"method": goal.method}
    if goal.target is not None:
        sparsity["target"] = goal.target
    if goal.max_increase is not None:
        sparsity["max_perplexity_increase"] = goal.max_increase
    sparsity["thresholds"] = file
    plan = resolved.plan.model_copy(
        update={
            "decode": resolved.plan.decode.model_copy(update={"predictor": "gate"}),
            "sparsity": Sparsity.model_validate(sparsity),
        }
    )
    needs = replace(resolved, plan=plan, thresholds=thresholds).needs
    segments = plan.memory.segments
    changes: dict[str, object] = {
        "decode.predictor": "gate",
        "decode.look_ahead": "none",
        "sparsity": sparsity,
    }
    total = segments.runtime
    for name, need in needs.items():
        room = getattr(segments, name)
        size = max(room, -(-need.bytes // _KIB) * _KIB)
        total += size
        if size != room:
            changes[f"memory.segments.{name}"] = format_bytes(size)
    if total > plan.memory.budget:
        changes["memory.budget"] = format_bytes(total)
    return changes


def write_tables(changes: Mapping[str, object]) -> str:
    """The changes as TOML tables, to be put into a plan."""
    tables: dict[str, list[str]] = {}
    for key, value in changes.items():
        if isinstance(value, Mapping):
            rows = [f"{write_key(str(name))} = {write_value(item)}" for name, item in value.items()]
            tables.setdefault(key, []).extend(rows)
            continue
        table, _, name = key.rpartition(".")
        tables.setdefault(table, []).append(f"{write_key(name)} = {write_value(value)}")
    return "\n".join("\n".join([f"[{name}]", *rows, ""]) for name, rows in sorted(tables.items()))


def write_plan_text(base: Path, target: Path, changes: Mapping[str, object]) -> str:
    """A plan at ``target`` that extends the one at ``base``."""
    reference = os.path.relpath(base.resolve(), target.resolve().parent)
    if not reference.startswith("."):
        reference = f"./{reference}"
    head = f"schema_version = 2\nextends = [{write_value(reference)}]\n"
    return f"{head}\n{write_tables(changes)}"


def relate(file: Path, plan: Path) -> str:
    """Path of ``file`` as a plan at ``plan`` names it."""
    return os.path.relpath(file.resolve(), plan.resolve().parent)
