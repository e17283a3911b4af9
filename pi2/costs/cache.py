"""Hit chances of the cold neurons' cache, least recently used first to go.

In a large LRU cache everything that was used within the last T tokens is present and nothing else,
where T makes the expected number of present neurons equal the capacity (Che's approximation: its
error is far below a percent for thousands of entries; a test counts a real LRU cache).  A neuron's
uses form a chain with memory: experts and neurons repeat from one token to the next somewhat more
often than chance.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from pi2.arrays import F64
from pi2.costs.activations import CLASSES, Hotness, weigh_hot

_LONGEST = 1 << 20
"""Tokens after which a neuron counts as never evicted."""


@lru_cache(maxsize=256)
def compute_hit_chances(
    hotness: Hotness,
    hot_share: float,
    cold_share: float,
    chosen: float,
    token_correlation: float,
    expert_correlation: float,
) -> F64:
    """Chance per class [CLASSES] that an active cold neuron is in the cache.

    ``cold_share``: capacity as a share of all neurons of the layer.  ``chosen``: chance of an
    expert to compute a token, 1 without experts.
    """
    cold = 1.0 - weigh_hot(hot_share)
    absent = float(cold.mean())
    if cold_share <= 0.0 or absent <= 0.0:
        return np.zeros(CLASSES)
    if cold_share >= absent:
        return np.ones(CLASSES)
    chain = _Chain(hotness.compute_chances(), chosen, token_correlation, expert_correlation)

    def occupy(age: float) -> float:
        return float((chain.find_present(age) * cold).mean())

    low, high = 0.0, 1.0
    while occupy(high) < cold_share and high < _LONGEST:
        low, high = high, high * 2
    for _ in range(30):
        middle = (low + high) / 2
        if occupy(middle) < cold_share:
            low = middle
        else:
            high = middle
    hits = 1.0 - chain.find_unused((low + high) / 2)
    hits.flags.writeable = False
    return hits


class _Chain:
    """A neuron's uses, backwards in time from one of them.

    States of a token further back, none of which used the neuron: the expert was idle since the
    use (0), it ran without the neuron (1), it is idle but ran without the neuron later (2).
    """

    def __init__(
        self, chances: F64, chosen: float, token_correlation: float, expert_correlation: float
    ) -> None:
        self._used = chances * chosen
        stays_on = chosen + expert_correlation * (1.0 - chosen)
        turns_on = chosen * (1.0 - expert_correlation)
        again = chances + token_correlation * (1.0 - chances)
        anew = chances * (1.0 - token_correlation)
        self._first = np.zeros((CLASSES, 3))
        self._first[:, 0] = 1.0 - stays_on
        self._first[:, 1] = stays_on * (1.0 - again)
        step = np.zeros((CLASSES, 3, 3))
        step[:, 0, 0] = 1.0 - turns_on
        step[:, 0, 1] = turns_on * (1.0 - again)
        step[:, 1, 1] = stays_on * (1.0 - anew)
        step[:, 1, 2] = 1.0 - stays_on
        step[:, 2, 1] = turns_on * (1.0 - anew)
        step[:, 2, 2] = 1.0 - turns_on
        # Powers of two of the step and sums of its powers: any age in a few products.
        self._powers = [step]
        self._sums = [np.broadcast_to(np.eye(3), step.shape).copy()]

    def find_unused(self, age: float) -> F64:
        """Chance [CLASSES] that none of the ``age`` tokens before a use was a use."""
        if age <= 1.0:
            return np.asarray(1.0 - age * (1.0 - self._first.sum(axis=1)))
        whole = int(age)
        before = self._walk(whole - 1)
        after = np.einsum("cs,cst->ct", before, self._powers[0])
        share = age - whole
        return np.asarray(before.sum(axis=1) * (1.0 - share) + after.sum(axis=1) * share)

    def find_present(self, age: float) -> F64:
        """Share of the time [CLASSES] in which the last use is at most ``age`` tokens ago."""
        whole = int(age)
        total = min(age, 1.0) * np.ones(CLASSES)
        if whole >= 1:
            total += self._sum_walks(whole - 1)
            total += (age - whole) * self._walk(whole - 1).sum(axis=1)
        return np.minimum(self._used * total, 1.0)

    def _walk(self, steps: int) -> F64:
        """The first state after ``steps`` more steps."""
        state, bit = self._first, 0
        while steps:
            self._grow(bit)
            if steps & 1:
                state = np.einsum("cs,cst->ct", state, self._powers[bit])
            steps, bit = steps >> 1, bit + 1
        return state

    def _sum_walks(self, count: int) -> F64:
        """Sum of the chances of the first ``count`` states."""
        total, state, bit = np.zeros(CLASSES), self._first, 0
        while count:
            self._grow(bit)
            if count & 1:
                total += np.einsum("cs,cst->ct", state, self._sums[bit]).sum(axis=1)
                state = np.einsum("cs,cst->ct", state, self._powers[bit])
            count, bit = count >> 1, bit + 1
        return total

    def _grow(self, bit: int) -> None:
        while len(self._powers) <= bit:
            power = self._powers[-1]
            self._sums.append(self._sums[-1] + np.einsum("cst,ctu->csu", power, self._sums[-1]))
            self._powers.append(np.einsum("cst,ctu->csu", power, power))
