"""Which neurons a token activates: hotness, a token's share of active neurons, and the cache.

A neuron fires if its input, a normal variable around the neuron's own mean, is positive. Means of a
layer are normal as well, with standard deviation ``spread``. It follows from the published share of
neurons that make 80 % of all activations. A token moves all inputs by a common amount (Laplace).
Neurons of equal hotness are taken together, hottest first.

Hit chances of the least recently used cache follow Che's approximation: exactly the neurons that
the last T tokens used are present, and T fills the capacity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import erf, sqrt
from pathlib import Path
from statistics import NormalDist

import numpy as np

from pi2.arrays import F64
from pi2.diagnostics import UserError
from pi2.importing.conversion_job import ACTIVATIONS, read_counts

_NORMAL = NormalDist()
_MOST_LIMIT = 16.0
"""Limit, in standard deviations of a score, from which nothing is read."""
_LEAST_CHANCE = 1e-12


def halve(
    low: float, high: float, is_below: Callable[[float], bool], steps: int = 40
) -> tuple[float, float]:
    """Narrow a range down to the place up to which ``is_below`` holds."""
    for _ in range(steps):
        middle = (low + high) / 2.0
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return low, high


def find_read_chances(chances: F64, missing: F64, share: float) -> F64:
    """Chance [n] of each class that a named, missing neuron is read, if ``share`` of the named
    neurons' score mass may be left out; ``missing`` [n] is the absent part of a class."""
    if share <= 0.0:
        return np.ones_like(chances)
    chances = np.clip(chances, _LEAST_CHANCE, 1.0 - _LEAST_CHANCE)
    means = _find_means(chances.tobytes())
    density = _compute_density(means)
    allowance = share * float((density + means * chances).sum())

    def is_allowed(limit: float) -> bool:
        above = _compute_cdf(means - limit)
        # The mean of a score between 0 and the limit, times its chance to be there.
        mass = means * (chances - above) + density - _compute_density(means - limit)
        return float((missing * mass).sum()) <= allowance

    limit, _ = halve(0.0, _MOST_LIMIT, is_allowed)
    return np.asarray(np.clip(_compute_cdf(means - limit) / chances, 0.0, 1.0))


@lru_cache(maxsize=64)
def _find_means(chances: bytes) -> F64:
    """Return the mean scores [n] of neurons that are named with ``chances`` (float64 [n])."""
    found = np.array([_NORMAL.inv_cdf(chance) for chance in np.frombuffer(chances).tolist()])
    found.flags.writeable = False
    return found


def _compute_cdf(values: F64) -> F64:
    """Normal distribution function [n]."""
    return np.array([0.5 * (1.0 + erf(value / sqrt(2.0))) for value in values.tolist()])


def _compute_density(values: F64) -> F64:
    return np.asarray(np.exp(-0.5 * values * values) / np.sqrt(2.0 * np.pi))


CLASSES = 128
"""Classes of equal hotness that a layer is divided into."""
_SHIFTS = 49
"""Points at which quantities are tabulated over the shift of a token."""
MOST_SHIFT = 6.0
"""Standard deviations that a token shifts its neurons at most."""
LEAST_ACTIVE = 1e-6
"""Share of neurons below which no law of their means can be told from another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hotness:
    """Distribution of activations over the neurons of a layer, or of one expert."""

    active: float
    """Mean share of neurons that a token activates."""
    spread: float
    """Standard deviation of the neurons' means, in units of a neuron's own variation."""
    counted: tuple[float, ...] = ()
    """Chances of the [CLASSES] classes as counted over many tokens; empty if a law says them."""
    base: Hotness | None = None
    """Hotness for one of ``batch`` sequences together; ``active`` is of their experts' union."""
    batch: int = 1
    chosen: float = 1.0
    """Chance of an expert to compute a token of one sequence; 1 without experts."""

    def compute_chances(self, shift: float = 0.0) -> F64:
        """Chance of each class [CLASSES], hottest first, to fire for a token moved by ``shift``;
        counted ones are means over tokens already."""
        if self.base is not None:
            return unite_chances(self.base.compute_chances(shift), self.batch, self.chosen)
        if self.counted:
            return np.array(self.counted)
        if self.active >= 1.0:
            return np.ones(CLASSES)
        return _compute_chances(max(self.active, LEAST_ACTIVE), self.spread, round(shift, 9))


def unite_hotness(base: Hotness, batch: int, chosen: float) -> Hotness:
    """What ``batch`` independent sequences activate together."""
    if batch == 1 or base.active >= 1.0:
        return base
    active = float(unite_chances(base.compute_chances(), batch, chosen).mean())
    return Hotness(active=active, spread=base.spread, base=base, batch=batch, chosen=chosen)


