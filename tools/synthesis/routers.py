"""Routers whose choices follow given statistics: how popular experts are, and how often the next
token chooses them again.

A router's scores are normal variables, one for each expert, to which the expert's popularity is
added.  Of all choices, popularity makes what a random order of the tokens would show; that tokens
next to each other choose alike beyond that comes from what they have in common.  Both strengths are
found by trial, with random numbers that are the same every time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from statistics import NormalDist

import numpy as np

from pi2.arrays import F32, I32
from pi2.measuring.routing import RoutingTrace, measure_locality
from synthesis.hotness import bisect
from synthesis.randomness import draw_normals, draw_permutation

TOKENS = 768
"""Of a trial."""
MOST_CORRELATION = 0.95
_TRIAL_STREAM = 40


def spread_popularity(experts: int, deviation: float, *key: int) -> F32:
    """What is added to the scores of ``experts`` [experts] in a layer, of this deviation, in a
    random order that ``key`` names."""
    normal = NormalDist()
    places = [(place + 0.5) / experts for place in range(experts)]
    values = np.array([normal.inv_cdf(place) for place in places], np.float32)
    return values[draw_permutation(experts, *key)] * np.float32(deviation)


@cache
def solve_deviation(experts: int, chosen: int, popular: float) -> float:
    """Deviation of popularity at which the share ``popular`` of the experts makes up 80 % of uses;
    0 where they are used more evenly in any case."""

    def measure(deviation: float) -> float:
        trace = simulate_choices(experts, chosen, deviation, 0.0)
        return popular - measure_locality(trace).popular

    return 0.0 if measure(0.0) >= 0 else _solve(measure, 12.0)


@cache
def solve_correlation(experts: int, chosen: int, deviation: float, reuse: float) -> float:
    """Correlation of a token's scores with those of the token before it at which it chooses the
    share ``reuse`` of its experts again; 0 where it does in any case."""

    def measure(correlation: float) -> float:
        trace = simulate_choices(experts, chosen, deviation, correlation)
        return measure_locality(trace).reuse[1] - reuse

    return 0.0 if measure(0.0) >= 0 else _solve(measure, MOST_CORRELATION)


def _solve(function: Callable[[float], float], high: float) -> float:
    return bisect(function, 0.0, high, rounds=12)


def simulate_choices(
    experts: int, chosen: int, deviation: float, correlation: float
) -> RoutingTrace:
    """Choices of `TOKENS` tokens in one layer."""
    scores = _draw_trial(experts).copy()
    fresh = np.float32(np.sqrt(1 - correlation**2))
    for token in range(1, TOKENS):
        scores[token] = np.float32(correlation) * scores[token - 1] + fresh * scores[token]
    scores += spread_popularity(experts, deviation, _TRIAL_STREAM, experts)
    best: I32 = np.argsort(-scores, axis=1, kind="stable")[:, :chosen].astype(np.int32)
    return RoutingTrace(
        experts=experts,
        expert_bytes=0,
        sequences=np.zeros(TOKENS, np.int32),
        chosen=best[:, None],
        weights=np.ones((TOKENS, 1, chosen), np.float32),
    )


@cache
def _draw_trial(experts: int) -> F32:
    return draw_normals((TOKENS, experts), _TRIAL_STREAM, experts, 1)
