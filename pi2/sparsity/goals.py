"""What thresholds are to reach: a share of the work, or a loss of quality."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pi2.diagnostics import UserError
from pi2.plan.documents.plan_sparsity import SparsityMethod
from pi2.plan.resolve import load_plan
from pi2.sharing.resolver import LockedReferences


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One of ``target`` and ``max_increase``."""

    method: SparsityMethod
    target: float | None = None
    """Share of up and down that is not read."""
    max_increase: float | None = None
    """Largest share by which the perplexity may grow."""
    max_error: float | None = None
    """Largest error of that growth; by default half of what is stated."""


def choose_goal(
    plan: Path, settings: Mapping[str, object], goal: Goal | None, max_error: float | None
) -> Goal:
    """``goal``, or what the plan says, with ``max_error``; UserError P668 if there is none."""
    resolver = LockedReferences(plan.parent)
    resolved = load_plan(plan, overrides=settings, resolver=resolver, thresholds="none")
    if goal is not None:
        return replace(goal, max_error=max_error)
    sparsity = resolved.plan.sparsity
    if sparsity is None:
        raise UserError.of(
            "P668",
            f"{plan} has no [sparsity]: how much may be left out?",
            help="use --target 0.5, or --loss 2% for the increase in perplexity",
        )
    return Goal(
        method=sparsity.method,
        target=sparsity.target,
        max_increase=sparsity.max_perplexity_increase,
        max_error=max_error,
    )
