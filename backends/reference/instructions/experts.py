"""Routers, and pairs of tokens and experts."""

from __future__ import annotations

import numpy as np

from pi2.arrays import F64, I64
from pi2.backends.blocks.contract import ROUTERS
from pi2.backends.reference.instructions.arguments import Arguments, widen
from pi2.backends.reference.instructions.elements import take_sigmoid


def _find_best(values: F64, count: int) -> I64:
    """Return the places of the largest ``count`` [T, count]; the first of equal ones wins."""
    return np.argsort(-values, axis=-1, kind="stable")[:, :count]


def route(own: Arguments) -> None:
    scores = widen(own.vectors("scores", own.experts))
    name = ROUTERS[own.kind]
    if name == "mixer":
        chosen, weights = _mix(scores, own.active, own.real("tolerance"))
    else:
        shares = take_sigmoid(scores) if name == "sigmoid" else _take_softmax(scores)
        chosen = _find_best(_find_wanted(own, scores, shares), own.active)
        weights = np.take_along_axis(shares, chosen, -1)
        if own.normalise:
            weights = weights / np.maximum(weights.sum(-1, keepdims=True), 1e-20)
    weights = weights * own.real("scaling")
    if own.has_expert_scale:
        weights = weights * own.vector("expert_scale", own.experts)[chosen]
    own.vectors("weights", own.active, own.active)[...] = weights
    target = own.view("chosen", (own.last, own.active), dtype="int32")
    target[own.first :] = chosen


def _take_softmax(scores: F64) -> F64:
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(shares / shares.sum(-1, keepdims=True))


def _find_wanted(own: Arguments, scores: F64, shares: F64) -> F64:
    """Return the numbers by which experts are chosen."""
    wanted = (scores if own.bias_of_score else shares).copy()
    if own.has_choice_bias:
        wanted += own.vector("choice_bias", own.experts)
    if own.groups > 1:
        parts = wanted.reshape(len(wanted), own.groups, -1)
        best = np.sort(parts, -1)[..., -2 if own.best_two else -1 :].sum(-1)
        left = np.zeros(best.shape, bool)
        np.put_along_axis(left, _find_best(best, own.active_groups), True, -1)
        wanted = np.where(left[..., None], parts, -np.inf).reshape(wanted.shape)
    return wanted


def _mix(scores: F64, active: int, tolerance: float) -> tuple[I64, F64]:
    """Choose one expert after the other by scores; its weight is its share of the softmax of the
    others that are left and not far below."""
    left, chosen, weights = scores.copy(), [], []
    for _ in range(active):
        best = _find_best(left, 1)
        top = np.take_along_axis(left, best, -1)
        is_far = (top - scores) / np.maximum(np.abs(scores), top) > 2 * tolerance
        near = np.where(is_far, -np.inf, left)
        chosen.append(best)
        weights.append(1 / np.exp(near - top).sum(-1, keepdims=True))
        np.put_along_axis(left, best, -np.inf, -1)
    return np.concatenate(chosen, -1), np.concatenate(weights, -1)


def group(own: Arguments) -> None:
    chosen = own.numbers("chosen", own.tokens * own.active)
    own.numbers("pairs", len(chosen))[...] = np.argsort(chosen, kind="stable")
    starts = np.searchsorted(np.sort(chosen), np.arange(own.experts + 1))
    own.numbers("starts", own.experts + 1)[...] = starts


def weigh(own: Arguments) -> None:
    x = own.vectors("x", own.length)
    x[...] = x * take_sigmoid(widen(own.vectors("scores", 1)))


def spread(own: Arguments) -> None:
    y = own.vectors("y", own.length)
    y[...] = 0
    tokens, active = range(own.first, own.last), own.active
    chosen = own.numbers("chosen", own.last * active).reshape(-1, active)
    weights = own.vector("weights", own.last * active).reshape(-1, active)
    for row, token in enumerate(tokens):
        y[row, chosen[token]] = weights[token]
    shared = y[:, own.experts : own.experts + own.shared]
    shared[...] = own.real("factor")
    if own.has_scores:
        shared[...] = shared * take_sigmoid(widen(own.vectors("scores", 1)))