def unite_chances(chances: F64, batch: int, chosen: float) -> F64:
    """Chance that any of ``batch`` sequences uses a neuron of an expert that one of them chose."""
    used = 1.0 - (1.0 - chosen * chances) ** batch
    return np.asarray(used / unite_chosen(chosen, batch))


def unite_chosen(chosen: float, batch: int) -> float:
    """Chance that any of ``batch`` sequences chooses an expert."""
    return 1.0 - (1.0 - chosen) ** batch


def draw_shifts(tokens: int, variation: float, random: np.random.Generator) -> F64:
    """Shift [tokens] of each token's thresholds, drawn from a Laplace law: PowerInfer-2's times
    between tokens (Table 5) have tails that a normal law misses."""
    drawn = random.laplace(scale=0.5**0.5, size=tokens)
    return np.asarray(np.clip(drawn, -MOST_SHIFT, MOST_SHIFT) * variation)


def weigh_shifts(points: int = _SHIFTS) -> tuple[F64, F64]:
    sigmas = np.linspace(-MOST_SHIFT, MOST_SHIFT, points)
    weights = np.exp(-(2.0**0.5) * np.abs(sigmas))
    return sigmas, weights / weights.sum()


@lru_cache(maxsize=4096)
def _compute_chances(active: float, spread: float, shift: float) -> F64:
    means = _find_centre(active, spread) + spread * _QUANTILES
    shifted = _compute_cdf(means + shift)
    shifted.flags.writeable = False
    return shifted


@lru_cache(maxsize=64)
def find_spread(active: float, skew: float) -> float:
    """Spread for which the hottest ``skew`` of all neurons make 80 % of the activations."""
    if active >= 1.0 or skew >= 0.8:
        return 0.0

    def is_even(spread: float) -> bool:
        return measure_skew(Hotness(active=active, spread=spread)) > skew

    return sum(halve(0.0, 6.0, is_even)) / 2


def measure_skew(hotness: Hotness) -> float:
    """Share of the neurons, hottest first, that make 80 % of the activations."""
    chances = hotness.compute_chances()
    sums = np.concatenate([[0.0], np.cumsum(chances)]) / chances.sum()
    return float(np.interp(0.8, sums, np.arange(CLASSES + 1) / CLASSES))


PLACES = ("dense", "hot", "cached", "missing")
"""Places of a token's active neurons: on the dense unit, the other resident ones, in the cache, and
on flash."""


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
) -> F64:
    """Draw active neurons [tokens, layers, PLACES] of ``shape`` [tokens, layers].

    ``hit_chances`` [CLASSES]: chance that an active cold neuron is in the cache. The hottest
    ``hot_share`` is resident, and ``read_chances`` [CLASSES] is the chance that a missing one is
    worth a read; the hottest ``dense_share`` of the resident neurons needs no prediction.
    ``neurons`` is the number that a token could activate, ``shifts`` [tokens] is every token's own
    shift."""
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
    missing = (1.0 - hot) * (1.0 - hit_chances) * read_chances
    shares = (dense, hot - dense, (1.0 - hot) * hit_chances, missing)
    return np.stack([draw(share) for share in shares], axis=-1)


def draw_experts(
    shares: tuple[float, float, float, float],
    used: float,
    grain: int,
    shape: tuple[int, int],
    random: np.random.Generator,
    always: float = 0.0,
) -> F64:
    """Draw the places of a token's experts [tokens, layers, PLACES]."""
    fixed, left = [], always
    for share in shares:
        fixed.append(min(share, left))
        left -= fixed[-1]
    varied = np.array(shares) - fixed
    count = max(round((used - always) / grain), 1)
    parts = varied / max(varied.sum(), 1e-9)
    drawn = random.multinomial(count, parts, size=shape) * (varied.sum() / count)
    return np.asarray(drawn + fixed)


def weigh_hot(hot_share: float) -> F64:
    """Part of each class [CLASSES] within the hottest ``hot_share``."""
    return np.clip(hot_share * CLASSES - np.arange(CLASSES), 0.0, 1.0)


@lru_cache(maxsize=1024)
def _find_centre(active: float, spread: float) -> float:
    """Mean of the neurons' means at which the classes' chances average ``active``."""
    usual = _NORMAL.inv_cdf(active) * (1.0 + spread * spread) ** 0.5
    quantiles = spread * _QUANTILES

    def is_low(centre: float) -> bool:
        return float(_compute_cdf(centre + quantiles).mean()) < active

    return float(sum(halve(usual - 1.0, usual + 1.0, is_low, 30))) / 2


