"""Fits a layer's predictor: score = outer relu(inner u) + bias, active where score >= 0.

It begins with the best linear guess of that rank (`pi2.predictors.guessing`).  The loss is a
cross-entropy in which an active neuron weighs more, by the square root of how rare it is: whole
balance would name far too many.  Adam with a rate that falls to zero, in small batches: what counts
is the number of steps, a few thousand, far more than the number of tokens.  Weights are then
rounded as the store keeps them, and the bias is moved until the wanted share of active neurons
is found in tokens that were not trained on (as PowerInfer's and TurboSparse's predictors are cut).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pi2.arrays import F32, Bits
from pi2.plan.weights.layout import GROUP, Precision, round_up
from pi2.plan.weights.rounding import dequantize, quantize
from pi2.predictors.guessing import guess_weights
from pi2.predictors.samples import LayerSamples

STEPS = 4000
FEWEST_PASSES = 4.0
MOST_PASSES = 16.0
"""More would learn a short text by heart."""
_CHECKED = 2048
"""Tokens whose scores are computed together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Settings of the training."""

    recall: float = 0.97
    """Share of active neurons that is to be found."""
    passes: float | None = None
    """Times that every token is seen; None: as often as makes ``STEPS`` steps, within
    ``FEWEST_PASSES`` and ``MOST_PASSES``."""
    batch: int | None = None
    """Tokens of a step; None: 128, more where the matrices are large, whose steps cost more."""
    rate: float = 6e-3
    check_share: float = 0.1
    """Share of the tokens, the last ones, that the bias is set by."""
    seed: int = 1

    def count_passes(self, tokens: int, rank: int) -> float:
        """Passes over ``tokens`` tokens."""
        if self.passes is not None:
            return self.passes
        wanted = STEPS * self.count_batch(rank) / max(1, tokens)
        return min(max(wanted, FEWEST_PASSES), MOST_PASSES)

    def count_batch(self, rank: int) -> int:
        """Tokens of a step."""
        return max(128, rank // 2) if self.batch is None else self.batch


@dataclass(frozen=True, slots=True)
class Weights:
    """A predictor."""

    inner: F32
    """[rank, hidden]."""
    outer: F32
    """[neurons, rank]."""
    bias: F32
    """[neurons]."""

    @property
    def rank(self) -> int:
        """Rows of ``inner``."""
        return len(self.inner)

    def score(self, inputs: F32) -> F32:
        """Scores [T, neurons] of FFN inputs [T, hidden]."""
        return np.asarray(np.maximum(inputs @ self.inner.T, 0) @ self.outer.T + self.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A fitted predictor and how good it is on the tokens that were kept back."""

    weights: Weights
    recall: float
    predicted: float
    """Share of neurons that it names."""
    active: float
    """Share of neurons that fire."""
    curve: tuple[tuple[float, float], ...]
    """Recall, and the share of neurons that has to be named for it, for other thresholds."""


CURVE = (0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995)


def start_rank(active: float, skew: float, hidden: int) -> int:
    """The first rank to try: the rarer and the more alike the active neurons, the smaller."""
    return int(max(GROUP, round_up(round(hidden * (active + skew) / 6), GROUP)))


def fit_layer(samples: LayerSamples, rank: int, recipe: Recipe, precision: Precision) -> Fit:
    """Train a predictor of ``rank`` (a multiple of 32) and set its bias."""
    assert rank % GROUP == 0
    count = len(samples)
    trained = max(1, count - max(1, round(count * recipe.check_share)))
    _, sample = samples.read(slice(0, min(trained, 8192)))
    shares = sample.mean(axis=0, dtype=np.float64).astype(np.float32)
    mean = float(np.clip(shares.mean(), 1e-4, 0.5))
    weight = np.float32(np.sqrt((1 - mean) / mean))
    odds = np.clip(shares, 1e-4, 0.9)
    inner, outer = guess_weights(samples, trained, rank, recipe.seed)
    weights = Weights(inner, outer, np.log(weight * odds / (1 - odds)))
    weights = _train(samples, trained, weights, weight, recipe)
    return calibrate(samples, slice(trained, count), round_weights(weights, precision), recipe)


def round_weights(weights: Weights, precision: Precision) -> Weights:
    """What is left of the matrices in a store of ``precision``."""

    def rounded(matrix: F32) -> F32:
        packed, scales = quantize(np.ascontiguousarray(matrix), precision)
        return dequantize(packed, scales, matrix.shape[1], precision)

    return Weights(rounded(weights.inner), rounded(weights.outer), weights.bias)


