"""The predictors of a layer: one, or in a mixture one for each of its experts, of the same rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pi2.arrays import F32
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.sizes import count_ffn_bytes
from pi2.plan.weights.layout import GROUP, Precision, matrix_bytes, round_up
from pi2.predictors.fitting import Fit, Recipe, Weights, fit_layer, start_rank
from pi2.predictors.samples import LayerSamples
from pi2.statistics.counting import measure_skew

WORTH = 0.99
"""A larger rank is kept if it brings a token's bytes below this share of the smaller one's."""
TRIAL = 0.25
"""Share of the passes in which a rank is tried; the one that is kept is then trained in full."""
FLASH_COST = 10.0
"""How much longer a byte from flash takes than one from memory, roughly."""
FEWEST_TOKENS = 64
"""Fewest tokens of an expert to learn anything from; one with fewer names all of its neurons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFit:
    """The fitted predictors of a layer, and how good they are on the tokens that were kept back."""

    experts: tuple[Fit, ...]
    """By expert; one without experts."""
    tokens: tuple[int, ...]
    """That each has learned from and was judged on."""

    @property
    def rank(self) -> int:
        """That of all experts."""
        return self.experts[0].weights.rank

    @property
    def active(self) -> float:
        """Share of the neurons (in a mixture, of those of a token's experts) that fire."""
        return self._average([fit.active for fit in self.experts])

    @property
    def predicted(self) -> float:
        """Share that is named."""
        return self._average([fit.predicted for fit in self.experts])

    @property
    def recall(self) -> float:
        """Share of those that fire that is named."""
        found = self._average([fit.recall * fit.active for fit in self.experts])
        return found / self.active if self.active else 1.0

    @property
    def curve(self) -> tuple[tuple[float, float], ...]:
        """As `Fit.curve`, over the experts that have one."""
        curves = [(fit.curve, n) for fit, n in zip(self.experts, self.tokens, strict=True)]
        known = [(curve, max(1, n)) for curve, n in curves if curve]
        if not known:
            return ()
        total = sum(n for _, n in known)
        return tuple(
            (recall, sum(curve[place][1] * n for curve, n in known) / total)
            for place, (recall, _) in enumerate(known[0][0])
        )

    def _average(self, shares: Sequence[float]) -> float:
        weights = self.tokens if any(self.tokens) else [1] * len(self.tokens)
        pairs = zip(shares, weights, strict=True)
        return sum(share * weight for share, weight in pairs) / sum(weights)

    def join_inner(self) -> F32:
        """First matrices of the experts, one after the other [experts rank, hidden]."""
        return np.concatenate([fit.weights.inner for fit in self.experts])

    def join_outer(self) -> F32:
        """Second matrices [neurons, rank]."""
        return np.concatenate([fit.weights.outer for fit in self.experts])

    def join_bias(self) -> F32:
        """Biases [neurons]."""
        return np.concatenate([fit.weights.bias for fit in self.experts])


def fit_predictors(
    samples: Sequence[LayerSamples], resolved: ResolvedPlan, recipe: Recipe, rank: int | None
) -> LayerFit:
    """Fit the predictors of a layer, with ``rank``, or with the rank that suits the expert that
    computed most tokens."""
    if rank is None:
        rank = choose_rank(max(samples, key=len), resolved, recipe)
    precision = resolved.model.quantization.predictor
    return fit_experts(samples, round_up(rank, GROUP), recipe, precision)


def fit_experts(
    samples: Sequence[LayerSamples], rank: int, recipe: Recipe, precision: Precision
) -> LayerFit:
    """Fit a predictor of ``rank`` (a multiple of 32) to the samples of every expert."""
    fits = [
        fit_layer(item, rank, recipe, precision)
        if len(item) >= FEWEST_TOKENS or len(samples) == 1
        else name_all(item, rank)
        for item in samples
    ]
    return LayerFit(experts=tuple(fits), tokens=tuple(len(item) for item in samples))


def choose_rank(samples: LayerSamples, resolved: ResolvedPlan, recipe: Recipe) -> int:
    """The rank at which a token's bytes weigh least: ranks grow while they become less."""
    hidden, precision = resolved.model.stored_neuron_width, resolved.model.quantization.predictor
    _, active = samples.read(slice(0, min(len(samples), 8192)))
    current = start_rank(float(active.mean()), measure_skew(active.sum(axis=0)), hidden)
    best, fewest = current, math.inf
    while current <= hidden:
        passes = TRIAL * recipe.count_passes(len(samples), current)
        fit = fit_layer(samples, current, replace(recipe, passes=passes), precision)
        taken = count_token_bytes(fit, resolved, precision)
        if taken > WORTH * fewest:
            break
        best, fewest = current, taken
        current = round_up(2 * current, GROUP)
    return best


def count_token_bytes(fit: Fit, resolved: ResolvedPlan, precision: Precision) -> float:
    """Bytes that a token takes from a layer, or from one of its experts: the predictor's, and those
    of the named neurons, of which the plan's share that is not in memory weighs more."""
    hidden, neurons = resolved.model.stored_neuron_width, resolved.model.shape.ffn
    rank = fit.weights.rank
    own = matrix_bytes(rank, hidden, precision) + matrix_bytes(neurons, rank, precision)
    segments = resolved.plan.memory.segments
    absent = max(0.0, 1.0 - (segments.hot + segments.cold) / count_ffn_bytes(resolved))
    neuron_bytes = resolved.bundle.neuron_bytes * (1.0 + (FLASH_COST - 1.0) * absent)
    return own + fit.predicted * neurons * neuron_bytes


def name_all(samples: LayerSamples, rank: int) -> Fit:
    """A predictor that names every neuron: of an expert that hardly a token has come to."""
    hidden, neurons = samples.inputs.shape[1], samples.neurons
    weights = Weights(
        np.zeros((rank, hidden), np.float32),
        np.zeros((neurons, rank), np.float32),
        np.ones(neurons, np.float32),
    )
    active = 0.0
    if len(samples):
        _, fired = samples.read(slice(0, len(samples)))
        active = float(fired.mean())
    return Fit(weights=weights, recall=1.0, predicted=1.0, active=active, curve=())
