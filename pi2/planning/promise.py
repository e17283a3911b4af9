"""A run's speed beside what the plan's device file promises."""

from __future__ import annotations

from pi2.costs.cost import Cost, cost_plan
from pi2.diagnostics import UserError
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.quantities import approximate_number

LEAST_TOKENS = 16
"""Fewer tokens say little about a speed."""
CLOSE = 0.15
"""Share of a prediction that a run may miss it by, beside what measurements were apart."""


def find_promise(resolved: ResolvedPlan, position: int) -> Cost | None:
    """What the plan is predicted to do where its device was probed; None elsewhere."""
    if not any(unit.kernels for unit in resolved.device.units.values() if unit.kind == "cpu"):
        return None
    try:
        return cost_plan(resolved, position=max(position, 1))
    except UserError:
        return None


def describe_promise(cost: Cost, tokens_s: float) -> str:
    """One line: the prediction, how the run compares, and what to do where it is far off."""
    spread = cost.spread_tokens_s
    within = f" ± {approximate_number(spread, 2)}" if spread > 0.01 * cost.tokens_s else ""
    told = f"promise: predicted {approximate_number(cost.tokens_s)}{within} tokens/s"
    away = tokens_s / cost.tokens_s - 1.0
    if abs(tokens_s - cost.tokens_s) <= CLOSE * cost.tokens_s + spread:
        return f"{told}: the run is as fast as that"
    word = "slower" if away < 0 else "faster"
    return (
        f"{told}: the run is {abs(away):.0%} {word}; if no other work explains it, the device "
        "file is out of date: measure again with `pi2 probe`, and plan again"
    )
