"""From a wish to a plan: pose the problem, solve it, write the plan, or refuse the wish."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from pi2.costs.cost import Cost, cost_plan, cost_resolved
from pi2.costs.kernel_times import Rates
from pi2.costs.rates import check_flash, check_power, read_rates, read_whole_rates
from pi2.costs.settings import read_stored
from pi2.diagnostics import UserError
from pi2.fitting import count_unit_needs, describe_unit, find_whole_backend, list_usual_backends
from pi2.fitting.budget import MIB, Shortage, count_runtime, fit_plan, round_segment
from pi2.fitting.completion import resolve_values
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.plan import KvType, PredictorMode
from pi2.plan.documents.plan_units import Sparsity
from pi2.plan.documents.quantities import (
    approximate_bytes,
    approximate_number,
    compare_bytes,
    write_least,
)
from pi2.plan.weights.layout import BundleLayout, round_up
from pi2.planning.refinement import (
    REWRITE_GAIN,
    Decision,
    list_bundles,
    needs_rewriting,
    refine_plan,
)
from pi2.planning.search import Problem, find_best, find_least, list_predictors, pose_problem
from pi2.planning.wish import Wish, check_device_memory, make_plan_values, reach_speed
from pi2.progress import Progress, ignore_progress

_CHUNK = 256
"""Tokens of a chunk of a unit with the whole model."""
_PROMPTS_WORTH = 0.03
"""Part of a token's time that prompts on another unit are worth."""
_SPARE = 1.1
"""Memory relative to the fastest plan of the search in which nothing is in the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPlan:
    """A plan's values, and its expected speed and memory."""

    wish: Wish
    resolved: ResolvedPlan
    cost: Cost
    full_tokens_s: float | None = None
    """Speed once the context is full: there is more to attend to, and nothing left to lend."""
    decisions: tuple[Decision, ...] = ()
    """Settings that were tried around the search's plan."""
    left_out: tuple[str, ...] = ()
    """A sentence for each unit that the plan does not use, and why."""
    others: tuple["PlannedPlan", ...] | None = None
    """The best plans with other distances of neurons; None for a unit with the whole model."""

    @property
    def values(self) -> dict[str, Any]:
        """What the plan states, by key."""
        return self.resolved.plan.model_dump(exclude_unset=True)

    @property
    def promised_tokens_s(self) -> float:
        """Tokens per second at the low end of the range."""
        return self.cost.range_tokens_s.low


USUAL_LIMITS = 12
"""Memory limits that are tried for a speed."""


def plan(wish: Wish, progress: Progress = ignore_progress) -> PlannedPlan:
    """The best plan; UserError P350 if there is none, P351 for missing figures."""
    progress("planning", 0.0)
    if wish.tokens_s is None:
        check_device_memory(wish)
        return _plan_within(wish, progress)
    problem = pose_problem(replace(wish, memory_bytes=None, tokens_s=None), _read_rates(wish))
    tried, posed = itertools.count(1), Posed()

    def plan_next(own: Wish) -> PlannedPlan:
        found, number = _plan_within(own, posed=posed), next(tried)
        label = f"planning, {number} of about {USUAL_LIMITS} memory limits"
        progress(label, min(number / USUAL_LIMITS, 0.95))
        return found

    return reach_speed(wish, plan_next, find_bounds(problem))


def find_bounds(problem: Problem) -> tuple[int, int]:
    """The least memory of any plan, and one in which everything fits."""
    size, least = find_least(problem)
    choices = replace(least, kv=problem.kv_types[0], embedding="resident", chunk=problem.chunks[-1])
    whole = fit_plan(problem.resolve_even(choices, 1.0), None)
    return size, int(whole.plan.memory.budget * _SPARE)


Posed = dict[tuple[BundleLayout, bool], Problem]
"""Problems by bundle, and whether another unit has a part: the same for all memories and speeds."""


