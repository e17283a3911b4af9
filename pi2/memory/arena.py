"""What a plan's segments for neurons become: the arena, the cache over it, what the context lends,
and the staging buffers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pi2.arrays import I32, U8
from pi2.diagnostics import UserError
from pi2.memory.budget import Budget
from pi2.memory.cache import NeuronCache
from pi2.memory.context import describe_context
from pi2.memory.frequency import expect_uses
from pi2.memory.granules import choose_granule
from pi2.memory.lending import ContextLoan
from pi2.plan.arithmetic.resolved import ResolvedLayer, ResolvedPlan
from pi2.plan.arithmetic.sizes import count_staged_neurons


def allocate_cache(
    resolved: ResolvedPlan,
    budget: Budget,
    *,
    by_hotness: bool = False,
    alone: bool = False,
    granule: int = 1,
) -> NeuronCache:
    """Make one arena for hot and cold neurons; the cold cache takes all of its segment.

    ``alone``: the sparse unit computes what dense units own, too, which lies here then instead of
    there, if they use main memory.  UserError P610 where there is no room for it.
    ``granule``: neurons that share a slot (`find_granule`).
    """
    stride = resolved.bundle.stride * granule
    ranges = [_find_hot(resolved, layer, alone) for layer in resolved.layers]
    hot, first = [len(own) // granule for own in ranges], [own.start for own in ranges]
    neurons = resolved.model.layer_neurons
    cold_slots, most_slots = count_cold_slots(resolved, granule)
    if not cold_slots and any(first) and alone and resolved.plan.decode.predictor != "none":
        raise UserError.of(
            "P610",
            "neurons of units with memory of their own are computed by "
            f"{resolved.sparse_unit!r} to be observed, and segment 'cold' has no room for them",
            help="raise memory.segments.cold, or give all of layers.split to "
            f"{resolved.sparse_unit!r}",
        )
    sizes = {"hot": sum(hot) * stride, "cold": cold_slots * stride}
    reserved = most_slots - cold_slots
    arena = budget.allocate_spanning(sizes, reserved_bytes=reserved * stride).reshape(
        -1, resolved.bundle.stride
    )
    # Only an order by hotness tells beforehand which neurons will be used often.
    expected = expect_uses(len(hot), neurons // granule) if by_hotness else None
    policy = resolved.plan.cache.policy
    return NeuronCache(
        arena,
        hot,
        neurons,
        first_hot=first,
        policy=policy,
        expected=expected,
        give_back=budget.give_back,
        granule=granule,
    )


def find_granule(resolved: ResolvedPlan, grouped: Sequence[I32] | None) -> int:
    """Neurons that share a slot of the cache: neighbours of one expert, where a router names
    experts; ``grouped`` has every layer's stored indices, expert by expert.

    One by one, they go to and from units.
    """
    plan = resolved.plan
    if plan.decode.predictor != "router" or grouped is None:
        return 1
    granule = choose_granule(grouped, resolved.model.expert_count, resolved.bundle.stride)
    in_whole = all(
        layer.dense is None and layer.hot_neurons % granule == 0 for layer in resolved.layers
    )
    return granule if in_whole else 1


def _find_hot(resolved: ResolvedPlan, layer: ResolvedLayer, alone: bool) -> range:
    """Stored indices of the layer's hot neurons that lie in the arena."""
    if resolved.has_whole_unit:
        return range(layer.hot_neurons, layer.hot_neurons)
    if alone and layer.dense is not None and resolved.name_segment(layer.dense.unit) == "hot":
        return range(layer.hot_neurons)
    return layer.own_hot


def count_neurons_at_risk(resolved: ResolvedPlan) -> int:
    """Neurons of units that the run goes on without when they are lost: they are cold then."""
    return sum(
        layer.own_hot.start
        for layer in resolved.layers
        if layer.dense is not None and resolved.goes_on_without(layer.dense.unit)
    )


def _count_streamed(resolved: ResolvedPlan) -> int:
    """Neurons that stream by in whole layers, beside layers whose named neurons are cached: no slot
    is for them."""
    if not resolved.named_layers:
        return 0
    layers = (resolved.layers[number] for number in resolved.whole_layers)
    return sum(resolved.model.layer_neurons - layer.hot_neurons for layer in layers)


def count_cold_slots(resolved: ResolvedPlan, granule: int = 1) -> tuple[int, int]:
    """Cold slots of the segment, each for ``granule`` neurons, and with what the context lends
    while it is empty."""
    neurons = resolved.model.layer_neurons
    absent = sum(neurons - layer.hot_neurons for layer in resolved.layers)
    absent += count_neurons_at_risk(resolved) - _count_streamed(resolved)
    absent //= granule
    stride = resolved.bundle.stride * granule
    cold = min(resolved.plan.memory.segments.cold // stride, absent)
    if not resolved.plan.kv.lend:
        return cold, cold
    return cold, min(cold + describe_context(resolved).count_unused(0) // stride, absent)


def make_loan(resolved: ResolvedPlan, cache: NeuronCache, budget: Budget) -> ContextLoan | None:
    """What the context lends, where the plan says so and there are neurons to lie in it."""
    cold_slots, most_slots = count_cold_slots(resolved, cache.granule)
    if most_slots == cold_slots:
        return None
    budget.use_small_pages("kv")
    return ContextLoan(
        cache,
        describe_context(resolved),
        cold_slots=cold_slots,
        release=partial(budget.release, "kv"),
        never_wanted=sum(layer.own_hot.start for layer in resolved.layers)
        + _count_streamed(resolved)
        - count_neurons_at_risk(resolved),
    )


def allocate_staging(resolved: ResolvedPlan, budget: Budget) -> U8:
    """Two buffers [2, n, stride] for neurons that stream from flash."""
    count = count_staged_neurons(resolved)
    stride = resolved.bundle.stride
    return budget.allocate("workspace", 2 * count * stride).reshape(2, count, stride)
