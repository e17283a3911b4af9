"""Which missing neurons are read where a plan states a share of scores that may be left out.

A score is taken to be normal with the neuron's own mean, as activations are
(`pi2.costs.activations`); a neuron is named where its score is above 0, and its mass is that
score.  The limit is the one below which the missing neurons have the stated share of all mass
(`pi2.memory.read_sieve` finds it while a model runs).
"""

from __future__ import annotations

from functools import lru_cache
from statistics import NormalDist

import numpy as np

from pi2.arrays import F64

_NORMAL = NormalDist()
_MOST_LIMIT = 16.0
"""Limit, in standard deviations of a score, from which nothing is read."""
_STEPS = 40
_LEAST_CHANCE = 1e-12


def find_read_chances(chances: F64, missing: F64, share: float) -> F64:
    """Return the chance of each class [n] that a neuron that is named and missing is read.

    ``chances`` [n]: that a neuron is named; ``missing`` [n]: part of a class that is missing when
    it is named; ``share``: part of the mass of all named neurons that may be left out.
    """
    if share <= 0.0:
        return np.ones_like(chances)
    chances = np.clip(chances, _LEAST_CHANCE, 1.0 - _LEAST_CHANCE)
    means = _find_means(chances.tobytes())
    density = _compute_density(means)
    allowance = share * float((density + means * chances).sum())
    low, high = 0.0, _MOST_LIMIT
    for _ in range(_STEPS):
        limit = (low + high) / 2.0
        above = _compute_normal(means - limit)
        # The mean of a score between 0 and the limit, times its chance to be there.
        mass = means * (chances - above) + density - _compute_density(means - limit)
        low, high = (low, limit) if float((missing * mass).sum()) > allowance else (limit, high)
    return np.asarray(np.clip(_compute_normal(means - low) / chances, 0.0, 1.0))


@lru_cache(maxsize=64)
def _find_means(chances: bytes) -> F64:
    """Return the mean scores [n] of neurons that are named with ``chances`` (float64 [n])."""
    found = np.array([_NORMAL.inv_cdf(chance) for chance in np.frombuffer(chances).tolist()])
    found.flags.writeable = False
    return found


def _compute_normal(values: F64) -> F64:
    """The normal distribution function [n], absolute error below 1e-7.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.2.17.
    """
    size = np.abs(values)
    t = 1.0 / (1.0 + 0.2316419 * size)
    series = np.zeros_like(t)
    for factor in (1.330274429, -1.821255978, 1.781477937, -0.356563782, 0.319381530):
        series = (series + factor) * t
    tail = _compute_density(values) * series
    return np.asarray(np.where(values >= 0.0, 1.0 - tail, tail))


def _compute_density(values: F64) -> F64:
    return np.asarray(np.exp(-0.5 * values * values) / np.sqrt(2.0 * np.pi))
