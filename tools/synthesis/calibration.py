"""Trial runs on a few neurons: what rounding to the stored precisions does to the statistics."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pi2.arrays import F32, Bits
from pi2.formats import find_packing
from pi2.plan.documents.model import Model
from synthesis.blueprint import CONSTANT, RANDOM, TRIAL, Blueprint, Tuning, draw_blueprint
from synthesis.dense import make_predictor_bias, make_predictor_in, spread_loadings
from synthesis.hotness import find_skew
from synthesis.neurons import (
    count_chunk_neurons,
    draw_factors,
    make_gates,
    round_rows,
    scale_groups,
)
from synthesis.randomness import draw_normals
from synthesis.recipe import MOST_SKEW, Recipe, find_least_skew

_TRIAL_TOKENS = 256
_TRIAL_NEURONS = 1024
_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class _Trial:
    """Values [neurons, tokens] of some neurons."""

    gates: F32
    """Gate minus the activation's threshold."""
    ups: F32 | None
    """Up values, where a positive up is needed too."""
    scores: F32 | None
    """Predictor scores, if there are predictors."""

    def find_active(self, shift: float) -> Bits:
        """Neurons that would be active if all biases were larger by ``shift``."""
        active = self.gates + shift > 0
        if self.ups is not None:
            active &= self.ups + shift > 0
        return active


def tune_blueprint(model: Model, recipe: Recipe) -> Blueprint:
    """Return a blueprint under which a sample has the recipe's statistics.

    Rounding makes neurons fire more or less often than their place in the stored order says, which
    blurs the skew, and it makes up and gate more alike; so what is aimed at is corrected by what
    the last trial missed.
    """
    aim = recipe
    for _ in range(_ROUNDS):
        trial = _run_trial(draw_blueprint(model, aim))
        aim = _correct(aim, recipe, trial)
    blueprint = draw_blueprint(model, aim)
    trial = _run_trial(blueprint)
    shift, margin = _solve_shift(trial, recipe.active), 0.0
    if trial.scores is not None:
        scores = trial.scores[trial.find_active(shift)] + shift
        margin = -float(np.quantile(scores, 1 - recipe.recall))
    tuning = Tuning(shift=round(shift, 4), margin=round(margin, 4))
    return replace(blueprint, recipe=recipe, tuning=tuning)


def _correct(aim: Recipe, wanted: Recipe, trial: _Trial) -> Recipe:
    """Move ``aim`` by what ``trial`` missed of ``wanted``."""
    shift = _solve_shift(trial, wanted.active)
    active = trial.find_active(shift)
    # Rounded, so that the last digits of a machine's arithmetic do not show in the bytes.
    skew = round(aim.skew + wanted.skew - find_skew(active.sum(axis=1)), 3)
    agreement = float(active.sum() / (trial.gates + shift > 0).sum())
    return replace(
        aim,
        skew=min(max(skew, find_least_skew(wanted.active)), MOST_SKEW),
        agreement=min(max(round(aim.agreement + wanted.agreement - agreement, 3), 0.4), 1.0),
    )


def _solve_shift(trial: _Trial, active: float) -> float:
    low, high = -1.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        share = float(trial.find_active(middle).mean())
        low, high = (middle, high) if share < active else (low, middle)
    return (low + high) / 2


def _run_trial(blueprint: Blueprint) -> _Trial:
    """Compute a trial layer, number = layers of the model, which no store has."""
    model, layer = blueprint.model, blueprint.model.shape.layers
    hidden = model.shape.hidden
    tokens = draw_normals((_TRIAL_TOKENS, hidden), *blueprint.key(TRIAL)) * np.float32(RANDOM)
    tokens += blueprint.draw_constant() * np.float32(CONSTANT)
    tokens /= np.sqrt(np.mean(np.square(tokens), axis=1, keepdims=True))
    # One chunk's worth of loadings, with the biases of neurons from everywhere in the layer.
    sample = min(_TRIAL_NEURONS, count_chunk_neurons(hidden), model.shape.ffn)
    places = np.linspace(0, model.shape.ffn - 1, sample).round().astype(int)
    shape = model.shape.model_copy(update={"ffn": sample})
    small = replace(
        blueprint,
        model=model.model_copy(update={"shape": shape, "moe": None}),
        biases=blueprint.biases[places],
        tuning=Tuning(),
    )
    directions = small.draw_directions(layer)
    precision = model.quantization.ffn
    rows = make_gates(small, layer, 0, directions)
    gates = round_rows(rows, precision) @ tokens.T
    ups = None
    if model.ffn.activation == "drelu":
        gate = find_packing(precision).quantize(rows)
        up = scale_groups(*gate, draw_factors(small, layer, 0), precision)
        ups = find_packing(precision).dequantize(*up, hidden) @ tokens.T
    if model.ffn.activation == "fatrelu":
        gates -= np.float32(model.ffn.threshold)
    scores = None
    if model.predictor is not None:
        rank, kind = model.predictor.rank, model.quantization.predictor
        fc1 = find_packing(kind).dequantize(
            *find_packing(kind).quantize(make_predictor_in(small, layer, rank)), hidden
        )
        loadings, lengths = small.draw_loadings(layer, 0, sample)
        fc2 = find_packing(kind).dequantize(
            *find_packing(kind).quantize(spread_loadings(loadings * lengths, rank)), rank
        )
        scores = fc2 @ np.maximum(fc1 @ tokens.T, 0)
        scores += make_predictor_bias(small)[:, None]
    return _Trial(gates=gates, ups=ups, scores=scores)
