"""Hotness, drawn tokens and the analytic hit rate of the cache."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from pi2.costs.activations import (
    CLASSES,
    Hotness,
    compute_hit_chances,
    draw_shifts,
    find_spread,
    measure_skew,
)


@pytest.mark.parametrize(("active", "skew"), [(0.1, 0.26), (0.16, 0.4), (0.3, 0.43), (0.5, 0.7)])
def test_the_spread_reproduces_the_published_skew(active: float, skew: float) -> None:
    hotness = Hotness(active=active, spread=find_spread(active, skew))
    assert measure_skew(hotness) == pytest.approx(skew, abs=0.005)
    assert hotness.compute_chances().mean() == pytest.approx(active)


def test_one_spread_is_near_the_skews_that_were_published_for_relu() -> None:
    """PowerInfer: 26 % of OPT-30B's neurons (4 % active), 43 % of a ReGLU model's (18 %)."""
    for active, skew in ((0.04, 0.26), (0.18, 0.43)):
        assert find_spread(active, skew) == pytest.approx(0.775, abs=0.02)


def test_a_few_tokens_are_far_from_the_median() -> None:
    """PowerInfer-2, Table 5: P90 19 % and P99 44 % above the median."""
    shifts = draw_shifts(200_000, 0.1, np.random.default_rng(0))
    assert shifts.std() == pytest.approx(0.1, rel=0.02)
    p50, p90, p99 = np.percentile(shifts, [50, 90, 99])
    assert (p99 - p50) / (p90 - p50) == pytest.approx(43.1 / 18.7, rel=0.1)


class CountedCache:
    """A real LRU cache that looks all neurons of a token up before it loads the missing ones."""

    def __init__(self, capacity: int) -> None:
        self.entries: OrderedDict[int, None] = OrderedDict()
        self.capacity, self.hits, self.uses = capacity, 0, 0

    def use(self, neurons: np.ndarray, *, counted: bool) -> None:
        wanted = neurons.tolist()
        if counted:
            self.uses += len(wanted)
            self.hits += sum(neuron in self.entries for neuron in wanted)
        for neuron in wanted:
            self.entries.pop(neuron, None)
            self.entries[neuron] = None
        while len(self.entries) > self.capacity:
            self.entries.popitem(last=False)


def count_hits(
    chances: np.ndarray, capacity: int, tokens: int, correlation: float, seed: int
) -> float:
    """Hit rate over neurons that fire as two-state chains."""
    random = np.random.default_rng(seed)
    cache = CountedCache(capacity)
    active = random.random(len(chances)) < chances
    for token in range(tokens):
        again = chances + correlation * (1.0 - chances)
        anew = chances * (1.0 - correlation)
        active = random.random(len(chances)) < np.where(active, again, anew)
        cache.use(random.permutation(np.flatnonzero(active)), counted=token >= tokens // 3)
    return cache.hits / cache.uses


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("correlation", [0.0, 0.3])
def test_the_analytic_hit_rate_is_that_of_a_counted_cache(share: float, correlation: float) -> None:
    hotness = Hotness(active=0.15, spread=0.8)
    each = 8  # neurons of a class
    chances = np.repeat(hotness.compute_chances(), each)
    counted = count_hits(chances, int(share * len(chances)), 300, correlation, seed=1)
    hits = compute_hit_chances(hotness, 0.0, share, 1.0, correlation, 0.0)
    analytic = float((hotness.compute_chances() * hits).sum() / hotness.compute_chances().sum())
    assert analytic == pytest.approx(counted, abs=0.015)


def test_the_analytic_hit_rate_holds_for_experts_as_well() -> None:
    random = np.random.default_rng(3)
    hotness = Hotness(active=0.3, spread=0.8)
    chances = hotness.compute_chances()
    experts, chosen, tokens = 8, 2, 1500
    cache = CountedCache(int(0.4 * experts * CLASSES))
    for token in range(tokens):
        used = [
            expert * CLASSES + np.flatnonzero(random.random(CLASSES) < chances)
            for expert in random.permutation(experts)[:chosen]
        ]
        cache.use(random.permutation(np.concatenate(used)), counted=token > tokens // 3)
    found = compute_hit_chances(hotness, 0.0, 0.4, chosen / experts, 0.0, 0.0)
    analytic = float((chances * found).sum() / chances.sum())
    assert analytic == pytest.approx(cache.hits / cache.uses, abs=0.02)


def test_a_larger_cache_never_hits_less() -> None:
    hotness = Hotness(active=0.15, spread=0.8)
    shares = [0.05, 0.1, 0.2, 0.4, 0.6, 0.9]
    rates = [compute_hit_chances(hotness, 0.0, x, 1.0, 0.1, 0.0).mean() for x in shares]
    assert rates == sorted(rates)
    assert np.all(compute_hit_chances(hotness, 0.4, 0.6, 1.0, 0.1, 0.0) == 1.0)
    assert np.all(compute_hit_chances(hotness, 0.4, 0.0, 1.0, 0.1, 0.0) == 0.0)
