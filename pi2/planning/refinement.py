"""Choices that the search leaves open or only estimates, tried with the cost model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pi2.costs.activity import LOOK_AHEAD_MODES
from pi2.costs.cost import Cost
from pi2.costs.reads import PAGE_BYTES
from pi2.costs.settings import StoredLayout
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.sizes import DEFAULT_BLOCK_BYTES, find_block_bytes
from pi2.plan.documents.device import Device
from pi2.plan.documents.model import Model
from pi2.plan.documents.quantities import approximate_bytes, approximate_number, format_bytes
from pi2.plan.weights.layout import BundleLayout, round_up
from pi2.planning.search import Problem

if TYPE_CHECKING:
    from pi2.planning.planner import PlannedPlan

MOST_PADDING = 1.25
"""Ratio of a page's to a block's distance that is not worth a plan: small neurons."""
LEAST_SAVING = 0.2
"""Share of the distance that separate scales must save: with 1/7, a 7B plan ran no faster."""
REWRITE_GAIN = 0.02
"""Share by which a plan must be faster before an existing store is to be rewritten."""


def list_bundles(device: Device, model: Model, stored: StoredLayout | None) -> list[BundleLayout]:
    """Layouts the device can read: inline scales, and resident ones if they save `LEAST_SAVING`."""
    block = find_block_bytes(device)
    strides = _list_strides(device, model, stored)
    used = model.lay_out_bundle(scales="resident").used_bytes
    apart = set[int]()
    if round_up(used, block) <= (1.0 - LEAST_SAVING) * strides[0]:
        apart.add(round_up(used, block))
    if stored is not None and stored.scales == "resident" and stored.stride % block == 0:
        apart.add(stored.stride)
    bundles = [model.lay_out_bundle(stride) for stride in strides]
    if bundles[0].scales == "resident":
        # Stores know no other place for them.
        return bundles
    return bundles + [model.lay_out_bundle(stride, "resident") for stride in sorted(apart)]


def needs_rewriting(bundle: BundleLayout, stored: StoredLayout | None) -> bool:
    """Whether a store must be rewritten for this layout; a new one takes any stride."""
    if stored is None:
        return bundle.scales == "resident" and not bundle.parts[-1].spread
    return (bundle.stride, bundle.scales) != (stored.stride, stored.scales)


def _list_strides(device: Device, model: Model, stored: StoredLayout | None) -> list[int]:
    """Distances of bundles with their scales that the device can read, the smallest first."""
    used, block = model.lay_out_bundle().used_bytes, find_block_bytes(device)
    least = round_up(used, block)
    found = {least}
    paged = round_up(used, PAGE_BYTES)
    if paged % block == 0 and paged <= MOST_PADDING * least:
        found.add(paged)
    usual = model.lay_out_bundle().scales
    has = 0 if stored is None or stored.scales != usual else stored.stride
    if has >= used and has % block == 0:
        found.add(has)
    return sorted(found)


def describe_layout(planned: PlannedPlan, stored: StoredLayout | None) -> Iterator[str]:
    """The distance that was chosen, what others would make, and what the store has."""
    wish, bundle, cost = planned.wish, planned.resolved.bundle, planned.cost
    block, chosen, used = find_block_bytes(wish.device), bundle.stride, bundle.used_bytes
    store = f"stores/{wish.model.id}" if wish.store is None else str(wish.store)
    why = f"the least multiple of the device's {format_bytes(block)} blocks"
    if chosen % PAGE_BYTES == 0 and block < PAGE_BYTES:
        why = "whole pages of flash"
    if stored is not None and (stored.stride, stored.scales) == (chosen, bundle.scales):
        why += ", as in the store"
    without = "" if bundle.scales == "inline" else " Their scales are apart, in memory."
    yield (
        f"Bundles: neurons lie {format_bytes(chosen)} apart, {used} bytes are used: {why}.{without}"
    )
    if planned.others:
        places = {"inline": "", "resident": " with scales in memory"}
        shown = "; ".join(
            f"{format_bytes(item.resolved.bundle.stride)} apart"
            f"{places[item.resolved.bundle.scales]} makes "
            f"{approximate_number(item.cost.tokens_s)} tokens/s in "
            f"{approximate_bytes(item.cost.memory_bytes)}"
            for item in planned.others
        )
        yield f"The best plan with neurons {shown}."
    usual = round_up(used, DEFAULT_BLOCK_BYTES)
    has = usual if stored is None else stored.stride
    scales = wish.model.lay_out_bundle().scales if stored is None else stored.scales
    if scales != bundle.scales:
        who = "`pi2 convert` leaves scales" if stored is None else "The store has its scales"
        place = "in the bundles" if scales == "inline" else "in files of their own"
        yield (
            f"{who} {place}: `pi2 store repack {store} --scales {bundle.scales} "
            f"--stride '{format_bytes(chosen)}'` changes that."
        )
    elif has != chosen:
        who = "`pi2 convert` puts them" if stored is None else "The store has them"
        yield (
            f"{who} {format_bytes(has)} apart: `pi2 store repack {store} --stride "
            f"'{format_bytes(chosen)}'` changes that."
        )
    if stored is not None and stored.order == "index":
        yield (
            "The store's neurons lie as in the checkpoint, hot or not: `pi2 store reorder "
            f"{store} --by hotness --statistics STATS` puts the most active ones first."
        )
    names = wish.model.moe is not None and cost.settings.predictor != "none"
    if stored is not None and stored.order == "hotness" and names and cost.hit_rate < 1.0:
        yield (
            "In the store the experts lie mixed: `pi2 store reorder "
            f"{store} --by expert` puts each expert's neurons together for "
            "fewer reads."
        )


CLUSTERS = (64, 32, 128, 16, 256)
"""Fewest neurons that are read and computed together; of equal ones the first is taken."""
MERGE_GAPS = (0, 1, 2, 3)
"""Most unwanted neurons between two that are read with them."""
_ROUNDS = 2
_LEAST_GAIN = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A setting that was chosen out of a few, and what each of them would make."""

    key: str
    chosen: str
    tokens_s: tuple[tuple[str, float], ...]
    """Speed predicted with each, the best one first."""


