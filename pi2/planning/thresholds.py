"""Whether thresholds for a mixture's experts pay on a device: plans with and without them.

Thresholds are calibrated beforehand (`pi2 sparsity calibrate`) and lose quality, so that a plan has
them only if the wish names them.  They may cost speed as well: gates take memory, and open neurons
are read one by one, no longer as whole experts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pi2.costs.cost import cost_resolved
from pi2.plan.arithmetic.fitting import Shortage, fit_plan, write_memory
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.planning.planner import PlannedPlan, score_plan
from pi2.planning.refinement import Decision
from pi2.planning.resolving import resolve_values

WITHOUT = "none"


def choose_thresholds(planned: PlannedPlan) -> PlannedPlan:
    """The fastest of a mixture's plan and the same with the thresholds of its wish, by the cost
    model; ``planned`` itself where the wish has none, or its plan does not fit them."""
    wish, cost = planned.wish, planned.cost
    usable = wish.thresholds is not None and wish.model.moe is not None
    if not usable or cost.predictor != "router" or cost.whole_unit is not None:
        return planned
    found = [(WITHOUT, planned)]
    for label, values in _list_candidates(planned):
        budget = planned.resolved.plan.memory.budget
        try:
            fitted = fit_plan(_resolve(planned, values), budget).plan
        except Shortage:
            continue
        values["memory"] |= write_memory(fitted)
        values["layers"] = fitted.layers.model_dump(exclude_unset=True)
        resolved = _resolve(planned, values)
        own = cost_resolved(resolved, store=wish.store)
        full = cost_resolved(resolved, store=wish.store, position=wish.context)
        found.append(
            (
                label,
                replace(
                    planned,
                    values=values,
                    resolved=resolved,
                    cost=own,
                    full_tokens_s=full.tokens_s,
                ),
            )
        )
    found.sort(key=lambda item: score_plan(wish, item[1]))
    chosen, best = found[0]
    decision = Decision(
        key="sparsity",
        chosen=chosen,
        tokens_s=tuple((label, item.cost.tokens_s) for label, item in found),
    )
    return replace(best, decisions=(*planned.decisions, decision))


def _list_candidates(planned: PlannedPlan) -> Iterator[tuple[str, dict[str, Any]]]:
    """Plans with thresholds, by what becomes of the gates."""
    thresholds = planned.wish.thresholds
    assert thresholds is not None
    sparsity: dict[str, Any] = {"method": thresholds.method}
    sparsity |= {"thresholds": planned.wish.thresholds_file}
    if thresholds.max_perplexity_increase is None:
        sparsity["target"] = thresholds.target
    else:
        sparsity["max_perplexity_increase"] = thresholds.max_perplexity_increase
    whole = copy.deepcopy(planned.values)
    whole["sparsity"] = sparsity
    whole["decode"] |= {"predictor": "gate", "look_ahead": "none"}
    yield "all gates in memory", whole


def _resolve(planned: PlannedPlan, values: dict[str, Any]) -> ResolvedPlan:
    """A plan's values with the wish's thresholds."""
    wish = planned.wish
    return replace(resolve_values(values, wish.device, wish.model), thresholds=wish.thresholds)
