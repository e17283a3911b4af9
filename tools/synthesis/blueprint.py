"""Everything about a synthetic model that is small: directions, biases and magnitudes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pi2.arrays import F32, F64, I32
from pi2.plan.documents.model import Model
from pi2.plan.weights.layout import GROUP
from synthesis.hotness import (
    find_biases,
    find_paired_biases,
    normal_cdf,
    solve_chances,
    solve_pair_spread,
    solve_shared_part,
)
from synthesis.randomness import draw_integers, draw_normals, draw_permutation, draw_signs
from synthesis.recipe import Recipe
from synthesis.routers import solve_correlation, solve_deviation, spread_popularity

CONSTANT = math.sqrt(0.5)
"""a: part of the residual stream that all tokens share."""
RANDOM = math.sqrt(1 - CONSTANT**2)
"""s: part that a token adds."""
STREAM = 8.0
"""Root mean square of the residual stream; its scale is free, and this keeps the fp16 scales of
small outputs away from the smallest numbers."""
OUTPUT_SHARE = 0.01
"""Magnitude of what a layer's attention, and its FFN, add to the residual stream."""
MOST_LATENTS = 256
"""Random directions of a layer; predictors of a higher rank hold some of them several times."""

GUESSED_NOISE = 0.12
"""Deviation of a gate that comes from rounding its weights to int4."""

_DIRECTION_DEVIATION, _DIRECTION_BOUND = 8.0, 31
_LOADING_DEVIATION, _LOADING_BOUND = 32.0, 127

