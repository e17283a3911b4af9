"""How often each neuron of a layer fires, and the biases that make it so."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np

from pi2.arrays import F64, Raw
from synthesis.randomness import draw_normals
from synthesis.recipe import SKEW_SHARE

_LEAST_CHANCE, _MOST_CHANCE = 2e-4, 1 - 2e-4
_GRID = np.linspace(-6.0, 6.0, 2401)
_MEANS = np.linspace(-6.0, 6.0, 481)


def solve_chances(neurons: int, active: float, skew: float) -> F64:
    """Chance [neurons] of firing, highest first: a power law, cut at 1, with the mean ``active``,
    whose first ``skew`` of the neurons makes 80 % of the activations."""

    def measure_skew(exponent: float) -> float:
        chances = _cut_power_law(neurons, active, exponent)
        return find_skew(chances)

    # A steeper law needs fewer neurons for 80 %.
    exponent = bisect(lambda value: skew - measure_skew(value), 0.0, 30.0)
    return _cut_power_law(neurons, active, exponent)


def find_skew(counts: Raw) -> float:
    """Share of the neurons, in the order given, that makes 80 % of ``counts`` [neurons]."""
    running = np.cumsum(counts, dtype=np.float64)
    if running[-1] == 0:
        return 1.0
    place = np.searchsorted(running, SKEW_SHARE * running[-1])
    before = running[place - 1] if place else 0.0
    part = (SKEW_SHARE * running[-1] - before) / (running[place] - before)
    return float((place + part) / len(running))


def _cut_power_law(neurons: int, active: float, exponent: float) -> F64:
    ranks = (np.arange(neurons) + 0.5) / neurons
    shape = ranks**-exponent

    def mean_at(logarithm: float) -> float:
        return float(np.minimum(shape * math.exp(logarithm), 1.0).mean())

    scale = bisect(lambda value: mean_at(value) - active, -200.0, 5.0)
    return np.asarray(np.clip(shape * math.exp(scale), _LEAST_CHANCE, _MOST_CHANCE))


def bisect(
    function: Callable[[float], float], low: float, high: float, *, rounds: int = 40
) -> float:
    """Find where the increasing ``function`` crosses 0."""
    for _ in range(rounds):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < 0 else (low, middle)
    return (low + high) / 2


@cache
def _normal_cdf_on_grid() -> F64:
    return np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in _GRID])


def normal_cdf(values: F64) -> F64:
    """Chance that a standard normal variable is below ``values``."""
    return np.interp(values, _GRID, _normal_cdf_on_grid())


def find_biases(chances: F64) -> F64:
    """Mean of a normal variable of deviation 1 that is positive with ``chances``."""
    return np.interp(chances, _normal_cdf_on_grid(), _GRID)


def find_paired_biases(chances: F64, spread: float) -> F64:
    """Mean m of a gate, normal with deviation 1, so that gate and up are both positive with
    ``chances``; up is the gate plus a normal variable of mean 0 and deviation ``spread``."""
    return np.interp(chances, _pair_cdf_on_grid(spread), _MEANS)


def solve_pair_spread(chances: F64, agreement: float) -> float:
    """Spread between gate and up at which ``agreement`` of the positive gates have a positive
    up; 0 if all have."""
    if agreement >= 0.999:
        return 0.0

    def measure(spread: float) -> float:
        gates = normal_cdf(find_paired_biases(chances, spread)).sum()
        return float(chances.sum() / gates)

    return bisect(lambda value: agreement - measure(value), 0.01, 20.0, rounds=18)


def _pair_cdf_on_grid(spread: float) -> F64:
    """Chance that gate and up are both positive, for every mean m of the grid:
    the integral over x > -m of phi(x) Phi((m + x) / spread)."""
    if spread == 0.0:
        return normal_cdf(_MEANS)
    step = 0.05
    points = np.arange(-6.0 + step / 2, 6.0, step)
    density = np.exp(-0.5 * points**2) / math.sqrt(2 * math.pi) * step
    gates = _MEANS[:, None] + points[None, :]
    # Only the part of an interval whose gate is positive counts.
    part = np.clip(gates / step + 0.5, 0.0, 1.0)
    return np.asarray((part * normal_cdf(gates / spread)) @ density)


def solve_shared_part(biases: F64, variation: float, latents: int, noise: float) -> float:
    """Weight of the latent variable that all neurons of a layer share, so that the share of
    active neurons varies from token to token by ``variation`` of its mean; 0 if it does so anyway.

    Given the shared variable x and the length of the others, q (chi-squared over its degrees of
    freedom), a neuron's gate is normal with mean b + w x and variance (1 - w^2) q + noise^2.
    """
    shared = draw_normals((256,), 0, 0).astype(np.float64)
    # Wilson and Hilferty: the cube root of chi-squared is close to normal.
    width = 2 / (9 * max(1, latents - 1))
    others = (1 - width + math.sqrt(width) * draw_normals((256,), 0, 1).astype(np.float64)) ** 3
    others = np.maximum(others, 0.01)
    sample = biases[:: max(1, len(biases) // 128)]
    chances = normal_cdf(biases)
    sampling = float((chances * (1 - chances)).sum()) / len(biases) ** 2

    def measure(weight: float) -> float:
        spread = np.sqrt((1 - weight**2) * others + noise**2)
        gates = (sample[None, :] + weight * shared[:, None]) / spread[:, None]
        shares = normal_cdf(gates).mean(axis=1)
        return float(math.sqrt(shares.var() + sampling) / shares.mean())

    if measure(0.0) >= variation:
        return 0.0
    return bisect(lambda value: measure(value) - variation, 0.0, 0.9, rounds=14)
