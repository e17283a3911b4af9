"""Compared after planning: thresholds, promises and speeds."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pi2.costs.cost import Cost, cost_plan
from pi2.diagnostics import UserError
from pi2.fitting.budget import Shortage, fit_plan, write_memory
from pi2.fitting.completion import resolve_values
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.quantities import approximate_bytes, approximate_share, write_table
from pi2.planning.planner import PlannedPlan, finish_plan, score_plan
from pi2.planning.refinement import Decision
from pi2.tracing import make_figure, save_figure

WITHOUT = "none"


def choose_thresholds(planned: PlannedPlan) -> PlannedPlan:
    """The faster of an MoE model's plan and the same with the wish's thresholds, if they fit."""
    wish, cost = planned.wish, planned.cost
    usable = wish.thresholds is not None and wish.model.moe is not None
    is_whole = cost.inputs.rates.whole_unit is not None
    if not usable or cost.settings.predictor != "router" or is_whole:
        return planned
    found = [(WITHOUT, planned)]
    values = _cut_gates(planned)

    def resolve() -> ResolvedPlan:
        resolved = resolve_values(values, wish.device, wish.model)
        return replace(resolved, thresholds=wish.thresholds)

    with suppress(Shortage):
        fitted = fit_plan(resolve(), planned.resolved.plan.memory.budget).plan
        values["memory"] |= write_memory(fitted)
        values["layers"] = fitted.layers.model_dump(exclude_unset=True)
        own = finish_plan(wish, values, resolve())
        own = replace(own, left_out=planned.left_out, layout=planned.layout)
        found.append(("all gates in memory", own))
    found.sort(key=lambda item: score_plan(wish, item[1]))
    chosen, best = found[0]
    decision = Decision(
        key="sparsity",
        chosen=chosen,
        tokens_s=tuple((label, item.cost.tokens_s) for label, item in found),
    )
    return replace(best, decisions=(*planned.decisions, decision))


def _cut_gates(planned: PlannedPlan) -> dict[str, Any]:
    """Values of the plan with the wish's thresholds."""
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
    return whole


LEAST_TOKENS = 16
"""Fewer tokens say little about a speed."""


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
    found = cost.range_tokens_s
    told = f"promise: predicted {found.write()} tokens/s"
    away = tokens_s / cost.tokens_s - 1.0
    if found.low <= tokens_s <= found.high:
        return f"{told}: the run is as fast as that"
    word = "slower" if away < 0 else "faster"
    return (
        f"{told}: the run is {abs(away):.0%} {word}; if no other work explains it, the device "
        "file is out of date: measure again with `pi2 probe`, and plan again"
    )


def describe_curve(plans: Sequence[PlannedPlan]) -> Iterator[str]:
    rows = []
    for item in plans:
        plan, cost = item.resolved.plan, item.cost
        waits = sum(layer.wait_s for layer in cost.layers) / cost.token_s
        reads = "none"
        if cost.hit_rate < 1.0:
            io = plan.io
            reads = (
                f"io_uring, {io.depth} deep"
                if io.engine == "io_uring"
                else f"pread, {io.threads} threads"
            )
        figures = approximate_bytes(plan.memory.budget), cost.range_tokens_s.write()
        shares = f"{cost.hit_rate:.1%}", approximate_share(waits)
        rows.append((*figures, *shares, plan.decode.predictor, plan.kv.type, reads))
    titles = "memory | tokens/s | in memory | waiting | predictor | KV cache | reads"
    return write_table(titles, rows)


def draw_curve(plans: Sequence[PlannedPlan], form: str) -> bytes:
    """The picture's bytes; UserError P632 without matplotlib, P633 for an unknown type."""
    wish = plans[0].wish
    figure = make_figure(7.0, 4.0)
    axes = figure.add_subplot()
    memories = [item.resolved.plan.memory.budget / 2**30 for item in plans]
    ranges = [item.cost.range_tokens_s for item in plans]
    axes.fill_between(memories, [x.low for x in ranges], [x.high for x in ranges], alpha=0.2)
    axes.plot(memories, [x.expected for x in ranges], marker="o")
    axes.set_xlabel("memory of the process (GiB)")
    axes.set_ylabel("tokens per second, predicted")
    axes.set_title(f"{wish.model.name or wish.model.id} on {wish.device.name or wish.device.id}")
    axes.set_ylim(bottom=0.0)
    axes.grid(alpha=0.3)
    return save_figure(figure, form)
