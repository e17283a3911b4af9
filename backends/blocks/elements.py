"""Norms, gates and caps: kernels that take a token's elements one by one.

Activations in 8 bits, as llama.cpp has them.

A token is contiguous: codes int8 [length]; then, per 256 (``q8_k``), scales float32, sums of 16
codes and of 32 codes int16; or, per 32 (``q8_0``), scales float32, which ``rounds`` makes fp16
numbers, their products with the sums of codes, and the sums int32. Codes of a block of 256 may have
another order, 16 by 16, which formats choose. Of groups of 32, the first halves of several may come
together, and then the second ones; or every fourth or eighth code of them (`room.FIELDS`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tvm.tirx import Shuffle
from tvm.tirx.script import builder as T

from pi2.backends.blocks.contract import ACTIVATIONS, NORM_PLACES, PIECE, XIELU_END
from pi2.backends.blocks.machine import Table, pick
from pi2.backends.compiler import vectors as v
from pi2.formats import Activations


def emit_quantize(kind: Activations, table: Table) -> None:
    """Quantise tokens, block by block: items are blocks of all tokens."""
    size, emit = (256, _emit_wide) if kind == "q8_k" else (32, _emit_narrow)
    blocks = v.let(table.length // size)
    with T.serial(table.first, table.end) as item:
        token = v.let(item // blocks)
        number = v.let(item - token * blocks)
        emit(_Block(table, token, number, size))


emit_quantize_q8_k = partial(emit_quantize, "q8_k")
emit_quantize_q8_0 = partial(emit_quantize, "q8_0")


class _Block:
    """Block ``number`` of a token, of ``size`` elements: its first element, its token's first byte,
    and where what codes lack is kept."""

    def __init__(self, table: Table, token: v.Expr, number: v.Expr, size: int) -> None:
        self.table, self.number = table, number
        self.source = v.let(token * table.x_stride + number * size)
        self.target = v.let(token * table.y_stride)
        self._rest = v.let(token * table.rest_stride + number * size)

    def keep_rest(
        self, place: v.Expr | int, value: v.Expr, codes: v.Expr, scale: v.Expr, lanes: int
    ) -> None:
        """Keep what ``codes`` times their scale lack of values."""
        with T.If(self.table.has_rest != T.int64(0)), T.Then():
            taken = v.cast(codes, "float32", lanes) * v.splat(scale, lanes)
            v.store(self.table.rest, self._rest + place, value - taken, lanes)


def _store_as(buffer: v.Buffer, byte: v.Expr, value: v.Expr, lanes: int, size: int) -> None:
    v.store(buffer, byte, v.reinterpret(value, "uint8", lanes * size), lanes * size)


def round_half_even(value: v.Expr, lanes: int) -> v.Expr:
    """Round to the nearest whole number, int32: halves to even."""
    magic = v.constant(12582912.0, "float32", lanes)
    bits = v.reinterpret(value + magic, "int32", lanes)
    return (bits & v.constant(0x007FFFFF, "int32", lanes)) - v.constant(0x400000, "int32", lanes)


def _emit_wide(block: _Block) -> None:
    x, y, source, target = block.table.x, block.table.y, block.source, block.target
    number, length, lanes = block.number, block.table.length, 16
    largest = v.Cell(v.load(x, source, lanes))
    least = v.Cell(v.load(x, source, lanes))
    with T.serial(1, T.int64(256 // lanes)) as piece:
        value = v.let(v.load(x, source + piece * lanes, lanes))
        largest.set(T.max(largest.get(), value))
        least.set(T.min(least.get(), value))
    top = v.let(v.find_largest(largest.get(), lanes))
    bottom = v.let(
        T.float32(0.0) - v.find_largest(v.constant(0.0, "float32", lanes) - least.get(), lanes)
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
            codes = v.let(round_half_even(value * v.splat(inverse, lanes), lanes))
            codes = v.let(T.min(codes, v.constant(127, "int32", lanes)))
            block.keep_rest(piece * lanes, value, codes, scale, lanes)
            place = v.let(target + number * 256 + block.table.order[piece])
            _store_as(y, place, v.cast(codes, "int8", lanes), lanes, 1)
            own = v.let(v.add_lanes(codes, "int32", lanes))
            _store_as(y, sums + piece * 2, v.cast(own, "int16", 1), 1, 2)
            total.set(total.get() + own)
        _store_as(y, pairs + pair * 2, v.cast(total.get(), "int16", 1), 1, 2)


def _emit_narrow(block: _Block) -> None:
    x, y, source, target = block.table.x, block.table.y, block.source, block.target
    number, length, lanes = block.number, block.table.length, 16
    # Halves or fields of groups lie together but for the last groups, which fill no register.
    order = block.table.together
    fields, together = v.let(order // 256), v.let(order % 256)
    bundle = v.let(number // together)
    is_bundled = v.let((bundle + 1) * together <= length // 32)
    own = v.let(number - bundle * together)
    begin = v.let(T.Select(is_bundled, (bundle * together) * 32 + own * lanes, number * 32))
    step = v.let(T.Select(is_bundled, together * lanes, T.int64(lanes)))
    taken = v.let(T.Select(is_bundled, fields, T.int64(0)))
    halves = [v.let(v.load(x, source + k * lanes, lanes)) for k in range(2)]
    sizes = v.let(T.max(T.abs(halves[0]), T.abs(halves[1])))
    top = v.let(v.find_largest(sizes, lanes))
    # A code of a lower plane is worth a 256th of the plane above.
    upper, at = block.table.upper, v.let(number * 4)
    is_lower = upper != T.int64(0)
    above = v.let(v.load_as(y, target - upper + length + at, "float32", 1) * T.float32(1 / 256))
    exact = v.let(T.Select(is_lower, above, top / T.float32(127.0)))
    per_unit = T.Select(is_lower, T.float32(1.0) / above, T.float32(127.0) / top)
    inverse = v.let(T.Select(exact == T.float32(0.0), T.float32(0.0), per_unit))
    rounded = v.cast(v.cast(exact, "float16", 1), "float32", 1)
    is_rounded = T.And(block.table.rounds != T.int64(0), block.table.has_rest == T.int64(0))
    scale = v.let(T.Select(is_rounded, rounded, exact))
    total = v.Cell(T.int32(0))
    for index, half in enumerate(halves):
        codes = v.let(round_half_even(half * v.splat(inverse, lanes), lanes))
        least = v.constant(-127, "int32", lanes)
        codes = v.let(T.max(T.min(codes, v.constant(127, "int32", lanes)), least))
        block.keep_rest(index * lanes, half, codes, scale, lanes)
        narrow = v.let(v.cast(codes, "int8", lanes))
        with T.If(taken == T.int64(0)), T.Then():
            _store_as(y, v.let(target + begin + step * index), narrow, lanes, 1)
        for count in (4, 8):
            with T.If(taken == T.int64(count)), T.Then():
                first = v.let(bundle * together * 32 + (own * 2 + index) * (lanes // count))
                apart = v.let(together * 32 // count)
                for field in range(count):
                    bytes_ = pick(narrow, lanes, range(field, lanes, count))
                    place = v.let(target + first + apart * field)
                    _store_as(y, place, v.let(bytes_), lanes // count, 1)
        total.set(total.get() + v.add_lanes(codes, "int32", lanes))
    summed = v.let(total.get())
    _store_as(y, target + length + at, scale, 1, 4)
    # llama.cpp rounds it to fp16, which ends at 65,504.
    product = v.Cell(scale * v.cast(summed, "float32", 1))
    place = v.let(target + length + length // 8 + at)
    with T.If(is_lower), T.Then():  # the plane above has the sum of both
        whole = v.let(product.get() + v.load_as(y, place - upper, "float32", 1))
        _store_as(y, place - upper, whole, 1, 4)
        product.set(T.float32(0.0))
    _store_as(y, place, product.get(), 1, 4)
    _store_as(y, target + length + length // 4 + at, summed, 1, 4)


_LANES = 16


def walk(first: v.Expr, end: v.Expr, emit: Callable[[v.Expr, int], None]) -> None:
    """Emit a loop over elements, `_LANES` at a time, and one over the rest."""
    whole = v.let((end - first) // _LANES)
    with T.serial(whole) as block:
        emit(v.let(first + block * _LANES), _LANES)
    with T.serial(first + whole * _LANES, end) as element:
        emit(element, 1)


def add_up(first: v.Expr, end: v.Expr, read: Callable[[v.Expr, int], v.Expr]) -> v.Expr:
    """Return the sum of what ``read`` gives for elements."""
    wide, rest = v.Cell(v.constant(0.0, "float32", _LANES)), v.Cell(T.float32(0.0))

    def emit(place: v.Expr, lanes: int) -> None:
        cell = wide if lanes > 1 else rest
        cell.set(cell.get() + read(place, lanes))

    walk(first, end, emit)
    return v.let(v.add_lanes(wide.get(), "float32", _LANES) + rest.get())


def add_squares(x: v.Buffer, base: v.Expr, length: v.Expr, mean: v.Expr | None = None) -> v.Expr:
    """Return the sum of the squares of elements from ``base`` on, less ``mean``."""

    def square(place: v.Expr, lanes: int) -> v.Expr:
        value = v.load(x, base + place, lanes)
        value = v.let(value if mean is None else value - v.splat(mean, lanes))
        return value * value

    return add_up(T.int64(0), length, square)


def scale_to_one(
    x: v.Buffer,
    base: v.Expr,
    width: v.Expr,
    epsilon: v.Expr,
    put: Callable[[v.Expr, v.Expr, int], None],
) -> None:
    """Give ``put`` places and elements from ``base`` on, divided by the root of their mean
    square."""
    mean = add_squares(x, base, width) / T.cast(width, "float32")
    scale = v.let(T.float32(1.0) / T.sqrt(mean + epsilon))

    def emit(element: v.Expr, lanes: int) -> None:
        put(element, v.load(x, base + element, lanes) * v.splat(scale, lanes), lanes)

    walk(T.int64(0), width, emit)


def emit_normalize(table: Table) -> None:
    """RMSNorm, or LayerNorm where ``centred``; the result replaces y, or is added to it."""
    zero = T.int64(0)
    with T.serial(table.first, table.end) as token:
        source, target = v.let(token * table.x_stride), v.let(token * table.y_stride)
        count = v.let(T.cast(table.length, "float32"))
        mean = v.Cell(T.float32(0.0))
        with T.If(table.centred != zero), T.Then():
            mean.set(
                add_up(zero, table.length, lambda p, n: v.load(table.x, source + p, n)) / count
            )
        own = v.let(mean.get())

        squares = add_squares(table.x, source, table.length, own)
        scale = v.let(T.float32(1.0) / T.sqrt(squares / count + table.epsilon))

        def emit(place: v.Expr, lanes: int) -> None:
            value = (v.load(table.x, source + place, lanes) - v.splat(own, lanes)) * v.splat(
                scale, lanes
            )
            cell = v.Cell(value)
            with T.If(table.has_weights != zero), T.Then():
                cell.set(cell.get() * v.load(table.weights, place, lanes))
            with T.If(table.has_bias != zero), T.Then():
                cell.set(cell.get() + v.load(table.bias, place, lanes))
            result = v.let(cell.get() * v.splat(table.factor, lanes))
            cell.set(result)
            with T.If(table.added != zero), T.Then():
                cell.set(result + v.load(table.y, target + place, lanes))
            v.store(table.y, target + place, cell.get(), lanes)

        walk(zero, table.length, emit)


def split_item(item: v.Expr, length: v.Expr) -> tuple[v.Expr, v.Expr, v.Expr]:
    pieces = v.let((length + PIECE - 1) // PIECE)
    token = v.let(item // pieces)
    first = v.let((item - token * pieces) * PIECE)
    return token, first, v.let(T.min(first + PIECE, length))


def emit_gate(table: Table) -> None:
    """``y`` = activation(gates) x ups, or activation(gates)."""
    with T.serial(table.first, table.end) as item:
        token, first, end = split_item(item, table.length)
        source, target = v.let(token * table.x_stride), v.let(token * table.y_stride)
        for number, name in enumerate(ACTIVATIONS):

            def emit(place: v.Expr, lanes: int, name: str = name) -> None:
                gate = v.let(v.load(table.gates, source + place, lanes))
                if name in ("swiglu", "cut_silu"):
                    top = v.splat(table.limit, lanes)
                    up = v.load(table.ups, source + place, lanes)
                    up = T.max(T.min(up, top), v.constant(0.0, "float32", lanes) - top)
                    if name == "swiglu":
                        gate = v.let(T.min(gate, top))
                        slope = v.splat(table.slope, lanes)
                        value = gate * v.take_sigmoid(gate * slope, lanes)
                    else:
                        value = T.min(v.take_silu(gate, lanes), top)
                    value = value * (up + v.splat(table.up_offset, lanes))
                    v.store(table.y, target + place, value, lanes)
                    return
                if name == "xielu":
                    top, slope_of, rest = (
                        v.splat(one, lanes) for one in (table.limit, table.slope, table.up_offset)
                    )
                    one, last = (v.constant(own, "float32", lanes) for own in (1.0, XIELU_END))
                    below = v.take_exponential(T.min(gate, last), lanes) - one - gate
                    is_above = gate > v.constant(0.0, "float32", lanes)
                    value = T.Select(is_above, top * gate * gate, slope_of * below)
                    v.store(table.y, target + place, value + rest * gate, lanes)
                    return
                cell = v.Cell(_activate(name, gate, table.limit, lanes))
                with T.If(table.has_ups != T.int64(0)), T.Then():
                    up = v.load(table.ups, source + place, lanes)
                    if name == "drelu":
                        up = T.max(up, v.constant(0.0, "float32", lanes))
                    cell.set(cell.get() * (up + v.splat(table.up_offset, lanes)))
                v.store(table.y, target + place, cell.get(), lanes)

            with T.If(table.kind == T.int64(number)), T.Then():
                walk(first, end, emit)


def _activate(name: str, value: v.Expr, threshold: v.Expr, lanes: int) -> v.Expr:
    def number(literal: float) -> v.Expr:
        return v.constant(literal, "float32", lanes)

    if name == "silu":
        return v.take_silu(value, lanes)
    if name == "gelu_tanh":
        inner = value * (number(1.0) + number(0.044715) * value * value) * number(0.7978845608)
        return number(0.5) * value * (number(1.0) + v.take_tanh(inner, lanes))
    if name == "gelu":
        grown = v.take_error_function(value * number(0.70710678118), lanes)
        return number(0.5) * value * (number(1.0) + grown)
    if name == "fatrelu":
        return T.Select(value > v.splat(threshold, lanes), value, number(0.0))
    open_gate = v.let(T.max(value, number(0.0)))
    return open_gate * open_gate if name == "relu2" else open_gate


def emit_cap(table: Table) -> None:
    """``y`` = limit tanh(x factor / limit), or x factor if the limit is 0. With a negative limit, x
    factor is cut at the limit's magnitude and at the limit."""
    with T.serial(table.first, table.end) as item:
        token, first, end = split_item(item, table.length)
        source, target = v.let(token * table.x_stride), v.let(token * table.y_stride)

        def emit(place: v.Expr, lanes: int) -> None:
            value = v.Cell(v.load(table.x, source + place, lanes) * v.splat(table.factor, lanes))
            with T.If(table.limit > T.float32(0.0)), T.Then():
                inner = v.take_tanh(value.get() / v.splat(table.limit, lanes), lanes)
                value.set(inner * v.splat(table.limit, lanes))
            with T.If(table.limit < T.float32(0.0)), T.Then():
                most = v.splat(v.let(T.float32(0.0) - table.limit), lanes)
                value.set(T.max(T.min(value.get(), most), v.splat(table.limit, lanes)))
            v.store(table.y, target + place, value.get(), lanes)

        walk(first, end, emit)


