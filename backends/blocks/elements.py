"""Norms, gates and caps: kernels that take a token's elements one by one."""

from __future__ import annotations

from collections.abc import Callable

from tvm.tirx.script import builder as T

from pi2.backends.blocks.contract import ACTIVATIONS, PIECE
from pi2.backends.blocks.tables import Table
from pi2.backends.compiler import vectors as v

_LANES = 16


def walk(first: v.Expr, end: v.Expr, emit: Callable[[v.Expr, int], None]) -> None:
    """Emit a loop over elements, `_LANES` at a time, and one over what is left."""
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


def emit_normalize(table: Table) -> None:
    """RMSNorm, or LayerNorm where ``centred``; the result replaces y, or is added to it."""
    x, y = table.take_array("x", "float32"), table.take_array("y", "float32")
    weights, bias = table.take_array("weights", "float32"), table.take_array("bias", "float32")
    has_weights, has_bias = table.take("has_weights"), table.take("has_bias")
    x_stride, y_stride, length = (
        table.take("x_stride"),
        table.take("y_stride"),
        table.take("length"),
    )
    epsilon, factor = table.take_float("epsilon"), table.take_float("factor")
    centred, added = table.take("centred"), table.take("added")
    zero = T.int64(0)
    with T.serial(table.first, table.end) as token:
        source, target = v.let(token * x_stride), v.let(token * y_stride)
        count = v.let(T.cast(length, "float32"))
        mean = v.Cell(T.float32(0.0))
        with T.If(centred != zero), T.Then():
            mean.set(add_up(zero, length, lambda p, n: v.load(x, source + p, n)) / count)
        own = v.let(mean.get())

        def read(place: v.Expr, lanes: int) -> v.Expr:
            value = v.let(v.load(x, source + place, lanes) - v.splat(own, lanes))
            return value * value

        squares = add_up(zero, length, read)
        scale = v.let(T.float32(1.0) / T.sqrt(squares / count + epsilon))

        def emit(place: v.Expr, lanes: int) -> None:
            value = (v.load(x, source + place, lanes) - v.splat(own, lanes)) * v.splat(scale, lanes)
            cell = v.Cell(value)
            with T.If(has_weights != zero), T.Then():
                cell.set(cell.get() * v.load(weights, place, lanes))
            with T.If(has_bias != zero), T.Then():
                cell.set(cell.get() + v.load(bias, place, lanes))
            result = v.let(cell.get() * v.splat(factor, lanes))
            cell.set(result)
            with T.If(added != zero), T.Then():
                cell.set(result + v.load(y, target + place, lanes))
            v.store(y, target + place, cell.get(), lanes)

        walk(zero, length, emit)


def _split_item(item: v.Expr, length: v.Expr) -> tuple[v.Expr, v.Expr, v.Expr]:
    """Return the token of an item, and its first and last element."""
    pieces = v.let((length + PIECE - 1) // PIECE)
    token = v.let(item // pieces)
    first = v.let((item - token * pieces) * PIECE)
    return token, first, v.let(T.min(first + PIECE, length))


def emit_gate(table: Table) -> None:
    """``y`` = activation(gates) x ups, or activation(gates)."""
    gates, ups = table.take_array("gates", "float32"), table.take_array("ups", "float32")
    y, has_ups, kind = table.take_array("y", "float32"), table.take("has_ups"), table.take("kind")
    x_stride, y_stride, length = (
        table.take("x_stride"),
        table.take("y_stride"),
        table.take("length"),
    )
    limit, slope = table.take_float("limit"), table.take_float("slope")
    offset = table.take_float("up_offset")
    with T.serial(table.first, table.end) as item:
        token, first, end = _split_item(item, length)
        source, target = v.let(token * x_stride), v.let(token * y_stride)
        for number, name in enumerate(ACTIVATIONS):

            def emit(place: v.Expr, lanes: int, name: str = name) -> None:
                gate = v.let(v.load(gates, source + place, lanes))
                if name == "swiglu":
                    top = v.splat(limit, lanes)
                    up = v.load(ups, source + place, lanes)
                    up = T.max(T.min(up, top), v.constant(0.0, "float32", lanes) - top)
                    gate = v.let(T.min(gate, top))
                    value = gate * v.take_sigmoid(gate * v.splat(slope, lanes), lanes)
                    value = value * (up + v.splat(offset, lanes))
                    v.store(y, target + place, value, lanes)
                    return
                cell = v.Cell(_activate(name, gate, lanes))
                with T.If(has_ups != T.int64(0)), T.Then():
                    cell.set(cell.get() * v.load(ups, source + place, lanes))
                v.store(y, target + place, cell.get(), lanes)

            with T.If(kind == T.int64(number)), T.Then():
                walk(first, end, emit)


def _activate(name: str, value: v.Expr, lanes: int) -> v.Expr:
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
    open_gate = v.let(T.max(value, number(0.0)))
    return open_gate if name == "relu" else open_gate * open_gate


def emit_cap(table: Table) -> None:
    """x becomes limit tanh(x factor / limit), or x factor where the limit is 0."""
    x, x_stride, length = (
        table.take_array("x", "float32"),
        table.take("x_stride"),
        table.take("length"),
    )
    limit, factor = table.take_float("limit"), table.take_float("factor")
    with T.serial(table.first, table.end) as item:
        token, first, end = _split_item(item, length)
        source = v.let(token * x_stride)

        def emit(place: v.Expr, lanes: int) -> None:
            value = v.Cell(v.load(x, source + place, lanes) * v.splat(factor, lanes))
            with T.If(limit != T.float32(0.0)), T.Then():
                inner = v.take_tanh(value.get() / v.splat(limit, lanes), lanes)
                value.set(inner * v.splat(limit, lanes))
            v.store(x, source + place, value.get(), lanes)

        walk(first, end, emit)
