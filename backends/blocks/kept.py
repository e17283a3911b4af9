"""Appending tokens to the KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm.tirx.script import builder as T

from pi2.backends.blocks.attention import count_ring
from pi2.backends.blocks.contract import KV_TYPES
from pi2.backends.blocks.elements import round_half_even, walk
from pi2.backends.blocks.machine import Table
from pi2.backends.blocks.sizes import LIST_HEAD
from pi2.backends.compiler import vectors as v
from pi2.plan.arithmetic.units import find_index_type

if TYPE_CHECKING:
    from pi2.plan.documents.plan import KvType


def emit_keep(kind: KvType, table: Table) -> None:
    """Append tokens to the KV cache [sequences, heads, context, width]; int8 with a scale of each
    vector, its largest magnitude / 127 in fp16."""
    ring = count_ring(table)
    with T.serial(table.first, table.end) as item:
        token = v.let(item // table.heads)
        head = v.let(item - token * table.heads)
        place = v.let(v.wide(table.positions[token]) % ring)
        for name in ("key", "value"):
            width, whole, each, array = (
                getattr(table, own)
                for own in (
                    f"{name}_width",
                    f"{name}_sequence_stride",
                    f"{name}_head_stride",
                    f"{name}s",
                )
            )
            first = v.wide(table.sequences[token]) * whole + head * each
            target = v.let(first + place * width)
            cache = table.get_array(f"{name}_cache", KV_TYPES[kind])
            source = v.let(token * table.x_stride + head * width)
            if kind == "int8":
                scales = table.get_array(f"{name}_scales", "float16")
                with T.If(width > T.int64(0)), T.Then():
                    factor = _keep_scale(array, source, width, scales, v.let(target // width))
                    _keep_codes(array, source, width, cache, target, factor)
                continue

            def emit(
                place: v.Expr,
                lanes: int,
                array: v.Buffer = array,
                cache: v.Buffer = cache,
                source: v.Expr = source,
                target: v.Expr = target,
            ) -> None:
                value = v.cast(v.load(array, source + place, lanes), KV_TYPES[kind], lanes)
                v.store(cache, target + place, value, lanes)

            walk(T.int64(0), width, emit)


def emit_keep_index(kind: KvType, table: Table) -> None:
    emit_keep(find_index_type(kind), table)


def _keep_scale(
    array: v.Buffer, source: v.Expr, width: v.Expr, scales: v.Buffer, place: v.Expr
) -> v.Expr:
    """Keep the scale of a vector; return the factor that makes codes of its elements."""
    wide, rest = v.Cell(v.constant(0.0, "float32", 16)), v.Cell(T.float32(0.0))

    def look(element: v.Expr, lanes: int) -> None:
        cell = wide if lanes > 1 else rest
        cell.set(T.max(cell.get(), T.abs(v.load(array, source + element, lanes))))

    walk(T.int64(0), width, look)
    top = v.let(T.max(rest.get(), v.find_largest(wide.get(), 16)))
    scale = v.let(v.cast(top * T.float32(1 / 127), "float16", 1))
    T.buffer_store(scales, scale, [place])
    kept = v.let(v.cast(scale, "float32", 1))
    zero = T.float32(0.0)
    return v.let(T.Select(kept > zero, T.float32(1.0) / kept, zero))


def _keep_codes(
    array: v.Buffer, source: v.Expr, width: v.Expr, cache: v.Buffer, target: v.Expr, factor: v.Expr
) -> None:
    def emit(place: v.Expr, lanes: int) -> None:
        value = v.load(array, source + place, lanes) * v.splat(factor, lanes)
        codes = round_half_even(value, lanes)
        codes = T.min(codes, v.constant(127, "int32", lanes))
        codes = T.max(codes, v.constant(-127, "int32", lanes))
        v.store(cache, target + place, v.cast(codes, "int8", lanes), lanes)

    walk(T.int64(0), width, emit)


_LEAST = -3.0e38
"""Below every gate."""


def _find_position(table: Table, token: v.Expr) -> v.Expr:
    return v.let(v.wide(table.positions[token]))


def _find_row(table: Table, token: v.Expr, position: v.Expr, length: v.Expr) -> v.Expr:
    """Return the first of the values and gates [sequences, ring, .] of a position of the token's
    sequence."""
    first = v.wide(table.sequences[token]) * table.sequence_stride
    return v.let(first + position % table.ring * length)


def emit_record(table: Table) -> None:
    """Keep a token's values for pooled vectors, then its gates."""
    with T.serial(table.first, table.end) as token:
        target = _find_row(table, token, _find_position(table, token), table.length)
        source = v.let(token * table.x_stride)

        def copy(place: v.Expr, lanes: int) -> None:
            v.store(table.memory, target + place, v.load(table.x, source + place, lanes), lanes)

        walk(T.int64(0), table.length, copy)


def emit_pool(table: Table) -> None:
    """Make the vector of a block that a token ends.  Write the position of its first token, and the
    row of the KV cache for the vector: ``spare`` if the block goes on."""
    given = v.let(table.width * (table.overlaps + 1))
    with T.serial(table.first, table.end) as token:
        position = _find_position(table, token)
        number = v.let(position // table.block)
        start, target = v.let(number * table.block), v.let(token * table.y_stride)
        is_last = position + 1 >= start + table.block
        T.buffer_store(table.starts, T.cast(start, "int32"), [token])
        row = T.Select(is_last, table.base + number, table.spare)
        T.buffer_store(table.rows, T.cast(row, "int32"), [token])
        first = v.let(T.max(start - table.block * table.overlaps, T.int64(0)))

        def mix(element: v.Expr, lanes: int) -> None:
            def load(place: v.Expr) -> tuple[v.Expr, v.Expr]:
                """Return values and gates of a position."""
                part = v.let(
                    T.Select(place >= start, table.width * table.overlaps, T.int64(0)) + element
                )
                source = v.let(_find_row(table, token, place, given * 2) + part)
                gates = v.load(table.memory, source + given, lanes)
                gates = gates + v.load(table.bias, place % table.block * given + part, lanes)
                return v.load(table.memory, source, lanes), v.let(gates)

            top = v.Cell(v.constant(_LEAST, "float32", lanes))
            with T.serial(first, position + 1) as place:
                top.set(T.max(top.get(), load(place)[1]))
            total, mixed = (v.Cell(v.constant(0.0, "float32", lanes)) for _ in range(2))
            with T.serial(first, position + 1) as place:
                values, gates = load(place)
                weights = v.let(v.take_exponential(gates - top.get(), lanes))
                total.set(total.get() + weights)
                mixed.set(T.fma(weights, values, mixed.get()))
            v.store(table.y, target + element, mixed.get() / total.get(), lanes)

        with T.If(is_last), T.Then():
            walk(T.int64(0), table.width, mix)


def emit_see(table: Table) -> None:
    """List the rows of the KV cache that a token sees: of its window, and of blocks before its
    end."""
    with T.serial(table.first, table.end) as token:
        end = v.let(v.wide(table.positions[token]) + 1)
        count, blocks = v.let(T.min(end, table.window)), v.let(end // table.block)
        first = v.let(token * table.list_stride + LIST_HEAD)

        def put(place: v.Expr, value: v.Expr) -> None:
            T.buffer_store(table.chosen, T.cast(value, "int32"), [v.let(place)])

        put(first - LIST_HEAD, count + blocks)
        with T.serial(count) as number:
            put(first + number, end - count + number)
        with T.serial(blocks) as number:
            put(first + count + number, table.base + number)