def _plan_within(
    wish: Wish, progress: Progress = ignore_progress, posed: Posed | None = None
) -> PlannedPlan:
    whole = _plan_whole(wish)
    try:
        divided = _plan_divided(wish, progress, {} if posed is None else posed)
    except UserError:
        # Whatever the processor lacks, it is not needed.
        if whole is None or score_plan(whole)[0] > 0.0:
            raise
        return whole
    if whole is None or score_plan(divided) <= score_plan(whole):
        return divided
    others = ((f"{whole.resolved.sparse_unit} alone", whole), ("the CPU and another unit", divided))
    speeds = tuple((name, item.cost.tokens_s) for name, item in others)
    decision = Decision(key="layers.split", chosen=others[0][0], tokens_s=speeds)
    return replace(whole, decisions=(decision,))


def _plan_whole(wish: Wish) -> PlannedPlan | None:
    """The best plan whose GPU or NPU has the whole model; None where it has no room for it."""
    bundle = list_bundles(wish.device, wish.model, read_stored(wish.store))[0]
    every: PredictorMode = "none" if wish.model.moe is None else "router"
    modes = dict.fromkeys((*list_predictors(wish)[0], every))
    types: tuple[KvType, ...] = ("fp16",) if wish.exact else ("fp16", "int8")
    found: list[PlannedPlan] = []
    for name, unit in wish.device.units.items():
        backend = list_usual_backends().get(unit.kind)
        if unit.memory is None or unit.emulated or backend is None:
            continue
        if find_whole_backend(backend) is None:
            continue
        try:
            rates = read_whole_rates(wish.device, name)
        except UserError:
            continue
        for predictor, kv in itertools.product(modes, types):
            chunk = min(_CHUNK, wish.context)
            values = make_plan_values(wish, predictor=predictor, kv=kv, chunk=chunk, bundle=bundle)
            values["backends"] = {unit.kind: backend}
            values["layers"] = {"split": {name: 1.0}, "hot": 1.0}
            if (resolved := _fit_whole(wish, name, values)) is not None:
                cost = cost_resolved(resolved, rates, store=wish.store)
                found.append(PlannedPlan(wish=wish, resolved=resolved, cost=cost))
    if not found:
        return None
    best = min(found, key=score_plan)
    rates = read_whole_rates(wish.device, best.resolved.sparse_unit)
    return finish_plan(wish, best.resolved, rates)


def _fit_whole(wish: Wish, name: str, values: dict[str, Any]) -> ResolvedPlan | None:
    """Fit the plan's memories to their needs; None if too large, or not computable."""
    resolved = resolve_values(values, wish.device, wish.model)
    backend = find_whole_backend(resolved.name_backend(name))
    assert backend is not None
    if backend.find_limits(describe_unit(resolved, name)):
        return None
    need = round_segment(count_unit_needs(resolved)[name].bytes)
    if need > (wish.find_unit_memory(name) or 0):
        return None
    fitted = fit_plan(resolved, None)
    is_large = fitted.plan.memory.budget > (wish.memory_bytes or inf)
    return None if is_large else fitted


def _plan_divided(wish: Wish, progress: Progress, posed: Posed) -> PlannedPlan:
    rates = _read_rates(wish)
    problems: list[Problem] = []
    best: list[PlannedPlan] = []
    bundles = list_bundles(wish.device, wish.model, read_stored(wish.store))
    units = [rates]
    if rates.dense is not None:
        # Using it costs a start in every layer.
        units.append(replace(rates, dense=None))
    for bundle in bundles:
        found: list[PlannedPlan] = []
        for choice in units:
            progress("planning", len(problems) / (len(bundles) * len(units)))
            key = bundle, choice.dense is not None
            if key not in posed:
                posed[key] = pose_problem(wish, choice, bundle)
            problem = replace(posed[key], wish=wish)
            problems.append(problem)
            if (planned := _solve(problem)) is not None:
                found.append(planned)
        if found:
            chosen = min(found, key=score_plan)
            other = next((item for item in found if item is not chosen), None)
            left_out = tuple(_list_left_out(wish, chosen, other))
            best.append(replace(chosen, left_out=left_out))
    if not best:
        raise _explain_impossible(problems[0])
    return _choose_layout(best)


