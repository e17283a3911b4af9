"""Appending tokens to the KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm.tirx.script import builder as T

from pi2.backends.blocks.attention import count_ring
from pi2.backends.blocks.contract import KV_TYPES
from pi2.backends.blocks.elements import round_half_even, walk
from pi2.backends.blocks.machine import Table
from pi2.backends.compiler import vectors as v

if TYPE_CHECKING:
    from pi2.plan.documents.plan import KvType


def emit_keep(kind: KvType, table: Table) -> None:
    """Append tokens to the KV cache [sequences, heads, context, width]; int8 with a scale of each
    vector, its largest magnitude / 127 in fp16."""
    positions = table.take_array("positions", "int32")
    sequences = table.take_array("sequences", "int32")
    stride, heads = table.take("x_stride"), table.take("heads")
    strides = table.take("key_sequence_stride"), table.take("key_head_stride")
    ring = count_ring(*strides, table.take("key_width"))
    with T.serial(table.first, table.end) as item:
        token = v.let(item // heads)
        head = v.let(item - token * heads)
        place = v.let(v.wide(positions[token]) % ring)
        for name in ("key", "value"):
            width = table.take(f"{name}_width")
            first = v.let(
                v.wide(sequences[token]) * table.take(f"{name}_sequence_stride")
                + head * table.take(f"{name}_head_stride")
            )
            target = v.let(first + place * width)
            array = table.take_array(f"{name}s", "float32")
            cache = table.take_array(f"{name}_cache", KV_TYPES[kind])
            source = v.let(token * stride + head * width)
            if kind == "int8":
                scales = table.take_array(f"{name}_scales", "float16")
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
