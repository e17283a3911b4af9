"""Norms, gates, caps, positions, residual streams, and routers of experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from pi2.arrays import F32, F64, I64
from pi2.backends.blocks.contract import ACTIVATIONS, NORM_PLACES, ROUTERS, XIELU_END
from pi2.backends.reference.instructions.arguments import Arguments, widen
from pi2.plan.documents.model_mixing import SMALLEST_SQUARE
from pi2.plan.documents.model_parts import SMALLEST_PRODUCT


def take_sigmoid(x: F64) -> F64:
    """1 / (1 + exp(-x)), without an exponential that overflows."""
    return np.asarray(0.5 * (1 + np.tanh(0.5 * x)))


def scale_to_one(x: F64, epsilon: float) -> F64:
    """Divide vectors by the root of their mean square."""
    return np.asarray(x / np.sqrt(np.square(x).mean(-1, keepdims=True) + epsilon))


def normalize(own: Arguments) -> None:
    x = widen(own.vectors("x", own.length))
    if own.centred:
        x -= x.mean(-1, keepdims=True)
    x = scale_to_one(x, own.real("epsilon"))
    if own.has_weights:
        x *= own.vector("weights", own.length)
    if own.has_bias:
        x += own.vector("bias", own.length)
    y = own.vectors("y", own.length)
    y[...] = x * own.real("factor") + (y if own.added else 0)


def _activate_plain(name: str, x: F64, limit: float) -> F64:
    if name == "silu":
        return x * take_sigmoid(x)
    if name == "gelu_tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        return np.asarray(0.5 * x * (1 + np.tanh(inner)))
    if name == "gelu":
        grown = np.asarray(np.frompyfunc(math.erf, 1, 1)(x * math.sqrt(0.5)), np.float64)
        return 0.5 * x * (1 + grown)
    if name == "fatrelu":
        return np.where(x > limit, x, 0)
    return np.maximum(x, 0) ** (2 if name == "relu2" else 1)


def activate(described: tuple[str, float, float, float], gates: F64, ups: F64 | None) -> F64:
    """Return the activation of gates, times ups if there are any; ``described`` as
    `pi2.plan.documents.model_parts.Ffn.describe_gate` has it."""
    name, limit, slope, offset = described
    if ups is not None and name in ("swiglu", "cut_silu"):
        ups = np.clip(ups, -limit, limit)
    elif ups is not None and name == "drelu":
        ups = np.maximum(ups, 0)
    if name == "swiglu":
        gates = np.minimum(gates, limit)
        active = gates * take_sigmoid(slope * gates)
    elif name == "cut_silu":
        active = np.minimum(gates * take_sigmoid(gates), limit)
    elif name == "xielu":
        below = slope * (np.expm1(np.minimum(gates, XIELU_END)) - gates)
        active = np.where(gates > 0, limit * gates**2, below) + offset * gates
    else:
        active = _activate_plain(name, gates, limit)
    return active * (1 if ups is None else ups + offset)


def gate(own: Arguments) -> None:
    limit, slope, offset = map(own.real, ("limit", "slope", "up_offset"))
    described = ACTIVATIONS[own.kind], limit, slope, offset
    for piece in own.list_pieces():
        gates = widen(own.cut("gates", own.x_stride, piece))
        ups = widen(own.cut("ups", own.x_stride, piece)) if own.has_ups else None
        own.cut("y", own.y_stride, piece)[...] = activate(described, gates, ups)


def cap(own: Arguments) -> None:
    limit = own.real("limit")
    for piece in own.list_pieces():
        x = widen(own.cut("x", own.x_stride, piece)) * own.real("factor")
        if limit > 0:
            x = limit * np.tanh(x / limit)
        elif limit < 0:
            x = np.clip(x, limit, -limit)
        own.cut("y", own.y_stride, piece)[...] = x


def grow(own: Arguments) -> None:
    places = own.numbers("positions", own.last)[own.first :]
    factors = own.vector("factors", int(places.max(initial=0)) + 1)
    x = own.vectors("x", own.length)
    x[...] = x * factors[places][:, None]


def cut(own: Arguments) -> None:
    x = own.vectors("x", own.length)
    wide = widen(x)
    deviation = np.sqrt(wide.var(-1, keepdims=True))
    cutoff = wide.mean(-1, keepdims=True) + own.real("deviations") * deviation
    x[...] = np.maximum(wide - cutoff, 0)


def spread_heads(own: Arguments) -> None:
    token, head = np.divmod(own.items, own.heads)
    shape = int(token.max(initial=-1)) + 1, own.heads, own.head_dim
    x = own.view("x", shape, (own.x_stride, own.head_dim, 1))
    blocks = widen(x[token, head]).reshape(len(token), -1, own.block)
    step = 1
    while step < own.block:
        pairs = blocks.reshape(len(token), -1, 2, step)
        blocks = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2)
        step *= 2
    x[token, head] = blocks.reshape(len(token), -1) / np.sqrt(own.block)


def term(own: Arguments) -> None:
    x, y = own.vectors("x", own.length), own.vectors("y", own.length)
    y[...] = x * own.vector("weights", own.length) if own.has_weights else x + y


def turn(own: Arguments) -> None:
    token, head = np.divmod(own.items, own.heads)
    width, epsilon = own.head_dim, own.real("epsilon")
    whole = own.view(
        "x", (int(token.max(initial=-1)) + 1, own.heads, width), (own.x_stride, width, 1)
    )
    x = widen(whole[token, head])
    if own.norm_place == NORM_PLACES.index("before"):
        x = scale_to_one(x, epsilon) * own.vector("weights", width)
    pairs = own.rotated // 2
    if pairs:
        places = own.numbers("positions", len(whole))[token]
        shape = int(places.max()) + 1, pairs
        cos, sin = (own.view(name, shape, (own.table_stride, 1))[places] for name in ("cos", "sin"))
        low, high = slice(0, pairs), slice(pairs, 2 * pairs)
        if own.neighbours:
            low, high = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
        if own.swapped:
            low, high = high, low
        first, second = x[:, low].copy(), x[:, high].copy()
        x[:, low], x[:, high] = first * cos - second * sin, second * cos + first * sin
    if own.norm_place == NORM_PLACES.index("after"):
        x = scale_to_one(x, epsilon) * own.vector("weights", width)
    whole[token, head] = x


def _take_streams(own: Arguments, name: str) -> F32:
    shape = own.last - own.first, own.count, own.length
    return own.view(name, shape, (own.stride, own.length, 1), skip=own.first * own.stride)


def predict(own: Arguments) -> None:
    x, count = _take_streams(own, "x"), own.count
    factors = own.vectors("factors", count * count).reshape(-1, count, count)
    _take_streams(own, "y")[...] = x + widen(factors) @ x


def correct(own: Arguments) -> None:
    x, y = _take_streams(own, "x"), _take_streams(own, "y")
    change = widen(x[:, :1]) - y[:, :1]
    x[...] = y + change * (1 + own.vectors("factors", own.count)[:, :, None])


def match(own: Arguments) -> None:
    y = _take_streams(own, "y")
    wanted = np.square(widen(own.vectors("x", own.length))).mean(-1)[:, None, None]
    found = np.square(widen(y)).mean(-1, keepdims=True)
    y[...] = y * np.sqrt(wanted / np.maximum(found, SMALLEST_SQUARE))


def mix(own: Arguments) -> None:
    count, epsilon = own.count, own.real("epsilon")
    m, scales = widen(own.vectors("x", count * (count + 2))), widen(own.vector("scales", 3))
    m = m * np.repeat(scales, [count, count, count * count])
    m = m + own.vector("bias", count * (count + 2))
    sizes = 1 / (1 + np.exp(-m[:, : 2 * count]))
    mixed = np.exp(m[:, 2 * count :]).reshape(-1, count, count)
    mixed = mixed / mixed.sum(-1, keepdims=True) + epsilon
    for turn in range(own.rounds):
        for axis in (-1, -2)[turn == 0 :]:
            mixed = mixed / (mixed.sum(axis, keepdims=True) + epsilon)
    read, kept = (np.zeros((len(m), count + 1, count + 1)) for _ in range(2))
    read[:, -1, :-1], read[:, -1, -1] = sizes[:, :count] + epsilon, -1
    kept[:, :-1, :-1] = mixed.swapaxes(1, 2) - np.eye(count)
    kept[:, :-1, -1] = 2 * sizes[:, count:]
    for name, factors in (("read", read), ("kept", kept)):
        own.vectors(name, (count + 1) ** 2)[...] = factors.reshape(len(m), -1)


def _cut_streams(own: Arguments, name: str, piece: tuple[slice, slice]) -> F32:
    tokens, elements = piece
    shape = tokens.stop - tokens.start, own.count, elements.stop - elements.start
    stride = getattr(own, f"{name}_stride")
    skip = tokens.start * stride + elements.start
    return own.view(name, shape, (stride, own.length, 1), skip=skip)


def collapse(own: Arguments) -> None:
    for piece in own.list_pieces():
        x, gates = (widen(_cut_streams(own, name, piece)) for name in ("x", "gates"))
        own.cut("y", own.y_stride, piece)[...] = (x * take_sigmoid(gates)).mean(1)


def inject(own: Arguments) -> None:
    y = _cut_streams(own, "y", (slice(own.first, own.last), slice(0, own.length)))
    factors = 2 * take_sigmoid(widen(own.vectors("weights", own.count)))
    y[...] = y + factors[:, :, None] * own.vectors("x", own.length)[:, None]


def admit(own: Arguments) -> None:
    token, stream = np.divmod(own.items, own.count)
    span = slice(0, int(token.max(initial=-1)) + 1), slice(0, own.length)
    keys, queries = (
        widen(_cut_streams(own, name, span)[token, stream]) for name in ("keys", "queries")
    )
    size = (keys * queries).sum(-1) / math.sqrt(own.length)
    factors = take_sigmoid(np.sign(size) * np.sqrt(np.maximum(np.abs(size), SMALLEST_PRODUCT)))
    values = own.cut("values", own.values_stride, span)[token]
    _cut_streams(own, "y", span)[token, stream] = factors[:, None] * values


def _find_best(values: F64, count: int) -> I64:
    """Return the places of the largest ``count`` [T, count]; the first of equal ones wins."""
    return np.argsort(-values, axis=-1, kind="stable")[:, :count]


def route(own: Arguments) -> None:
    scores = widen(own.vectors("scores", own.experts))
    name = ROUTERS[own.kind]
    if name == "mixer":
        chosen, weights = _mix(scores, own.active, own.real("tolerance"))
    else:
        shares = _SHARES[name](scores)
        if own.has_table:
            tokens = own.numbers("numbers", own.last)[own.first :]
            table = own.view("table", (int(tokens.max(initial=-1)) + 1, own.active))
            chosen = table[tokens].astype(np.int64)
        else:
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


_SHARES: Mapping[str, Callable[[F64], F64]] = {
    "softmax": _take_softmax,
    "sigmoid": take_sigmoid,
    "root_softplus": lambda scores: np.asarray(np.sqrt(np.logaddexp(0, scores))),
}


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