def calibrate(samples: LayerSamples, tokens: slice, weights: Weights, recipe: Recipe) -> Fit:
    """Move the bias by one amount, so that ``recipe.recall`` of the active neurons is found."""
    found: list[F32] = []
    for inputs, active in _read_pieces(samples, tokens):
        found.append(weights.score(inputs)[active])
    scores = np.sort(np.concatenate(found))
    total = (tokens.stop - tokens.start) * samples.neurons
    if not len(scores):
        # Nothing fires: name nothing.
        bias = np.full_like(weights.bias, -1.0)
        empty = Weights(np.zeros_like(weights.inner), np.zeros_like(weights.outer), bias)
        return Fit(weights=empty, recall=1.0, predicted=0.0, active=0.0, curve=())
    wanted = (recipe.recall, *CURVE)
    cuts = np.array([scores[int((1 - recall) * len(scores))] for recall in wanted])
    named = np.zeros(len(cuts), np.int64)
    for inputs, _ in _read_pieces(samples, tokens):
        said = np.sort(weights.score(inputs).reshape(-1))
        named += len(said) - np.searchsorted(said, cuts)
    moved = Weights(weights.inner, weights.outer, weights.bias - cuts[0])
    return Fit(
        weights=moved,
        recall=float((scores >= cuts[0]).mean()),
        predicted=float(named[0] / total),
        active=len(scores) / total,
        curve=tuple(zip(CURVE, (named[1:] / total).tolist(), strict=True)),
    )


def _read_pieces(samples: LayerSamples, tokens: slice) -> Iterator[tuple[F32, Bits]]:
    for start in range(tokens.start, tokens.stop, _CHECKED):
        yield samples.read(slice(start, min(start + _CHECKED, tokens.stop)))


def _train(
    samples: LayerSamples, trained: int, weights: Weights, active_weight: np.float32, recipe: Recipe
) -> Weights:
    """Adam on the weighted cross-entropy over the first ``trained`` tokens."""
    random = np.random.default_rng(recipe.seed)
    batch = min(recipe.count_batch(weights.rank), trained)
    steps = max(1, round(recipe.count_passes(trained, weights.rank) * trained / batch))
    arrays = [weights.inner, weights.outer, weights.bias]
    means = [np.zeros_like(array) for array in arrays]
    squares = [np.zeros_like(array) for array in arrays]
    inner, outer, bias = arrays
    order = random.permutation(trained)
    place = 0
    for step in range(1, steps + 1):
        if place + batch > trained:
            order, place = random.permutation(trained), 0
        inputs, active = samples.read(np.sort(order[place : place + batch]))
        place += batch
        middle = np.maximum(inputs @ inner.T, 0)
        slope = _slope(middle @ outer.T + bias, active, active_weight)
        back = (slope @ outer) * (middle > 0)
        rate = recipe.rate * min(1.0, step / 20) * min(1.0, 1.5 * (1 - (step - 1) / steps))
        gradients = [back.T @ inputs, slope.T @ middle, slope.sum(axis=0)]
        for array, gradient, mean, square in zip(arrays, gradients, means, squares, strict=True):
            _step(array, gradient, mean, square, np.float32(rate), step)
    return Weights(inner, outer, bias)


def _slope(scores: F32, active: Bits, active_weight: np.float32) -> F32:
    """Gradient [T, neurons] of the mean weighted cross-entropy in the scores."""
    np.negative(scores, out=scores)
    np.clip(scores, -60, 60, out=scores)
    np.exp(scores, out=scores)
    scores += 1
    np.reciprocal(scores, out=scores)
    scores -= active
    scores *= np.where(active, active_weight, np.float32(1))
    # Per token, not per score: the matrices would hardly move otherwise.
    scores /= len(scores)
    return scores


def _step(array: F32, gradient: F32, mean: F32, square: F32, rate: np.float32, step: int) -> None:
    """One step of Adam, in place."""
    mean += np.float32(0.1) * (gradient - mean)
    square += np.float32(0.02) * (np.square(gradient) - square)
    size = np.sqrt(square / np.float32(1 - 0.98**step))
    size += np.float32(1e-8)
    array -= rate / np.float32(1 - 0.9**step) * mean / size