_QUANTILES = np.array([_NORMAL.inv_cdf((CLASSES - i - 0.5) / CLASSES) for i in range(CLASSES)])
"""Normal quantiles of equal classes, largest first."""
_LONGEST = 1 << 20
"""Tokens after which a neuron counts as never evicted."""


@lru_cache(maxsize=256)
def compute_hit_chances(
    hotness: Hotness, hot_share: float, cold_share: float, chosen: float, again: float = 0.0
) -> F64:
    """Chance [CLASSES] that an active cold neuron is cached; ``chosen``: chance of an expert;
    ``again``: part of a use that the previous token decides."""
    cold = 1.0 - weigh_hot(hot_share)
    absent = float(cold.mean())
    if cold_share <= 0.0 or absent <= 0.0:
        return np.zeros(CLASSES)
    if cold_share >= absent:
        return np.ones(CLASSES)
    used = chosen * hotness.compute_chances()
    # No use by the token before a use, and by one further back.
    first, rest = (1.0 - used) * (1.0 - again), 1.0 - used * (1.0 - again)

    def find_unused(age: float) -> F64:
        """Chance [CLASSES] that none of the ``age`` tokens before a use was a use."""
        if age <= 1.0:
            return np.asarray(1.0 - age * (1.0 - first))
        whole = int(age)
        return np.asarray(first * rest ** (whole - 1) * (1.0 - (age - whole) * (1.0 - rest)))

    def occupy(age: float) -> float:
        """Mean share of the time in which the last use is at most ``age`` tokens ago."""
        whole = max(int(age), 1)
        total = min(age, 1.0) + first * (1.0 - rest ** (whole - 1)) / np.maximum(1.0 - rest, 1e-30)
        total += max(age - whole, 0.0) * first * rest ** (whole - 1)
        return float((np.minimum(used * total, 1.0) * cold).mean())

    low, high = 0.0, 1.0
    while occupy(high) < cold_share and high < _LONGEST:
        low, high = high, high * 2
    age = sum(halve(low, high, lambda age: occupy(age) < cold_share, 30)) / 2
    hits = 1.0 - find_unused(age)
    hits.flags.writeable = False
    return hits


_RARE = 4
"""Counts up to which chance decides them."""
_ENOUGH = 30
"""Neurons with a count from which their number is known well enough."""


def read_shares(store: Path, layers: int, neurons: int) -> F64 | None:
    """Share of tokens that activate each neuron [layers, neurons], hottest first, or None."""
    path = store / ACTIVATIONS
    if not path.is_file():
        return None
    return _read_counts(path, path.stat().st_mtime_ns, layers, neurons)


@lru_cache(maxsize=4)
def _read_counts(path: Path, _changed: int, layers: int, neurons: int) -> F64 | None:
    try:
        counts, notes = read_counts(path, layers, neurons)
        tokens = int(notes.get("tokens", "0"))
    except (UserError, ValueError):
        return None
    if tokens <= 0:
        return None
    expected = [_expect_counts(row) for row in counts.astype(np.float64)]
    shares = np.minimum(np.stack(expected) / tokens, 1.0)
    shares.sort(axis=1)
    return np.asarray(shares[:, ::-1])


def _expect_counts(counts: F64) -> F64:
    """Counts expected in as many other tokens, by Good and Turing: (c + 1) N(c + 1) / N(c)."""
    expected = counts.copy()
    sizes = np.bincount(counts.astype(np.int64), minlength=_RARE + 2)
    last = 0.0
    for count in range(_RARE + 1):
        if min(sizes[count], sizes[count + 1]) < _ENOUGH:
            break
        last = max(last, float((count + 1) * sizes[count + 1] / sizes[count]))
        expected[counts == count] = min(last, count + 1.0)
    return expected


def make_counted(shares: F64, named: float) -> Hotness:
    """Hotness of a layer with measured ``shares`` [neurons]; a predictor that names more lowers all
    thresholds by the same amount."""
    size = len(shares) // CLASSES
    classes = shares[: size * CLASSES].reshape(CLASSES, size).mean(axis=1)
    active = float(classes.mean())
    safe = np.clip(classes, 1e-4, 1.0 - 1e-4)
    inputs = _find_means(safe.tobytes())
    chances = classes * (named / active)
    if named > active:
        ends = halve(-4.0, 4.0, lambda shift: _compute_cdf(inputs + shift).mean() < named)
        chances = _compute_cdf(inputs + sum(ends) / 2)
    counted = tuple(np.minimum(chances, 1.0).tolist())
    return Hotness(active=float(chances.mean()), spread=0.0, counted=counted)
