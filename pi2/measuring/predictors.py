"""Fits a layer's predictor: score = outer relu(inner u) + bias, active if score >= 0. It starts
from reduced-rank regression: the ``rank / 2`` input directions that explain most, with both signs.
Adam then minimises a cross-entropy that weighs active neurons by the square root of their rarity.
Rounded as in the store, the bias moves until held-out tokens find the wanted share of active
neurons (as PowerInfer's and TurboSparse's predictors do)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pi2.arrays import F16, F32, I64, U8, Bits
from pi2.backends.arithmetic import slice_tensor
from pi2.backends.protocol import BuildRequest
from pi2.backends.reference.neurons import widen
from pi2.engine.layer_model import Routing
from pi2.engine.loaded_model import LoadedModel
from pi2.formats import find_packing
from pi2.measuring.texts import Window, run_windows
from pi2.model.tensor import name_layer_tensor
from pi2.plan.weights.layout import GROUP, Precision, round_up


@dataclass(frozen=True, slots=True)
class LayerSamples:
    """Tokens of one layer, or of one of its experts, on the disk."""

    inputs: F16
    """[tokens, hidden], mapped."""
    packed: U8
    """[tokens, neurons / 8], mapped: a bit per neuron, in stored order."""
    neurons: int

    def __len__(self) -> int:
        return len(self.inputs)

    def cut(self, tokens: int) -> LayerSamples:
        return LayerSamples(self.inputs[:tokens], self.packed[:tokens], self.neurons)

    def read(self, tokens: slice | I64) -> tuple[F32, Bits]:
        """Inputs float32 [n, hidden], and which neurons fired [n, neurons]."""
        bits = np.unpackbits(self.packed[tokens], axis=1, count=self.neurons)
        return self.inputs[tokens].astype(np.float32), bits.view(np.bool_)


class SampleRecorder:
    """An observer of FFNs that keeps everything in ``folder``, per expert in an MoE model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._layers: list[list[LayerSamples]] = []
        self._filled: list[list[int]] = []

    def __call__(
        self, layer: int, inputs: F32, activations: F32, routing: Routing | None = None
    ) -> None:
        active = activations != 0
        for expert in range(len(self._layers[layer])):
            if routing is None:
                self._keep(layer, expert, inputs, active)
                continue
            computes = routing.computes[:, expert]
            mine = active[computes][:, routing.owners == expert]
            self._keep(layer, expert, inputs[computes], mine)

    def _keep(self, layer: int, expert: int, inputs: F32, active: Bits) -> None:
        filled = self._filled[layer]
        rows = slice(filled[expert], filled[expert] + len(inputs))
        samples = self._layers[layer][expert]
        samples.inputs[rows] = inputs
        samples.packed[rows] = np.packbits(active, axis=1)
        filled[expert] = rows.stop

    def record(
        self,
        model: LoadedModel,
        windows: Sequence[Window],
        progress: Callable[[float], None] = lambda share: None,
    ) -> list[list[LayerSamples]]:
        """Run ``windows`` through the observed ``model``; samples of every layer's experts."""
        tokens, document = sum(len(window.tokens) for window in windows), model.plan.model
        neurons, width = document.shape.ffn, document.stored_neuron_width
        for layer in range(document.shape.layers):
            experts = []
            for expert in range(document.expert_count):
                # Parts of the files that are not filled take no disk.
                place = self._folder / f"{layer:03d}-{expert:03d}"
                inputs = np.memmap(f"{place}.inputs", np.float16, "w+", shape=(tokens, width))
                shape = (tokens, -(-neurons // 8))
                packed = np.memmap(f"{place}.active", np.uint8, "w+", shape=shape)
                experts.append(LayerSamples(inputs, packed, neurons))
            self._layers.append(experts)
            self._filled.append([0] * document.expert_count)
        for _ in run_windows(model, windows, progress):
            pass
        return [
            [samples.cut(filled) for samples, filled in zip(experts, counts, strict=True)]
            for experts, counts in zip(self._layers, self._filled, strict=True)
        ]


MOST_TOKENS = 65536
"""More do not change the estimate."""
_PIECE = 4096
_RIDGE = 1e-2
"""Share of the mean variance that is added to every direction's variance."""
_GAIN = 0.5
"""Share of the estimate to begin with: least squares is surer of itself than the loss allows."""
_SPARE = 16
"""Extra directions that help the search to settle."""
_ROUNDS = 3


def guess_weights(samples: LayerSamples, tokens: int, rank: int, seed: int) -> tuple[F32, F32]:
    """``inner`` [rank, hidden] and ``outer`` [neurons, rank] from the first ``tokens`` tokens."""
    covariance, shared, shares = _sum_moments(samples, min(tokens, MOST_TOKENS))
    hidden = len(covariance)
    covariance += np.eye(hidden, dtype=np.float32) * (_RIDGE * np.trace(covariance) / hidden)
    root = np.linalg.cholesky(covariance)
    # Rare neurons count as much as frequent ones.
    spread = np.sqrt(np.maximum(shares * (1 - shares), 1e-4))
    response = np.linalg.solve(root, shared / spread).astype(np.float32)
    directions, answers = _find_directions(response, rank // 2, seed)
    inner = np.linalg.solve(root.T, directions).T.astype(np.float32)
    outer = np.float32(_GAIN) * answers.T
    return (
        np.ascontiguousarray(np.concatenate([inner, -inner])),
        np.ascontiguousarray(np.concatenate([outer, -outer], axis=1)),
    )


def _sum_moments(samples: LayerSamples, tokens: int) -> tuple[F32, F32, F32]:
    """Means of u u^T [hidden, hidden], of u with what fires [hidden, neurons], and of that."""
    hidden = samples.inputs.shape[1]
    covariance = np.zeros((hidden, hidden), np.float32)
    shared = np.zeros((hidden, samples.neurons), np.float32)
    fired = np.zeros(samples.neurons, np.float32)
    for start in range(0, tokens, _PIECE):
        inputs, active = samples.read(slice(start, min(start + _PIECE, tokens)))
        covariance += inputs.T @ inputs
        shared += inputs.T @ active.astype(np.float32)
        fired += active.sum(axis=0)
    count = np.float32(tokens)
    return covariance / count, shared / count, fired / count


def _find_directions(response: F32, wanted: int, seed: int) -> tuple[F32, F32]:
    """The ``wanted`` strongest left directions [hidden, wanted] of ``response``, and their answers
    [wanted, neurons], by subspace iteration."""
    hidden = len(response)
    random = np.random.default_rng(seed)
    width = min(hidden, wanted + _SPARE)
    basis = random.standard_normal((hidden, width), np.float32)
    for _ in range(_ROUNDS):
        basis, _ = np.linalg.qr(response @ (response.T @ basis))
    answers = basis.T @ response
    _, turned = np.linalg.eigh(answers @ answers.T)
    best = turned[:, ::-1][:, :wanted]
    directions, kept = basis @ best, best.T @ answers
    if wanted <= hidden:
        return directions, kept
    # More than there are: the rest begins as noise, small beside the others.
    extra = random.standard_normal((hidden, wanted - width), np.float32)
    noise = random.standard_normal((wanted - width, response.shape[1]), np.float32)
    scale = np.float32(0.1 * np.abs(kept).mean())
    return np.concatenate([directions, extra], axis=1), np.concatenate([kept, scale * noise])


STEPS = 4000
FEWEST_PASSES = 4.0
MOST_PASSES = 16.0
"""More would learn a short text by heart."""
_CHECKED = 2048
"""Tokens whose scores are computed together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    recall: float = 0.97
    """Share of active neurons that is to be found."""
    passes: float | None = None
    """Passes over the tokens; None: `STEPS` steps, within `FEWEST_PASSES` and `MOST_PASSES`."""
    batch: int | None = None
    """Tokens of a step; None: 128, more where the matrices are large, whose steps cost more."""
    rate: float = 6e-3
    check_share: float = 0.1
    """Share of the tokens, the last ones, that the bias is set by."""
    seed: int = 1

    def count_passes(self, tokens: int, rank: int) -> float:
        if self.passes is not None:
            return self.passes
        wanted = STEPS * self.count_batch(rank) / max(1, tokens)
        return min(max(wanted, FEWEST_PASSES), MOST_PASSES)

    def count_batch(self, rank: int) -> int:
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
    """The matrices as a store of ``precision`` has them."""

    def rounded(matrix: F32) -> F32:
        packed, scales = find_packing(precision).quantize(np.ascontiguousarray(matrix))
        return find_packing(precision).dequantize(packed, scales, matrix.shape[1])

    return Weights(rounded(weights.inner), rounded(weights.outer), weights.bias)


def calibrate(samples: LayerSamples, tokens: slice, weights: Weights, recipe: Recipe) -> Fit:
    """Move the bias by one amount until ``recipe.recall`` of the active neurons is found."""
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
            mean += np.float32(0.1) * (gradient - mean)
            square += np.float32(0.02) * (np.square(gradient) - square)
            size = np.sqrt(square / np.float32(1 - 0.98**step)) + np.float32(1e-8)
            array -= np.float32(rate) / np.float32(1 - 0.9**step) * mean / size
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRecall:
    """A layer's neurons over the tokens of a text."""

    active: float
    """Share of neurons with a non-zero activation."""
    predicted: float
    """Share of neurons that the predictor names."""
    recall: float | None
    """Share of active neurons that it names; None if no neuron was active."""


def compute_scores(request: BuildRequest, layer: int, inputs: F32) -> F32:
    """Scores [T, neurons] of a layer's predictors for FFN inputs [T, hidden], of all experts."""
    scores = np.empty((len(inputs), request.neurons), np.float32)
    every = np.arange(request.neurons, dtype=np.int32)
    order = every if request.expert_neurons is None else request.expert_neurons[layer]
    count = request.model.expert_count
    for expert, neurons in enumerate(order.reshape(count, -1)):
        kinds = ("predictor_in", "predictor_out", "predictor_bias")
        whole = (request.tensors[name_layer_tensor(layer, kind)] for kind in kinds)
        weights = Weights(*(widen(slice_tensor(item, expert, count)) for item in whole))
        scores[:, neurons] = weights.score(inputs)
    return scores


def can_compare(request: BuildRequest) -> bool:
    has_predictors = name_layer_tensor(0, "predictor_in") in request.tensors
    return has_predictors and (request.model.moe is None or request.expert_neurons is not None)


class RecallCounter:
    """An observer of FFNs that compares predictors with what neurons do."""

    def __init__(self, request: BuildRequest) -> None:
        """The predictors are taken from ``request``."""
        self.threshold = 0.0
        """Score from which a neuron counts as predicted."""
        self._request = request
        self._counts: dict[int, I64] = {}

    def __call__(
        self, layer: int, inputs: F32, activations: F32, routing: Routing | None = None
    ) -> None:
        predicted = compute_scores(self._request, layer, inputs) >= self.threshold
        active = activations != 0
        possible = active.size
        if routing is not None:
            # Predictors of experts that do not compute a token are not asked.
            computing = routing.computes[:, routing.owners]
            predicted &= computing
            possible = int(computing.sum())
        counts = (possible, active.sum(), predicted.sum(), (active & predicted).sum())
        known = self._counts.setdefault(layer, np.zeros(4, np.int64))
        known += np.array(counts, np.int64)

    def describe_layers(self) -> list[LayerRecall]:
        return [
            LayerRecall(
                active=active / size,
                predicted=predicted / size,
                recall=found / active if active else None,
            )
            for size, active, predicted, found in (
                self._counts[layer].tolist() for layer in sorted(self._counts)
            )
        ]