def _read_rates(wish: Wish) -> Rates:
    rates = read_rates(wish.device, wish.model.shape.stored_hidden)
    if wish.objective == "energy":
        check_power(rates, wish.device)
    return rates


def _choose_layout(plans: Sequence[PlannedPlan]) -> PlannedPlan:
    """The best plan over layouts; the store's or the converter's layout is preferred."""
    stored = read_stored(plans[0].wish.store)

    def score(item: PlannedPlan) -> tuple[float, float]:
        slow, value = score_plan(item)
        if needs_rewriting(item.resolved.bundle, stored):
            value *= 1.0 + REWRITE_GAIN
        return slow, value

    chosen = min(plans, key=score)
    return replace(chosen, others=tuple(item for item in plans if item is not chosen))


def _list_left_out(wish: Wish, chosen: PlannedPlan, other: PlannedPlan | None) -> Iterator[str]:
    """Why units next to the CPU have nothing to do; ``other``: a plan with the known unit."""
    known = read_rates(wish.device, wish.model.shape.stored_hidden).dense
    for name, unit in wish.device.units.items():
        if unit.kind == "cpu" or name in chosen.resolved.dense_units:
            continue
        place = f"units.{name}" + (".memory" if unit.memory is not None else "")
        if unit.emulated:
            why = "it is emulated by the CPU's own cores"
        elif known is None or known.name != name:
            why = f"the device states no {place}.read_bandwidth, the rate at which it reads weights"
            if known is not None and unit.read_bandwidth is not None:
                why = f"a plan has one unit next to the CPU, and {known.name} comes first"
        elif other is None:
            why = "no plan with it fits into this memory"
        else:
            speed = approximate_number(other.cost.tokens_s)
            why = f"with it {speed} tokens/s are predicted, as it has to be started in every layer"
        yield f"{name} is left out: {why}."


def score_plan(item: PlannedPlan) -> tuple[float, float]:
    """How far a plan is from its wish's speed, then from what the wish wants; less is better."""
    wish, cost = item.wish, item.cost
    slow = max((wish.tokens_s or 0.0) - item.promised_tokens_s, 0.0)
    if wish.saves_memory:
        return slow, float(item.resolved.plan.memory.budget) + cost.token_s
    # Prompts are many times faster with another unit.
    worth = _PROMPTS_WORTH * any(layer.dense_s > 0.0 for layer in cost.layers)
    return slow, wish.weigh(cost) * (1.0 - worth * (wish.objective != "energy"))


def _solve(problem: Problem) -> PlannedPlan | None:
    """The best plan of a problem, refined; None if there is none."""
    wish = problem.wish
    memory = find_least(problem)[0] if wish.saves_memory else wish.memory_bytes
    if memory is None or memory > (wish.memory_bytes or memory):
        return None
    # One for each way to find neurons.
    near = [
        PlannedPlan(wish=wish, resolved=resolved, cost=problem.find_cost(resolved))
        for resolved in find_best(problem, memory)
    ]
    if not near:
        return None
    resolved, decisions = refine_plan(problem, min(near, key=score_plan).resolved)
    activity = problem.activities[resolved.plan.decode.predictor]
    found = finish_plan(wish, resolved, problem.rates, activity=activity)
    return replace(found, decisions=decisions)


def finish_plan(
    wish: Wish, resolved: ResolvedPlan, rates: Rates | None = None, **known: Any
) -> PlannedPlan:
    """The plan with its ranges, and its speed once the context is full."""
    known = {"store": wish.store, **known}
    full = cost_resolved(resolved, rates, position=wish.context, **known)
    return PlannedPlan(
        wish=wish,
        resolved=resolved,
        cost=cost_plan(resolved, rates, **known),
        full_tokens_s=full.tokens_s,
    )


