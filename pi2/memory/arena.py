"""What a plan's segments for neurons become: the arena, the cache over it, what the context lends,
and the staging buffers."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from pi2.memory.budget import Budget
from pi2.memory.cache import NeuronCache
from pi2.memory.frequency import expect_uses
from pi2.memory.lending import ContextLoan, ContextMemory
from pi2.plan.resolve import ResolvedPlan
from pi2.plan.sizes import STAGED_NEURONS

U8 = npt.NDArray[np.uint8]


def allocate_cache(
    resolved: ResolvedPlan, budget: Budget, *, by_hotness: bool = False
) -> NeuronCache:
    """One arena for hot and cold neurons; the cold cache takes all of its segment."""
    stride = resolved.bundle.stride
    hot = [layer.hot_neurons for layer in resolved.layers]
    neurons = resolved.model.layer_neurons
    cold_slots, most_slots = count_cold_slots(resolved)
    sizes = {"hot": sum(hot) * stride, "cold": cold_slots * stride}
    arena = budget.allocate_spanning(
        sizes, reserved_bytes=(most_slots - cold_slots) * stride
    ).reshape(-1, stride)
    # Only an order by hotness tells beforehand which neurons will be used often.
    expected = expect_uses(len(hot), neurons) if by_hotness else None
    policy = resolved.plan.cache.policy
    return NeuronCache(
        arena,
        hot,
        neurons,
        policy=policy,
        expected=expected,
        give_back=budget.give_back,
    )


def count_cold_slots(resolved: ResolvedPlan) -> tuple[int, int]:
    """Cold slots of the segment, and with what the context lends while it is empty."""
    neurons = resolved.model.layer_neurons
    absent = sum(neurons - layer.hot_neurons for layer in resolved.layers)
    stride = resolved.bundle.stride
    cold = min(resolved.plan.memory.segments.cold // stride, absent)
    if not resolved.plan.kv.lend:
        return cold, cold
    return cold, min(cold + describe_context(resolved).count_unused(0) // stride, absent)


def describe_context(resolved: ResolvedPlan) -> ContextMemory:
    """What keys and values take of their segment."""
    shape = resolved.model.shape
    # Keys and values, and the scales of either.
    kinds = 4 if resolved.plan.kv.type == "int8" else 2
    return ContextMemory(
        total_bytes=resolved.needs.kv.bytes,
        context=resolved.plan.kv.context,
        runs=kinds * shape.layers * shape.kv_heads,
    )


def make_loan(resolved: ResolvedPlan, cache: NeuronCache, budget: Budget) -> ContextLoan | None:
    """What the context lends, where the plan says so and there are neurons to lie in it."""
    cold_slots, most_slots = count_cold_slots(resolved)
    if most_slots == cold_slots:
        return None
    budget.use_small_pages("kv")
    return ContextLoan(
        cache,
        describe_context(resolved),
        cold_slots=cold_slots,
        most_slots=most_slots,
        release=partial(budget.release, "kv"),
    )


def allocate_staging(resolved: ResolvedPlan, budget: Budget) -> U8:
    """Two buffers [2, n, stride] for neurons that stream from flash."""
    count = min(resolved.model.layer_neurons, STAGED_NEURONS)
    stride = resolved.bundle.stride
    return budget.allocate("workspace", 2 * count * stride).reshape(2, count, stride)
