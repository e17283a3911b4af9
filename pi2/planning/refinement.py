"""Choices out of a few that no line describes, tried around the program's plan with the cost model.

How many threads compute, with which engine and in how large parts neurons are read: what they cost
depends on how many neurons are missing, which the program has just found out.  They are changed one
after the other until no change helps.  What the others would have made is kept: it is the reason.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pi2.costs.activity import LOOK_AHEAD_MODES
from pi2.costs.cost import Cost, cost_resolved
from pi2.plan.arithmetic.fitting import Shortage, fit_plan, write_memory
from pi2.plan.arithmetic.sizes import find_block_bytes
from pi2.plan.documents.quantities import round_size
from pi2.plan.weights.layout import round_up
from pi2.planning.problem import Problem
from pi2.planning.resolving import resolve_values

CLUSTERS = (64, 32, 128, 16, 256)
"""Fewest neurons that are read and computed together; of equal ones the first is taken."""
MERGE_GAPS = (0, 1, 2, 3)
"""Most unwanted neurons between two that are read with them."""
_ROUNDS = 2
_LEAST_GAIN = 1e-4

Values = dict[str, Any]
Score = Callable[[Cost], float]
"""Score of a plan among plans with the same memory; less is better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A setting that was chosen out of a few, and what each of them would make."""

    key: str
    chosen: str
    tokens_s: tuple[tuple[str, float], ...]
    """Speed predicted with each, the best one first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    label: str
    changes: Mapping[str, Mapping[str, Any]]
    """Tables of a plan, and the keys that are replaced."""


def refine_values(
    problem: Problem, values: Values, score: Score
) -> tuple[Values, Cost, tuple[Decision, ...]]:
    """The best of the plans that differ from ``values`` in these settings only."""
    best, cost = values, _cost(problem, values)
    decisions: dict[str, Decision] = {}
    for _ in range(_ROUNDS):
        before = score(cost)
        for key, options in _list_dimensions(problem, best, cost):
            tried = []
            for option in options:
                changed = _apply(best, option)
                tried.append((option, changed, _cost(problem, changed)))
            ranked = sorted(tried, key=lambda item: score(item[2]))
            winner = ranked[0]
            if score(winner[2]) < score(cost) * (1.0 - _LEAST_GAIN) or key not in decisions:
                best, cost = winner[1], winner[2]
            chosen = next((o.label for o, changed, _ in ranked if changed == best), "")
            decisions[key] = Decision(
                key=key,
                chosen=chosen or winner[0].label,
                tokens_s=tuple((o.label, found.tokens_s) for o, _, found in ranked),
            )
        if score(cost) >= before * (1.0 - _LEAST_GAIN):
            break
    return best, cost, tuple(decisions.values())


def list_whole(problem: Problem, values: Values) -> Iterator[Values]:
    """Plans with every neuron hot, which saves looking for them in a cache: for each type of keys
    and values that of the longest pieces of prompts for which there is room.

    The program has no line for this saving: its shares of neurons that stay are those of plans with
    a cache.  Nothing is given where all of them are hot already, or the memory is not limited.
    """
    if problem.wish.memory_bytes is None or values["layers"]["hot"] >= 1.0:
        return
    layers = values["layers"]
    overrides = [{**item, "hot": 1.0} for item in layers.get("overrides", ()) if "split" in item]
    for kv in problem.kvs:
        best: Values | None = None
        for tokens in sorted({item.tokens for item in problem.chunks}):
            found = copy.deepcopy(values)
            found["layers"] = {**layers, "hot": 1.0, "overrides": overrides}
            found["kv"].pop("lend", None)
            found["kv"]["type"] = kv.type
            found["prefill"]["chunk"] = tokens
            found["decode"]["look_ahead"] = "none"
            found["decode"].pop("leave_out", None)
            if not _fit_whole(problem, found):
                # Longer ones need more room.
                break
            best = found
        if best is not None:
            yield best