WITHOUT = "none"


def choose_thresholds(planned: PlannedPlan) -> PlannedPlan:
    """The faster of an MoE model's plan and the same with the wish's thresholds, if they fit."""
    wish, cost = planned.wish, planned.cost
    is_whole = cost.inputs.rates.whole_unit is not None
    if wish.thresholds is None or wish.model.moe is None or is_whole:
        return planned
    if cost.settings.predictor != "router":
        return planned
    found = [(WITHOUT, planned)]
    plan = planned.resolved.plan
    stated = wish.thresholds.describe_use(wish.thresholds_file)
    changes = {
        "sparsity": Sparsity.model_validate(stated),
        "decode": plan.decode.model_copy(update={"predictor": "gate", "look_ahead": "none"}),
    }
    wanted = replace(planned.resolved, plan=plan.model_copy(update=changes))
    with suppress(Shortage):
        fitted = fit_plan(replace(wanted, thresholds=wish.thresholds), plan.memory.budget)
        own = finish_plan(wish, fitted)
        own = replace(own, left_out=planned.left_out, others=planned.others)
        found.append(("all gates in memory", own))
    found.sort(key=lambda item: score_plan(item[1]))
    chosen, best = found[0]
    decision = Decision(
        key="sparsity",
        chosen=chosen,
        tokens_s=tuple((label, item.cost.tokens_s) for label, item in found),
    )
    return replace(best, decisions=(*planned.decisions, decision))


def trace_pareto(
    wish: Wish, points: int, *, most_bytes: int | None = None, progress: Progress = ignore_progress
) -> list[PlannedPlan]:
    """Best plans between the least memory and ``most_bytes``; UserError P350 if nothing fits."""
    progress("planning", 0.0)
    problem = pose_problem(replace(wish, memory_bytes=None, tokens_s=None), _read_rates(wish))
    low, high = find_bounds(problem)
    if most_bytes is not None:
        if low > most_bytes:
            raise _explain_impossible(replace(problem, wish=replace(wish, memory_bytes=most_bytes)))
        high = min(high, most_bytes - MIB)
    found = []
    for number in range(points):
        limit = low + (high - low) * number / max(points - 1, 1)
        size = round_up(int(limit), MIB)
        found.append(plan(replace(problem.wish, memory_bytes=size)))
        progress(f"planning, {number + 1} of {points} memory limits", (number + 1) / points)
    return found


def _explain_impossible(problem: Problem) -> UserError:
    """P350 with the limit in the way and the nearest possible wishes; P351 if reads are unknown."""
    wish = problem.wish
    if problem.rates.flash is None:
        check_flash(problem.rates, wish.device)
    needed, least = find_least(problem)
    needs = problem.find_frame(least, whole=False).resolved.needs
    runtime_bytes = count_runtime(wish.model, wish.memory_bytes or 0)
    embedding = ", embedding" if least.embedding == "resident" else ""
    notes = [
        f"attention, norms, head{embedding}: {approximate_bytes(needs.attention.bytes)}",
        f"KV cache of {wish.context} tokens: {approximate_bytes(needs.kv.bytes)} ({least.kv})",
        f"finding active neurons ({least.predictor}): {approximate_bytes(needs.predictor.bytes)}",
        f"workspace: {approximate_bytes(needs.workspace.bytes)}",
        f"Python and libraries: {approximate_bytes(runtime_bytes)}",
    ]
    has, needs_text = compare_bytes(wish.memory_bytes or 0, needed)
    return UserError.of(
        "P350",
        f"{has} is not enough: every plan needs at least {needs_text}",
        help=f"--memory '{write_least(needed)}', or a --context below {wish.context}",
        notes=notes,
    )
