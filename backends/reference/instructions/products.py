"""Activations in 8 bits, and rows of weights of a format."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

import numpy as np

from pi2.arrays import F64, I64
from pi2.backends.blocks.room import describe_order, list_offsets
from pi2.backends.reference.instructions.arguments import Arguments, Array, widen
from pi2.formats import Activations, find_format

_ROOM = 1 << 18
"""Elements of rows that are decoded at a time, at most, and at least a row."""


@cache
def _place_wide(length: int, offsets: tuple[int, ...]) -> I64:
    """Return the places of a token's codes: parts of blocks of 256 begin at ``offsets``."""
    blocks = 256 * np.arange(length // 256)[:, None, None]
    return np.asarray((blocks + np.array(offsets)[:, None] + np.arange(16)).reshape(-1))


@cache
def _place_narrow(length: int, order: int) -> I64:
    """The same of groups of 32 whose halves, or fields, lie together in bundles, the last groups
    excepted."""
    fields, together = order >> 8, order & 255
    whole, places = 32 * (length // 32 // together * together), np.arange(length)
    shape = (fields, 32 * together // fields, 1) if fields else (2, together, 16)
    bundles = places[:whole].reshape(-1, *shape).swapaxes(1, 2)
    return np.concatenate([bundles.reshape(-1), places[whole:]])


class _Codes:
    """Tokens in 8 bits: see `pi2.backends.blocks.elements`."""

    def __init__(
        self, own: Arguments, name: str, length: int, kind: Activations, count: int, skip: int = 0
    ) -> None:
        stride = getattr(own, f"{name}_stride")

        def view(byte: int, dtype: str, each: int) -> Array:
            size = np.dtype(dtype).itemsize
            # Tokens begin at cache lines, and so do planes.
            shape, steps = (count, length // each), (stride // size, 1)
            return own.view(name, shape, steps, dtype=dtype, skip=(skip + byte) // size)

        self.codes = view(0, "int8", 1)
        self.scales = view(length, "float32", 256 if kind == "q8_k" else 32)
        self.view_products = partial(view, length + length // 8, "float32", 32)
        sums = length + length // (64 if kind == "q8_k" else 4)
        wide = [(sums, "int16", 16), (sums + length // 8, "int16", 32)]
        places = wide if kind == "q8_k" else [(sums, "int32", 32)]
        self.view_sums = [partial(view, *place) for place in places]


def quantize_q8_k(own: Arguments) -> None:
    offsets = own.view("order", (16,), dtype="int64")
    _quantize(own, "q8_k", 256, _place_wide(own.length, tuple(offsets.tolist())))


def quantize_q8_0(own: Arguments) -> None:
    _quantize(own, "q8_0", 32, _place_narrow(own.length, own.together))


def _quantize(own: Arguments, kind: Activations, size: int, places: I64) -> None:
    """Quantise blocks of ``size``; scales and codes as in float32 arithmetic."""
    token, block = np.divmod(own.items, own.length // size)
    count, elements = int(token.max(initial=-1)) + 1, np.arange(size)
    at = (token[:, None], block[:, None] * size + elements)
    x = own.view("x", (count, own.length), (own.x_stride, 1))[at]
    y = _Codes(own, "y", own.length, kind, count)
    if is_lower := kind == "q8_0" and own.upper != 0:
        above = _Codes(own, "y", own.length, kind, count, -own.upper)
    most, least = x.max(-1, keepdims=True), x.min(-1, keepdims=True)
    zero, one, top = np.float32(0), np.float32(1), np.float32(127)
    with np.errstate(divide="ignore"):
        if kind == "q8_k":
            extreme = np.where(-least > most, least, most)
            inverse = np.where(extreme == 0, zero, -top / extreme)
            scales = np.where(extreme == 0, zero, one / inverse)
        else:
            extreme = np.abs(x).max(-1, keepdims=True)
            inverse = np.where(extreme == 0, zero, top / extreme)
            scales = extreme / top
            if is_lower:  # a code is worth a 256th of the plane above
                scales = above.scales[token, block][:, None] / np.float32(256)
                inverse = np.where(scales == 0, zero, one / scales)
            elif own.rounds and not own.has_rest:
                scales = scales.astype(np.float16).astype(np.float32)
    codes = np.clip(np.rint(x * inverse), -top, top)
    if own.has_rest:
        rest = own.view("rest", (count, own.length), (own.rest_stride, 1))
        rest[at] = x - codes * scales
    y.codes[token[:, None], places[at[1]]] = codes
    y.scales[token, block] = scales[:, 0]
    for view_sums in y.view_sums:
        sums = view_sums()
        parts = size * y.scales.shape[1] // sums.shape[1]
        each = block[:, None] * (size // parts) + np.arange(size // parts)
        sums[token[:, None], each] = codes.reshape(len(codes), -1, parts).sum(-1)
    if kind == "q8_0":
        products = scales[:, 0] * codes.sum(-1)
        if is_lower:  # the plane above has the sum of both
            above.view_products()[token, block] += products
        y.view_products()[token, block] = 0 if is_lower else products


def read_inputs(own: Arguments, tokens: I64, length: int) -> F64:
    """Return the inputs of products with a format [n, length], their planes added up."""
    assert own.format is not None
    kind, count = find_format(own.format).activations, int(tokens.max(initial=-1)) + 1
    is_many = own.kernel == "multiply_many"
    if kind == "float":
        return widen(own.view("x", (count, length), (own.x_stride // 4, 1))[tokens])
    width = 4 * own.lanes
    if kind == "q8_k":
        name = "" if is_many else own.format
        places = _place_wide(length, tuple(list_offsets(name, width)))
    else:
        places = _place_narrow(length, 1 if is_many else describe_order(own.format, width))
    found = np.zeros((len(tokens), length))
    for plane in range(own.planes):
        x = _Codes(own, "x", length, kind, count, plane * own.plane_stride)
        scales = widen(x.scales[tokens]).repeat(length // x.scales.shape[1], axis=1)
        found += x.codes[tokens][:, places] * scales
    return found


def read_rows(own: Arguments, first: int, end: int, skip: int = 0) -> Iterator[tuple[int, F64]]:
    """Decode rows of weights, ``skip`` bytes behind their address: some at a time, with the number
    of the first."""
    assert own.format is not None
    kind = find_format(own.format)
    size, step = own.blocks * kind.block_bytes, max(1, _ROOM // (own.blocks * kind.block))
    for row in range(first, end, step):
        count = min(step, end - row)
        raw = own.view("weights", (count, size), dtype="uint8", skip=skip + row * size)
        yield row, widen(kind.decode(raw))


def multiply(own: Arguments) -> None:
    """See `pi2.backends.blocks.rows.emit_multiply`; items are rows, or panels of them."""
    rows = own.first, own.last
    if own.kernel == "multiply_many":
        rows = own.first * own.lanes, min(own.last * own.lanes, own.rows)
    for expert, pairs, tokens in list_pairs(own):
        _multiply(own, expert, pairs, tokens, rows)


multiply_few = multiply_many = multiply


def list_pairs(own: Arguments) -> Iterator[tuple[int, I64, I64]]:
    """Experts of a product, with the pairs of each and the tokens that they read."""
    if own.kernel == "multiply_few":
        tokens = np.arange(own.tokens)
        yield 0, tokens, tokens
        return
    if own.kernel == "multiply":
        experts = own.numbers("expert_of", own.tokens)
        read = own.numbers("x_of", own.tokens).astype(np.int64)
        for expert in np.unique(experts).tolist():
            pairs = np.flatnonzero(experts == expert)
            yield expert, pairs, read[pairs]
        return
    starts = own.numbers("starts", own.experts + 1)
    for expert in np.flatnonzero(np.diff(starts)).tolist():
        begin, end = int(starts[expert]), int(starts[expert + 1])
        pairs = own.numbers("pairs", end - begin, skip=begin).astype(np.int64)
        yield expert, pairs, own.numbers("x_of", int(pairs.max()) + 1)[pairs].astype(np.int64)


def _multiply(own: Arguments, expert: int, pairs: I64, tokens: I64, rows: tuple[int, int]) -> None:
    """Multiply rows of an expert's matrix with the tokens of ``pairs``."""
    assert own.format is not None
    length = own.blocks * find_format(own.format).block
    x, scale = read_inputs(own, tokens, length), own.vector("scales", expert + 1)[expert]
    factors = np.full(len(pairs), own.real("factor"))
    targets = own.numbers("y_of", int(pairs.max(initial=-1)) + 1)[pairs]
    if own.has_routes:
        factors *= own.vector("routes", int(pairs.max(initial=-1)) + 1)[pairs]
    y = own.view("y", (int(targets.max(initial=-1)) + 1, rows[1]), (own.y_stride, 1))
    place = int(own.numbers("place_of", expert + 1)[expert])
    for row, weights in read_rows(own, *rows, skip=place * own.expert_bytes):
        part = slice(row, row + len(weights))
        found = x @ weights.T * scale
        if own.has_bias:
            found += own.view("bias", (expert + 1, own.rows))[expert, part]
        for target, values in zip(targets, found * factors[:, None], strict=True):
            y[target, part] = values + (y[target, part] if own.added else 0)


def multiply_turned(own: Arguments) -> None:
    assert own.format is not None
    length = own.blocks * find_format(own.format).block
    for head in range(own.first, own.last):
        shape, skip = (own.tokens, own.rows), head * own.x_each
        x = widen(own.view("x", shape, (own.x_stride, 1), skip=skip))
        total, begin = np.zeros((own.tokens, length)), head * own.each
        for row, weights in read_rows(own, begin, begin + own.rows):
            total += x[:, row - begin :][:, : len(weights)] @ weights
        y = own.view("y", (own.tokens, length), (own.y_stride, 1), skip=head * own.y_each)
        y[...] = total * own.real("factor")


def take_rows(own: Arguments) -> None:
    assert own.format is not None
    y = own.vectors("y", own.blocks * find_format(own.format).block)
    numbers = own.numbers("numbers", len(y), skip=own.first)
    for target, number in zip(y, numbers.tolist(), strict=True):
        ((_, row),) = read_rows(own, number, number + 1)
        target[...] = row[0] * own.real("factor") + (target if own.added else 0)