def _fit_whole(problem: Problem, values: Values) -> bool:
    """Give a plan its memory and say whether all its neurons stay hot within it."""
    wish = problem.wish
    assert wish.memory_bytes is not None
    try:
        resolved = resolve_values(values, wish.device, wish.model)
        fitted = fit_plan(resolved, round_size(wish.memory_bytes)).plan
    except Shortage:
        return False
    values["memory"] |= write_memory(fitted)
    values["layers"] = fitted.layers.model_dump(exclude_unset=True)
    shares = [fitted.layers.hot, *(item.hot for item in fitted.layers.overrides)]
    return all(share is None or share >= 1.0 for share in shares)


def _list_dimensions(
    problem: Problem, values: Values, cost: Cost
) -> Iterator[tuple[str, Sequence[_Option]]]:
    """Settings that matter to this plan."""
    cores = problem.rates.cores
    counts = sorted({cores, max(cores - 1, 1), max(cores // 2, 1)}, reverse=True)
    if len(counts) > 1:
        yield (
            "threads.compute",
            [
                _Option(label=str(count), changes={"threads": {"compute": count}})
                for count in counts
            ],
        )
    if cost.hit_rate >= 1.0 or all(layer.read_s == 0.0 for layer in cost.layers):
        return
    if problem.look_aheads != ("none",) and cost.predictor in LOOK_AHEAD_MODES:
        yield (
            "decode.look_ahead",
            [
                _Option(label=item, changes={"decode": {"look_ahead": item}})
                for item in problem.look_aheads
            ],
        )
    if cost.predictor == "low-rank" and _has_two_reads(problem, values):
        yield (
            "pipeline.phases",
            [_Option(label=str(n), changes={"pipeline": {"phases": n}}) for n in (1, 2)],
        )
    ios = problem.ios
    yield (
        "io.engine",
        [
            _Option(
                label=f"{io.engine}, {io.threads} thread{'s' * (io.threads > 1)}"
                if io.engine == "pread"
                else f"{io.engine}, {io.depth} deep",
                changes={
                    "io": {
                        "engine": io.engine,
                        # With a queue, half of the parts that a layer's reads are divided into.
                        "threads": max(io.threads, 4) if io.engine == "io_uring" else io.threads,
                        "depth": io.depth,
                    }
                },
            )
            for io in ios
        ],
    )
    if cost.predictor == "low-rank" and problem.by_expert:
        yield (
            "io.merge_gap",
            [_Option(label=str(gap), changes={"io": {"merge_gap": gap}}) for gap in MERGE_GAPS],
        )
    yield (
        "pipeline.cluster",
        [_Option(label=str(size), changes={"pipeline": {"cluster": size}}) for size in CLUSTERS],
    )


def _has_two_reads(problem: Problem, values: Values) -> bool:
    """Whether a neuron may be read in two parts: where its gate ends in an earlier block, by an
    engine that other units need as well; pi2's own reads it at once."""
    units = problem.wish.device.units
    layers = values["layers"]
    splits = [layers["split"], *(item.get("split", {}) for item in layers.get("overrides", ()))]
    if all(units[name].kind == "cpu" for split in splits for name in split):
        return False
    bundle = problem.bundle
    block = find_block_bytes(problem.wish.device)
    return bundle.is_gated and round_up(bundle.first_bytes, block) < bundle.stride


def _apply(values: Values, option: _Option) -> Values:
    changed = copy.deepcopy(values)
    for table, keys in option.changes.items():
        changed.setdefault(table, {}).update(keys)
    return changed


def _cost(problem: Problem, values: Values) -> Cost:
    wish = problem.wish
    resolved = resolve_values(values, wish.device, wish.model)
    activity = problem.activities[resolved.plan.decode.predictor]
    return cost_resolved(resolved, problem.rates, store=wish.store, activity=activity)