# Streams of random numbers.
SIGNS, DIRECTIONS, SHARED, LOADINGS, FACTORS, UP, DOWN = range(7)
ORDER, ATTENTION, EMBEDDING, NORM, TRIAL, ROUTER, POPULARITY = range(7, 14)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What trial runs have found (`synthesis.calibration`)."""

    shift: float = 0.0
    """Added to all biases, so that the mean share of active neurons is right after rounding."""
    margin: float = 0.0
    """Added to all predictor biases, so that the recall is right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """A model document, a recipe, and what follows from them: see `draw_blueprint`."""

    model: Model
    recipe: Recipe
    latents: int
    """K: random directions of a layer."""
    biases: F64
    """Mean of the gate of every neuron of an expert in deviations, [ffn], hottest first, before
    ``tuning``."""
    shared_weight: float
    """Part of a gate that all neurons share."""
    factor_deviation: float
    """dReLU: deviation of the factors that make a gate's scales into those of the up row."""
    popularity: tuple[float, ...] = ()
    """Deviation of what a layer's experts have beside random scores, of each layer; none where all
    are alike."""
    correlation: float = 0.0
    """Of what tokens t and t + 1 of the vocabulary add to the residual stream."""
    tuning: Tuning = Tuning()

    def key(self, stream: int, *numbers: int) -> tuple[int, ...]:
        """Names a stream of random numbers of this model."""
        return (self.recipe.seed, stream, *numbers)

    def draw_constant(self) -> F32:
        """c: +-1, float32 [hidden]."""
        return draw_signs(self.model.shape.hidden, *self.key(SIGNS))

    def draw_directions(self, layer: int) -> F32:
        """B: whole numbers, float32 [latents, hidden]; the first is the same in all layers.

        Every group of 32 is orthogonal to c, because its halves are each other's opposite times c:
        so a bias is not disturbed however a row's groups are scaled.
        """
        groups = self.model.shape.hidden // GROUP
        half = draw_integers(
            (self.latents, groups, 1, GROUP // 2),
            _DIRECTION_DEVIATION,
            _DIRECTION_BOUND,
            *self.key(DIRECTIONS, layer),
        )
        half[0] = draw_integers(
            (groups, 1, GROUP // 2), _DIRECTION_DEVIATION, _DIRECTION_BOUND, *self.key(SHARED)
        )
        both = np.concatenate([half, -half], axis=2).reshape(self.latents, -1)
        return np.asarray(both * self.draw_constant())

    @property
    def direction_scale(self) -> float:
        """What makes a row of B times u a standard normal variable."""
        return 1 / (_DIRECTION_DEVIATION * math.sqrt(self.model.shape.hidden) * RANDOM)

    def draw_loadings(self, layer: int, chunk: int, neurons: int) -> tuple[F32, F32]:
        """A of ``neurons`` neurons: whole numbers float32 [neurons, latents], and float32
        [neurons, 1] that makes their length 1."""
        weight = self.shared_weight
        loadings = draw_integers(
            (neurons, self.latents),
            _LOADING_DEVIATION,
            _LOADING_BOUND,
            *self.key(LOADINGS, layer, chunk),
        )
        others = _LOADING_DEVIATION * math.sqrt(self.latents - 1)
        loadings[:, 0] = round(others * weight / math.sqrt(1 - weight**2))
        # Whole numbers again: the sum does not depend on the order of additions.
        squares = np.einsum("nk,nk->n", loadings, loadings, dtype=np.float64)
        return loadings, (1 / np.sqrt(squares)).astype(np.float32)[:, None]

    @property
    def layer_biases(self) -> F64:
        """``biases`` of the neuron at every stored place of a layer: experts take turns, so that
        the order is by hotness."""
        return np.repeat(self.biases, self.model.expert_count)

    def list_experts(self, first: int, count: int) -> I32:
        """Experts of the neurons at stored places from ``first`` on, int32 [count]."""
        return (np.arange(first, first + count) % self.model.expert_count).astype(np.int32)

    def draw_original(self, layer: int) -> I32:
        """Index in the pretended checkpoint of the neuron at every stored place, int32 [neurons];
        those of a mixture are numbered through its experts."""
        experts, ffn = self.model.expert_count, self.model.shape.ffn
        if experts == 1:
            return draw_permutation(ffn, *self.key(ORDER, layer))
        orders = [draw_permutation(ffn, *self.key(ORDER, layer, n)) for n in range(experts)]
        numbered = np.stack(orders, axis=1) + np.arange(experts, dtype=np.int32) * np.int32(ffn)
        return np.ascontiguousarray(numbered.reshape(-1), np.int32)

    def draw_router(self, layer: int) -> F32:
        """Rows float32 [experts, hidden] whose products with u are normal and know nothing of each
        other; their means are the experts' popularity, or 0, where all are alike."""
        groups = self.model.shape.hidden // GROUP
        half = draw_normals(
            (self.model.expert_count, groups, 1, GROUP // 2), *self.key(ROUTER, layer)
        )
        # Orthogonal to c, as the directions are.
        both = np.concatenate([half, -half], axis=2).reshape(len(half), -1)
        scale = np.float32(1 / (math.sqrt(self.model.shape.hidden) * RANDOM))
        rows = np.asarray(both * self.draw_constant() * scale)
        if not self.popularity:
            return rows
        means = spread_popularity(len(rows), self.popularity[layer], *self.key(POPULARITY, layer))
        constant = self.draw_constant() / np.float32(CONSTANT * self.model.shape.hidden)
        return rows + means[:, None] * constant

    def draw_token_parts(self, first: int, count: int) -> F32:
        """n of tokens ``first``, ``first + 1``, ...: standard normal, float32 [count, hidden].

        Each is correlated with the one before it as the recipe says.
        """
        hidden, correlation = self.model.shape.hidden, self.correlation
        if correlation == 0.0:
            return np.concatenate(
                [_draw_token(self, token)[None] for token in range(first, first + count)]
            )
        # What lies further back than this has no weight left in float32.
        reach = math.ceil(math.log(1e-9) / math.log(correlation))
        fresh = np.float32(math.sqrt(1 - correlation**2))
        part = np.zeros(hidden, np.float32)
        parts = np.empty((count, hidden), np.float32)
        for token in range(max(0, first - reach), first + count):
            new = _draw_token(self, token)
            part = new if token == 0 else np.float32(correlation) * part + fresh * new
            if token >= first:
                parts[token - first] = part
        return parts

    def find_output_deviation(self) -> float:
        """Deviation of down weights at which an FFN adds `OUTPUT_SHARE` to the stream."""
        if self.model.ffn.sub_norm:
            return STREAM * OUTPUT_SHARE / math.sqrt(self.model.layer_neurons)
        # Gates are normal with mean b and deviation 1: the moments of their positive part.
        b, p = self.biases, normal_cdf(self.biases)
        density = np.exp(-0.5 * b**2) / math.sqrt(2 * math.pi)
        if self.model.ffn.activation in ("drelu", "relu2"):
            squares = (b**4 + 6 * b**2 + 3) * p + (b**3 + 5 * b) * density
        else:
            squares = (b**2 + 1) * p + b * density
        return STREAM * OUTPUT_SHARE / math.sqrt(float(squares.sum()))


def draw_blueprint(model: Model, recipe: Recipe) -> Blueprint:
    """Work out what ``recipe`` means for ``model``."""
    rank = 2 * model.shape.hidden if model.predictor is None else model.predictor.rank
    latents = max(2, min(rank // 2, MOST_LATENTS, model.shape.hidden // 2))
    chances = solve_chances(model.shape.ffn, recipe.active, recipe.skew)
    single = find_biases(chances)
    spread, biases = 0.0, single
    popularity, correlation = _solve_routing(model, recipe)
    if model.ffn.activation == "drelu":
        spread = solve_pair_spread(chances, recipe.agreement)
        biases = find_paired_biases(chances, spread)
    return Blueprint(
        model=model,
        recipe=recipe,
        latents=latents,
        biases=biases,
        shared_weight=solve_shared_part(single, recipe.variation, latents, GUESSED_NOISE),
        factor_deviation=spread,
        popularity=popularity,
        correlation=correlation,
    )


def _solve_routing(model: Model, recipe: Recipe) -> tuple[tuple[float, ...], float]:
    """Popularity of each layer, and correlation of tokens."""
    routing, moe = recipe.routing, model.moe
    if routing is None or moe is None:
        return (), recipe.correlation
    sizes = moe.experts, moe.active_experts
    layers = range(model.shape.layers)
    deviations = tuple(solve_deviation(*sizes, routing.find_popular(layer)) for layer in layers)
    if recipe.correlation:
        return deviations, recipe.correlation
    mean = sum(deviations) / len(deviations)
    return deviations, solve_correlation(*sizes, mean, routing.reuse)


def _draw_token(blueprint: Blueprint, token: int) -> F32:
    return draw_normals((blueprint.model.shape.hidden,), *blueprint.key(EMBEDDING, token))
