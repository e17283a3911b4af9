"""The arena, the neuron cache over it, and context memory lent to it until tokens need it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pi2.arrays import U8
from pi2.diagnostics import UserError
from pi2.memory.budget import PAGE, Budget
from pi2.memory.cache import NeuronCache
from pi2.memory.host_loops import HostLoops
from pi2.memory.policy import expect_uses
from pi2.model.blocks import list_attention
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.sizes import count_staged_neurons

MEAN_TOKENS = 256
"""Tokens of context that a mean token is taken to have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextMemory:
    """The size of the KV cache."""

    total_bytes: int
    """Bytes of full contexts of all sequences."""
    context: int
    """Tokens of all sequences."""
    runs: int
    """Ranges that tokens fill one after the other: the last page of each is partly used."""

    def count_unused(self, tokens: int) -> int:
        """Bytes that no token has touched while there are at most ``tokens``."""
        used = -(-self.total_bytes * tokens // self.context) + self.runs * PAGE
        return max(0, self.total_bytes - used)


def describe_context(resolved: ResolvedPlan) -> ContextMemory:
    """The part of its segment that the KV cache takes."""
    runs = 0
    for attention, layers in list_attention(resolved.model):
        kinds, vectors, _ = attention.kept
        runs += kinds * layers * vectors
    # Scales lie apart from what they belong to.
    runs *= 2 if resolved.plan.kv.type == "int8" else 1
    return ContextMemory(
        total_bytes=resolved.needs.kv.bytes,
        context=resolved.plan.decode.batch * resolved.plan.kv.context,
        runs=resolved.plan.decode.batch * runs,
    )


def count_lent_bytes(resolved: ResolvedPlan, tokens: int = MEAN_TOKENS) -> int:
    """Bytes that cold neurons borrow of contexts while each has ``tokens``; 0 where the plan does
    not lend them, or nothing is put into the cache."""
    if not resolved.plan.kv.lend or resolved.plan.decode.predictor == "none":
        return 0
    each = min(tokens, resolved.plan.kv.context)
    return describe_context(resolved).count_unused(resolved.plan.decode.batch * each)


STEP_TOKENS = 64
"""The cache gives memory back for so many tokens at once."""


class ContextLoan:
    """Makes the cold cache larger and smaller as the context demands."""

    def __init__(
        self,
        cache: NeuronCache,
        memory: ContextMemory,
        *,
        cold_slots: int,
        release: Callable[[], None],
        never_wanted: int = 0,
    ) -> None:
        """``cold_slots`` are the cache's own; ``never_wanted`` neurons are kept by units;
        ``release`` gives KV memory to the system."""
        self._cache = cache
        self._memory = memory
        self._cold_slots = cold_slots
        self._release = release
        self._never_wanted = never_wanted
        self._claimed = 0

    def count_slots(self, tokens: int) -> int:
        """Cold slots while there are at most ``tokens``."""
        cache = self._cache
        absent = cache.absent_capacity - self._never_wanted
        lent = self._memory.count_unused(tokens) // int(cache.arena.shape[1])
        return min(absent, self._cold_slots + lent)

    def claim(self, tokens: int) -> None:
        """Make room for the KV cache of ``tokens`` in all; nothing may be held."""
        if tokens > self._claimed:
            steps = -(-tokens // STEP_TOKENS) * STEP_TOKENS
            self._claimed = min(steps, self._memory.context)
            self._cache.resize_cold(self.count_slots(self._claimed))

    def begin(self) -> None:
        """Begin anew, with an empty KV cache for all sequences."""
        if self._claimed:
            self._claimed = 0
            self._release()
            self._cache.resize_cold(self.count_slots(0))


def allocate_cache(
    resolved: ResolvedPlan,
    budget: Budget,
    loops: HostLoops,
    *,
    by_hotness: bool = False,
    alone: bool = False,
) -> NeuronCache:
    """One arena for hot and cold neurons, which ``loops`` look up; UserError P610 without room.
    ``alone``: without the neurons of other units."""
    stride = resolved.bundle.stride
    hot = [resolved.source.find_hot(resolved, layer, alone) for layer in resolved.layers]
    neurons = resolved.model.layer_neurons
    cold_slots, most_slots = count_cold_slots(resolved)
    if (
        not cold_slots
        and any(own.start for own in hot)
        and alone
        and resolved.plan.decode.predictor != "none"
    ):
        raise UserError.of(
            "P610",
            "neurons of units with memory of their own are computed by "
            f"{resolved.sparse_unit!r} to be observed, and segment 'cold' has no room for them",
            help="raise memory.segments.cold, or give all of layers.split to "
            f"{resolved.sparse_unit!r}",
        )
    sizes = {"hot": sum(map(len, hot)) * stride, "cold": cold_slots * stride}
    reserved = most_slots - cold_slots
    arena = budget.allocate_spanning(sizes, reserved_bytes=reserved * stride).reshape(-1, stride)
    # Only an order by hotness tells beforehand which neurons will be used often.
    expected = expect_uses(len(hot), neurons) if by_hotness else None
    policy = resolved.plan.cache.policy
    return NeuronCache(
        arena, hot, neurons, loops, policy=policy, expected=expected, give_back=budget.give_back
    )


def count_neurons_at_risk(resolved: ResolvedPlan) -> int:
    """Neurons of units that the run goes on without when they are lost: they are cold then."""
    return sum(
        layer.own_hot.start
        for layer in resolved.layers
        if layer.dense is not None and resolved.goes_on_without(layer.dense.unit)
    )


def _count_streamed(resolved: ResolvedPlan) -> int:
    """Neurons of layers that are streamed as a whole, next to layers whose predicted neurons are
    cached: they get no slot."""
    if not resolved.named_layers:
        return 0
    layers = (resolved.layers[number] for number in resolved.whole_layers)
    return sum(resolved.model.layer_neurons - layer.hot_neurons for layer in layers)


def count_cold_slots(resolved: ResolvedPlan) -> tuple[int, int]:
    """Cold slots of the segment, and with what the context lends while it is empty."""
    neurons = resolved.model.layer_neurons
    absent = sum(neurons - layer.hot_neurons for layer in resolved.layers)
    absent += count_neurons_at_risk(resolved) - _count_streamed(resolved)
    stride = resolved.bundle.stride
    cold = min(resolved.plan.memory.segments.cold // stride, absent)
    if not resolved.plan.kv.lend:
        return cold, cold
    return cold, min(cold + describe_context(resolved).count_unused(0) // stride, absent)


def make_loan(resolved: ResolvedPlan, cache: NeuronCache, budget: Budget) -> ContextLoan | None:
    """The loan of the context, if the plan allows it and there are neurons to use it."""
    cold_slots, most_slots = count_cold_slots(resolved)
    if most_slots == cold_slots:
        return None
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