def emit_grow(table: Table) -> None:
    """Multiply vectors with the factor of their position."""
    with T.serial(table.first, table.end) as token:
        factor = v.let(table.factors[v.wide(table.positions[token])])
        source = v.let(token * table.x_stride)

        def emit(place: v.Expr, lanes: int) -> None:
            value = v.load(table.x, source + place, lanes) * v.splat(factor, lanes)
            v.store(table.x, source + place, value, lanes)

        walk(T.int64(0), table.length, emit)


def emit_term(table: Table) -> None:
    """Add x to y; with weights, y = x times these.  Items are tokens."""
    with T.serial(table.first, table.end) as token:
        source, target = v.let(token * table.x_stride), v.let(token * table.y_stride)

        def emit(place: v.Expr, lanes: int) -> None:
            value = v.let(v.load(table.x, source + place, lanes))
            cell = v.Cell(value)
            with T.If(table.has_weights != T.int64(0)):
                with T.Then():
                    cell.set(value * v.load(table.weights, place, lanes))
                with T.Else():
                    cell.set(value + v.load(table.y, target + place, lanes))
            v.store(table.y, target + place, cell.get(), lanes)

        walk(T.int64(0), table.length, emit)


def emit_cut(table: Table) -> None:
    """x loses a cutoff, and is at least 0: the mean of a token's elements, and so many of
    their standard deviations.  Items are tokens."""
    zero = T.int64(0)
    with T.serial(table.first, table.end) as token:
        source = v.let(token * table.x_stride)
        count = v.let(T.cast(table.length, "float32"))
        mean = v.let(
            add_up(zero, table.length, lambda p, n: v.load(table.x, source + p, n)) / count
        )

        variance = add_squares(table.x, source, table.length, mean) / count
        cutoff = v.let(mean + table.deviations * T.sqrt(variance))

        def emit(place: v.Expr, lanes: int) -> None:
            value = v.load(table.x, source + place, lanes) - v.splat(cutoff, lanes)
            value = T.max(value, v.constant(0.0, "float32", lanes))
            v.store(table.x, source + place, value, lanes)

        walk(zero, table.length, emit)


