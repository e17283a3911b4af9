"""Recorded routing through caches of experts: what would be in memory, by policy and by size.

``lru`` and ``lfu`` are the engine's own cache (`pi2.memory.cache`), one for all layers or one for
each.  ``belady`` knows what comes: it lets go what is needed last, which no policy can do better.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from pi2.arrays import I32
from pi2.memory.cache import NeuronCache
from pi2.memory.policy import PolicyName
from pi2.statistics.routing import RoutingTrace

ReplayPolicy = Literal["lru", "lfu", "lru-layer", "lfu-layer", "belady", "belady-layer"]
POLICIES: tuple[ReplayPolicy, ...] = get_args(ReplayPolicy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a cache did with a trace."""

    policy: ReplayPolicy
    slots: int
    """Experts that it has room for."""
    share: float
    """The same as a share of all experts."""
    hit_rate: float
    """Share of the chosen experts that were in memory, of the tokens that count."""
    reads_token: float
    """Experts read per token."""


def replay_trace(trace: RoutingTrace, policy: ReplayPolicy, slots: int, *, skip: int = 0) -> Replay:
    """Take the tokens of ``trace`` through an empty cache with ``slots`` for all layers together;
    the first ``skip`` fill it and do not count.

    A cache by layer has the same number of slots for each, what is left over going to the first
    layers.
    """
    tokens, layers, _ = trace.chosen.shape
    requests = np.sort(trace.chosen, axis=2)
    if policy.startswith("belady"):
        hits = _replay_belady(requests, trace.experts, slots, policy.endswith("layer"))
    else:
        name: PolicyName = "lru" if policy.startswith("lru") else "lfu"
        hits = _replay_engine(requests, trace.experts, slots, name, policy.endswith("layer"))
    counted = hits[skip:]
    chosen = requests[skip:].size
    found = int(counted.sum())
    return Replay(
        policy=policy,
        slots=slots,
        share=slots / (layers * trace.experts),
        hit_rate=found / max(1, chosen),
        reads_token=(chosen - found) / max(1, tokens - skip),
    )


def _share_slots(slots: int, layers: int) -> list[int]:
    return [slots // layers + (layer < slots % layers) for layer in range(layers)]


def _replay_engine(
    requests: I32, experts: int, slots: int, policy: PolicyName, by_layer: bool
) -> I32:
    """Hits [tokens, layers]; experts for which a token leaves no slot are missed, not kept."""
    tokens, layers, _ = requests.shape

    def make(count: int, of_layers: int) -> NeuronCache:
        arena = np.zeros((count, 1), np.uint8)
        return NeuronCache(arena, [0] * of_layers, experts, policy=policy)

    if by_layer:
        caches = [make(count, 1) for count in _share_slots(slots, layers)]
    else:
        caches = [make(slots, layers)] * layers
    hits = np.zeros((tokens, layers), np.int32)
    for token in range(tokens):
        for layer in range(layers):
            cache, wanted = caches[layer], requests[token, layer]
            found = cache.look_up(0 if by_layer else layer, wanted[: cache.cold_capacity])
            hits[token, layer] = len(found.resident_slots)
    return hits


def _replay_belady(requests: I32, experts: int, slots: int, by_layer: bool) -> I32:
    tokens, layers, _ = requests.shape
    hits = np.zeros((tokens, layers), np.int32)
    if by_layer:
        for layer, count in enumerate(_share_slots(slots, layers)):
            hits[:, layer] = _foresee(requests[:, layer], count)
        return hits
    keys = requests + np.arange(layers, dtype=np.int32)[:, None] * np.int32(experts)
    return _foresee(keys.reshape(tokens * layers, -1), slots).reshape(tokens, layers)


def _foresee(requests: I32, slots: int) -> I32:
    """Hits of each of ``requests`` [n, k], where what is needed last goes, and what comes stays out
    if it is needed later than all that is there."""
    count = len(requests)
    following = np.full(requests.shape, count, np.int64)
    last: dict[int, int] = {}
    for number in range(count - 1, -1, -1):
        for place, key in enumerate(requests[number].tolist()):
            following[number, place] = last.get(key, count)
            last[key] = number
    hits = np.zeros(count, np.int32)
    next_use: dict[int, int] = {}
    heap: list[tuple[int, int]] = []
    for number in range(count):
        keys = requests[number].tolist()
        hits[number] = sum(key in next_use for key in keys)
        for key, use in zip(keys, following[number].tolist(), strict=True):
            if key not in next_use and len(next_use) >= slots:
                while heap and next_use.get(heap[0][1]) != -heap[0][0]:
                    heapq.heappop(heap)
                if not heap or -heap[0][0] <= use:
                    continue
                del next_use[heapq.heappop(heap)[1]]
            next_use[key] = use
            heapq.heappush(heap, (-use, key))
    return hits
