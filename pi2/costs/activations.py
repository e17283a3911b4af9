"""Which neurons a token activates: hotness, a token's share of active neurons, and the cache.

Model.  A neuron fires if its input, a normal variable around the neuron's own mean, is positive.
The means of a layer are normal too, with standard deviation ``spread``: 0 makes all neurons alike,
large values make some fire always and most never.  ``spread`` follows from the published share of
neurons that make 80 % of all activations, the mean from the share of active neurons.  A token moves
all inputs by a common amount (Laplace), so that some tokens activate more neurons than others and,
among them, relatively more of the rare ones: those that are not in memory.

Neurons are taken together in classes of equal hotness, hottest first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from pi2.arrays import F64

CLASSES = 128
"""Classes of equal hotness that a layer is divided into."""
_SHIFTS = 49
"""Points at which quantities are tabulated over the shift of a token."""
MOST_SHIFT = 6.0
"""Standard deviations that a token shifts its neurons at most."""
LEAST_ACTIVE = 1e-6
"""Share of neurons below which no law of their means can be told from another."""
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hotness:
    """Distribution of activations over the neurons of a layer, or of one expert."""

    active: float
    """Mean share of neurons that a token activates."""
    spread: float
    """Standard deviation of the neurons' means, in units of a neuron's own variation."""

    def compute_chances(self, shift: float = 0.0) -> F64:
        """Chance of each class [CLASSES] to fire for a token moved by ``shift``."""
        if self.active >= 1.0:
            return np.ones(CLASSES)
        return _compute_chances(max(self.active, LEAST_ACTIVE), self.spread, round(shift, 9))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitedHotness(Hotness):
    """What several sequences activate together: a neuron counts where any of them uses it.

    ``active`` is of the union, and of the experts that any of the sequences chooses.
    """

    base: Hotness
    """Hotness for one sequence."""
    batch: int
    chosen: float
    """Chance of an expert to compute a token of one sequence; 1 without experts."""

    def compute_chances(self, shift: float = 0.0) -> F64:
        """Chance of each class [CLASSES] to be used, every sequence being moved by ``shift``."""
        single = self.base.compute_chances(shift)
        return unite_chances(single, self.batch, self.chosen)


def unite_hotness(base: Hotness, batch: int, chosen: float) -> Hotness:
    """What ``batch`` independent sequences activate together."""
    if batch == 1 or base.active >= 1.0:
        return base
    active = float(unite_chances(base.compute_chances(), batch, chosen).mean())
    return UnitedHotness(active=active, spread=base.spread, base=base, batch=batch, chosen=chosen)


def unite_chances(chances: F64, batch: int, chosen: float) -> F64:
    """Chance that any of ``batch`` sequences uses a neuron of an expert that one of them chose."""
    used = 1.0 - (1.0 - chosen * chances) ** batch
    return np.asarray(used / unite_chosen(chosen, batch))


def unite_chosen(chosen: float, batch: int) -> float:
    """Chance that any of ``batch`` sequences chooses an expert."""
    return 1.0 - (1.0 - chosen) ** batch


def draw_shifts(tokens: int, variation: float, random: np.random.Generator) -> F64:
    """How much each token [tokens] moves all neurons' thresholds.

    Most tokens are alike and a few are far off: of PowerInfer-2's times between tokens the 90th
    percentile is 19 % above the median and the 99th 44 % (Table 5), where a normal law that has the
    former gives 35 % for the latter, and this one 46 %.
    """
    drawn = random.laplace(scale=0.5**0.5, size=tokens)
    return np.asarray(np.clip(drawn, -MOST_SHIFT, MOST_SHIFT) * variation)


def weigh_shifts(points: int = _SHIFTS) -> tuple[F64, F64]:
    """Shifts in standard deviations, evenly spaced, and how often they occur."""
    sigmas = np.linspace(-MOST_SHIFT, MOST_SHIFT, points)
    weights = np.exp(-(2.0**0.5) * np.abs(sigmas))
    return sigmas, weights / weights.sum()


@lru_cache(maxsize=4096)
def _compute_chances(active: float, spread: float, shift: float) -> F64:
    means = _find_centre(active, spread) + spread * _list_quantiles(CLASSES)
    shifted = _compute_cdf(means + shift)
    shifted.flags.writeable = False
    return shifted


@lru_cache(maxsize=64)
def find_spread(active: float, skew: float) -> float:
    """Spread for which the hottest ``skew`` of all neurons make 80 % of the activations."""
    if active >= 1.0 or skew >= 0.8:
        return 0.0
    low, high = 0.0, 6.0
    for _ in range(40):
        middle = (low + high) / 2
        if measure_skew(Hotness(active=active, spread=middle)) > skew:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def measure_skew(hotness: Hotness) -> float:
    """Share of the neurons, hottest first, that make 80 % of the activations."""
    chances = hotness.compute_chances()
    sums = np.concatenate([[0.0], np.cumsum(chances)]) / chances.sum()
    return float(np.interp(0.8, sums, np.arange(CLASSES + 1) / CLASSES))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDraws:
    """Active neurons per token and layer [tokens, layers]."""

    dense: F64
    """Active neurons among those that are computed densely anyway."""
    hot: F64
    """Active neurons among the other hot ones."""
    cached: F64
    """Active cold neurons that are found in the cache."""
    missing: F64
    """Active cold neurons that have to be read."""


def draw_tokens(
    hotness: Hotness,
    hit_chances: F64,
    dense_share: float,
    hot_share: float,
    neurons: float,
    *,
    shape: tuple[int, int],
    variation: float,
    random: np.random.Generator,
    shifts: F64,
    read_chances: F64 | float = 1.0,
) -> TokenDraws:
    """Draw active and missing neurons of ``shape`` [tokens, layers].

    ``hit_chances`` [CLASSES]: chance that an active cold neuron is in the cache.  The hottest
    ``hot_share`` is resident, and ``read_chances`` [CLASSES] is the chance that a missing one is
    worth a read; of what is resident the hottest ``dense_share`` needs no prediction.  ``neurons``
    is the number that a token could activate, ``shifts`` [tokens] is every token's own shift.
    """
    sigmas, weights = weigh_shifts()
    chances = np.stack([hotness.compute_chances(float(x)) for x in sigmas * variation])
    # Shifts make rare neurons more active on average: keep the mean at the published figure.
    mean = float((chances.mean(axis=1) * weights).sum())
    chances = np.minimum(chances * (hotness.active / mean), 1.0)
    size = neurons / CLASSES

    def draw(share: F64) -> F64:
        rates = chances * share
        at = sigmas * variation
        means = np.interp(shifts, at, rates.sum(axis=1)) * size
        spreads = np.interp(shifts, at, (rates * (1.0 - rates)).sum(axis=1)) * size
        noise = np.sqrt(np.maximum(spreads, 0.0))[:, None] * random.standard_normal(shape)
        return np.asarray(np.clip(np.rint(means[:, None] + noise), 0.0, neurons))

    hot, dense = weigh_hot(hot_share), weigh_hot(dense_share)
    return TokenDraws(
        dense=draw(dense),
        hot=draw(hot - dense),
        cached=draw((1.0 - hot) * hit_chances),
        missing=draw((1.0 - hot) * (1.0 - hit_chances) * read_chances),
    )


def draw_experts(
    shares: tuple[float, float, float, float],
    used: float,
    grain: int,
    shape: tuple[int, int],
    random: np.random.Generator,
    always: float = 0.0,
) -> TokenDraws:
    """Draw where the experts of a token are: ``shares`` of what it uses on the dense unit, among
    the other hot ones, in the cache, and missing; ``used`` neurons in all, ``grain`` of each.
    ``always`` of them compute every token, and are the last to be missing."""
    fixed, left = [], always
    for share in shares:
        fixed.append(min(share, left))
        left -= fixed[-1]
    varied = np.array(shares) - fixed
    count = max(round((used - always) / grain), 1)
    parts = varied / max(varied.sum(), 1e-9)
    drawn = random.multinomial(count, parts, size=shape) * (varied.sum() / count)
    dense, hot, cached, missing = np.moveaxis(drawn + fixed, -1, 0)
    return TokenDraws(dense=dense, hot=hot, cached=cached, missing=missing)


def weigh_hot(hot_share: float) -> F64:
    """Part of each class [CLASSES] that lies within the hottest ``hot_share``."""
    return np.clip(hot_share * CLASSES - np.arange(CLASSES), 0.0, 1.0)


@lru_cache(maxsize=1024)
def _find_centre(active: float, spread: float) -> float:
    """Mean of the neurons' means for which the classes' chances have the mean ``active``: because
    the classes' tails are cut off, not quite that of the normal law."""
    usual = _NORMAL.inv_cdf(active) * (1.0 + spread * spread) ** 0.5
    quantiles = spread * _list_quantiles(CLASSES)
    low, high = usual - 1.0, usual + 1.0
    for _ in range(30):
        middle = (low + high) / 2
        less = float(_compute_cdf(middle + quantiles).mean()) < active
        low, high = (middle, high) if less else (low, middle)
    return float(low + high) / 2


def _list_quantiles(count: int) -> F64:
    """Normal quantiles of ``count`` equal classes, largest first."""
    return np.array([_NORMAL.inv_cdf((count - i - 0.5) / count) for i in range(count)])


def _compute_cdf(values: F64) -> F64:
    """Compute the normal distribution function, element by element."""
    from math import erf, sqrt

    return np.array([0.5 * (1.0 + erf(value / sqrt(2.0))) for value in values.tolist()])