def emit_spread_heads(table: Table) -> None:
    """Multiply blocks of the elements of heads of tokens by Hadamard's matrix, in place.  Blocks
    are powers of two, 16 at least."""
    factor = v.let(T.float32(1.0) / T.sqrt(T.cast(table.block, "float32")))
    with T.serial(table.first, table.end) as item:
        token = v.let(item // table.heads)
        source = v.let(token * table.x_stride + (item - token * table.heads) * table.head_dim)
        with T.serial(table.head_dim // 16) as piece:
            at = v.let(source + piece * 16)
            value = v.let(v.load(table.x, at, 16) * v.splat(factor, 16))
            for step in (1, 2, 4, 8):
                signs = v.list_constants([-1 if k & step else 1 for k in range(16)], "float32")
                other = Shuffle([value], [k ^ step for k in range(16)])
                value = v.let(T.fma(value, signs, other))
            v.store(table.x, at, value, 16)
        for step in (16 << k for k in range(6)):
            with (
                T.If(table.block > T.int64(step)),
                T.Then(),
                T.serial(table.head_dim // 32) as pair,
            ):
                several = step // 16
                at = v.let(source + (pair + pair // several * several) * 16)
                one, two = (v.let(v.load(table.x, at + k * step, 16)) for k in range(2))
                v.store(table.x, at, one + two, 16)
                v.store(table.x, at + step, one - two, 16)


def emit_turn(table: Table) -> None:
    """Turn heads of tokens in place, with their norm before or after it."""
    zero = T.int64(0)
    pairs = v.let(table.rotated // 2)
    odd = v.let(T.Select(table.swapped != zero, T.int64(1), zero))
    low = v.let(odd * pairs)
    high = v.let(pairs - low)
    with T.serial(table.first, table.end) as item:
        token = v.let(item // table.heads)
        base = v.let(token * table.x_stride + (item - token * table.heads) * table.head_dim)
        turns = v.let(v.wide(table.positions[token]) * table.table_stride)

        def put(element: v.Expr, value: v.Expr, lanes: int) -> None:
            v.store(table.x, base + element, value * v.load(table.weights, element, lanes), lanes)

        def normalize(place: str) -> None:
            with T.If(table.norm_place == T.int64(NORM_PLACES.index(place))), T.Then():
                scale_to_one(table.x, base, table.head_dim, table.epsilon, put)

        def turn(pair: v.Expr, lanes: int) -> None:
            cos, sin = (v.let(v.load(t, turns + pair, lanes)) for t in (table.cos, table.sin))
            first = v.let(v.load(table.x, base + low + pair, lanes))
            second = v.let(v.load(table.x, base + high + pair, lanes))
            v.store(table.x, base + low + pair, first * cos - second * sin, lanes)
            v.store(table.x, base + high + pair, second * cos + first * sin, lanes)

        normalize("before")
        with T.If(table.neighbours != zero):
            with T.Then():
                with T.serial(pairs) as pair:
                    cos, sin = v.let(table.cos[turns + pair]), v.let(table.sin[turns + pair])
                    place, other = v.let(base + pair * 2 + odd), v.let(base + pair * 2 + (1 - odd))
                    first, second = v.let(table.x[place]), v.let(table.x[other])
                    T.buffer_store(table.x, first * cos - second * sin, [place])
                    T.buffer_store(table.x, second * cos + first * sin, [other])
            with T.Else():
                walk(zero, pairs, turn)
        normalize("after")
