"""What a plan needs to run with thresholds: values to load it with, and a plan that extends it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.plan_sparsity import Sparsity
from pi2.plan.documents.quantities import format_bytes
from pi2.plan.reading.thresholds import Thresholds
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


def relate(file: Path, plan: Path) -> str:
    """Path of ``file`` as a plan at ``plan`` names it."""
    return os.path.relpath(file.resolve(), plan.resolve().parent)
