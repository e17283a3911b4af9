"""Activations in 8 bits, as llama.cpp has them.

A token is one stretch: codes int8 [length]; then, per 256 (``q8_k``), scales float32, sums of 16
codes and of 32 codes int16; or, per 32 (``q8_0``), scales float32 that are fp16 numbers, those
times the sums of codes, and the sums int32.  Codes of a block of 256 may stand in another order, 16
by 16, which formats choose; of groups of 32, the first halves of several may lie together, and then
the second ones.
"""

from __future__ import annotations

from tvm.tirx.script import builder as T

from pi2.backends.blocks.tables import Table
from pi2.backends.compiler import vectors as v
from pi2.formats import Activations


def emit_quantize(kind: Activations, table: Table) -> None:
    """Quantise tokens, block by block: items are blocks of all tokens."""
    x, y = table.take_array("x", "float32"), table.take_array("y", "uint8")
    x_stride, y_stride, length = (
        table.take("x_stride"),
        table.take("y_stride"),
        table.take("length"),
    )
    order = table.take_array("order", "int64") if kind == "q8_k" else None
    together = table.take("together") if kind == "q8_0" else None
    rest = _Rest(table)
    size = 256 if kind == "q8_k" else 32
    blocks = v.let(length // size)
    with T.serial(table.first, table.end) as item:
        token = v.let(item // blocks)
        number = v.let(item - token * blocks)
        source = v.let(token * x_stride + number * size)
        target = v.let(token * y_stride)
        rest.begin(token, number * size)
        if kind == "q8_k":
            _emit_wide(x, y, order, rest, source, target, number, length)
        else:
            _emit_narrow(x, y, together, rest, source, target, number, length)


class _Rest:
    """What rounding leaves, for another plane of codes."""

    def __init__(self, table: Table) -> None:
        self._array, self._is_kept = table.take_array("rest", "float32"), table.take("has_rest")
        self._stride = table.take("rest_stride")

    def begin(self, token: v.Expr, element: v.Expr) -> None:
        """Say of which elements the following is."""
        self._start = v.let(token * self._stride + element)

    def put(
        self, place: v.Expr | int, value: v.Expr, codes: v.Expr, scale: v.Expr, lanes: int
    ) -> None:
        """Keep what ``codes`` times their scale lack of values."""
        with T.If(self._is_kept != T.int64(0)), T.Then():
            taken = v.cast(codes, "float32", lanes) * v.splat(scale, lanes)
            v.store(self._array, self._start + place, value - taken, lanes)


def _store_as(buffer: v.Buffer, byte: v.Expr, value: v.Expr, lanes: int, size: int) -> None:
    """Store numbers of some type into bytes."""
    v.store(buffer, byte, v.reinterpret(value, "uint8", lanes * size), lanes * size)


def _round(value: v.Expr, lanes: int) -> v.Expr:
    """Round to the nearest whole number, int32: halves to even."""
    magic = v.constant(12582912.0, "float32", lanes)
    bits = v.reinterpret(value + magic, "int32", lanes)
    return (bits & v.constant(0x007FFFFF, "int32", lanes)) - v.constant(0x400000, "int32", lanes)


def _emit_wide(
    x: v.Buffer,
    y: v.Buffer,
    order: v.Buffer,
    rest: _Rest,
    source: v.Expr,
    target: v.Expr,
    number: v.Expr,
    length: v.Expr,
) -> None:
    lanes = 16
    largest = v.Cell(v.load(x, source, lanes))
    least = v.Cell(v.load(x, source, lanes))
    with T.serial(1, T.int64(256 // lanes)) as piece:
        value = v.let(v.load(x, source + piece * lanes, lanes))
        largest.set(T.max(largest.get(), value))
        least.set(T.min(least.get(), value))
    top = v.let(v.find_largest(largest.get(), "float32", lanes))
    bottom = v.let(
        T.float32(0.0)
        - v.find_largest(v.constant(0.0, "float32", lanes) - least.get(), "float32", lanes)
    )
    # The scale has the sign of the number that is farthest from 0, so that its code is -127.
    extreme = v.let(T.Select(T.float32(0.0) - bottom > top, bottom, top))
    is_zero = extreme == T.float32(0.0)
    inverse = v.let(T.Select(is_zero, T.float32(0.0), T.float32(-127.0) / extreme))
    scale = v.let(T.Select(is_zero, T.float32(0.0), T.float32(1.0) / inverse))
    _store_as(y, target + length + number * 4, scale, 1, 4)
    sums = v.let(target + length + length // 64 + number * 32)
    pairs = v.let(target + length + length // 64 + length // 8 + number * 16)
    with T.serial(T.int64(8)) as pair:
        total = v.Cell(T.int32(0))
        for half in range(2):
            piece = v.let(pair * 2 + half)
            value = v.let(v.load(x, source + piece * lanes, lanes))
            codes = v.let(_round(value * v.splat(inverse, lanes), lanes))
            codes = v.let(T.min(codes, v.constant(127, "int32", lanes)))
            rest.put(piece * lanes, value, codes, scale, lanes)
            place = v.let(target + number * 256 + order[piece])
            _store_as(y, place, v.cast(codes, "int8", lanes), lanes, 1)
            own = v.let(v.add_lanes(codes, "int32", lanes))
            _store_as(y, sums + piece * 2, v.cast(own, "int16", 1), 1, 2)
            total.set(total.get() + own)
        _store_as(y, pairs + pair * 2, v.cast(total.get(), "int16", 1), 1, 2)


def _emit_narrow(
    x: v.Buffer,
    y: v.Buffer,
    together: v.Expr,
    rest: _Rest,
    source: v.Expr,
    target: v.Expr,
    number: v.Expr,
    length: v.Expr,
) -> None:
    lanes = 16
    # Halves of groups lie together but for those of the last groups, which fill no register.
    bundle = v.let(number // together)
    is_bundled = v.let((bundle + 1) * together <= length // 32)
    own = v.let(number - bundle * together)
    begin = v.let(T.Select(is_bundled, (bundle * together) * 32 + own * lanes, number * 32))
    step = v.let(T.Select(is_bundled, together * lanes, T.int64(lanes)))
    halves = [v.let(v.load(x, source + k * lanes, lanes)) for k in range(2)]
    sizes = v.let(T.max(T.abs(halves[0]), T.abs(halves[1])))
    top = v.let(v.find_largest(sizes, "float32", lanes))
    scale = v.let(top / T.float32(127.0))
    inverse = v.let(T.Select(top == T.float32(0.0), T.float32(0.0), T.float32(127.0) / top))

    def round_half(value: v.Expr) -> v.Expr:
        return v.let(v.cast(v.cast(value, "float16", 1), "float32", 1))

    scale = round_half(scale)
    total = v.Cell(T.int32(0))
    for index, half in enumerate(halves):
        codes = v.let(_round(half * v.splat(inverse, lanes), lanes))
        rest.put(index * lanes, half, codes, scale, lanes)
        place = v.let(target + begin + step * index)
        _store_as(y, place, v.cast(codes, "int8", lanes), lanes, 1)
        total.set(total.get() + v.add_lanes(codes, "int32", lanes))
    summed = v.let(total.get())
    at = v.let(number * 4)
    _store_as(y, target + length + at, scale, 1, 4)
    product = scale * v.cast(summed, "float32", 1)
    _store_as(y, target + length + length // 8 + at, product, 1, 4)
    _store_as(y, target + length + length // 4 + at, summed, 1, 4)