_Options = Sequence[tuple[str, Mapping[str, Any]]]
"""Names of choices, and the keys of a table of a plan that each replaces."""


def refine_plan(
    problem: Problem, resolved: ResolvedPlan
) -> tuple[ResolvedPlan, tuple[Decision, ...]]:
    """The best of the plans that differ from ``resolved`` in these settings only."""
    known: dict[str, Cost] = {}
    score = problem.wish.weigh

    def find_cost(resolved: ResolvedPlan) -> Cost:
        key = resolved.plan.model_dump_json()
        if key not in known:
            known[key] = problem.find_cost(resolved)
        return known[key]

    best, cost = resolved, find_cost(resolved)
    decisions: dict[str, Decision] = {}
    for _ in range(_ROUNDS):
        before = score(cost)
        for key, options in _list_dimensions(problem, best, cost):
            tried = []
            for label, keys in options:
                name = key.partition(".")[0]
                table = getattr(best.plan, name).model_copy(update=keys)
                changed = replace(best, plan=best.plan.model_copy(update={name: table}))
                tried.append((label, changed, find_cost(changed)))
            ranked = sorted(tried, key=lambda item: score(item[2]))
            chosen, changed, found = ranked[0]
            if score(found) < score(cost) * (1.0 - _LEAST_GAIN) or key not in decisions:
                best, cost = changed, found
            decisions[key] = Decision(
                key=key,
                chosen=next((x for x, own, _ in ranked if own.plan == best.plan), chosen),
                tokens_s=tuple((label, found.tokens_s) for label, _, found in ranked),
            )
        if score(cost) >= before * (1.0 - _LEAST_GAIN):
            break
    return best, tuple(decisions.values())


def _list_dimensions(
    problem: Problem, resolved: ResolvedPlan, cost: Cost
) -> Iterator[tuple[str, _Options]]:
    cores = problem.rates.cores
    counts = sorted({cores, max(cores - 1, 1), max(cores // 2, 1)}, reverse=True)
    if len(counts) > 1:
        yield _offer("threads.compute", counts)
    if cost.hit_rate >= 1.0 or all(layer.read_s == 0.0 for layer in cost.layers):
        return
    predictor = cost.settings.predictor
    if problem.look_aheads != ("none",) and predictor in LOOK_AHEAD_MODES:
        yield _offer("decode.look_ahead", problem.look_aheads)
    if predictor == "low-rank" and _has_two_reads(resolved):
        yield _offer("pipeline.phases", (1, 2))
    ios = []
    for io in problem.ios:
        label, threads = f"{io.engine}, {io.threads} thread{'s' * (io.threads > 1)}", io.threads
        if io.engine == "io_uring":
            # With a queue, half of the parts that a layer's reads are divided into.
            label, threads = f"{io.engine}, {io.depth} deep", max(io.threads, 4)
        ios.append((label, {**io.write(), "threads": threads}))
    yield "io.engine", ios
    if predictor == "low-rank" and problem.by_expert:
        yield _offer("io.merge_gap", MERGE_GAPS)
    yield _offer("pipeline.cluster", CLUSTERS)


def _offer(key: str, values: Sequence[int | str]) -> tuple[str, _Options]:
    return key, [(str(value), {key.partition(".")[2]: value}) for value in values]


def _has_two_reads(resolved: ResolvedPlan) -> bool:
    """Whether a neuron may be read in two parts by an engine that other units need as well."""
    bundle, block = resolved.bundle, find_block_bytes(resolved.device)
    is_cut = bundle.is_gated and round_up(bundle.first_bytes, block) < bundle.stride
    return is_cut and bool(resolved.dense_units)
