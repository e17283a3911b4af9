"""Norms, gates, caps, positions and residual streams."""

from __future__ import annotations

import math

import numpy as np

from pi2.arrays import F32, F64
from pi2.backends.blocks.contract import ACTIVATIONS, NORM_PLACES
from pi2.backends.reference.instructions.arguments import Arguments, widen
from pi2.plan.documents.model_mixing import SMALLEST_SQUARE


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


def activate(name: str, x: F64, limit: float) -> F64:
    """Return an activation of gates; ``limit`` is the threshold of ``fatrelu``."""
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


def gate(own: Arguments) -> None:
    name, limit, offset = ACTIVATIONS[own.kind], own.real("limit"), own.real("up_offset")
    for piece in own.list_pieces():
        gates = widen(own.cut("gates", own.x_stride, piece))
        ups = widen(own.cut("ups", own.x_stride, piece)) if own.has_ups else None
        if name == "swiglu":
            assert ups is not None
            gates, ups = np.minimum(gates, limit), np.clip(ups, -limit, limit)
            active = gates * take_sigmoid(own.real("slope") * gates)
        else:
            active = activate(name, gates, limit)
            if name == "drelu" and ups is not None:
                ups = np.maximum(ups, 0)
        own.cut("y", own.y_stride, piece)[...] = active * (1 if ups is None else ups + offset)


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
        elif own.swapped:
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
