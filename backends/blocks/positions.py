"""Rotary positions, norms of heads, and what the KV cache keeps."""

from __future__ import annotations

from tvm.tirx.script import builder as T

from pi2.backends.blocks.contract import NORM_PLACES
from pi2.backends.blocks.elements import add_up, walk
from pi2.backends.blocks.tables import Table
from pi2.backends.compiler import vectors as v


def emit_turn(table: Table) -> None:
    """Turn heads of tokens in place, with their norm before or after it."""
    x, weights = table.take_array("x", "float32"), table.take_array("weights", "float32")
    stride, heads, width = table.take("x_stride"), table.take("heads"), table.take("head_dim")
    norm_place, epsilon = table.take("norm_place"), table.take_float("epsilon")
    positions = table.take_array("positions", "int32")
    cosines, sines = table.take_array("cos", "float32"), table.take_array("sin", "float32")
    table_stride, rotated = table.take("table_stride"), table.take("rotated")
    neighbours, zero = table.take("neighbours"), T.int64(0)
    pairs = v.let(rotated // 2)
    with T.serial(table.first, table.end) as item:
        token = v.let(item // heads)
        base = v.let(token * stride + (item - token * heads) * width)
        turns = v.let(v.wide(positions[token]) * table_stride)

        def normalize(place: str) -> None:
            with T.If(norm_place == T.int64(NORM_PLACES.index(place))), T.Then():

                def square(element: v.Expr, lanes: int) -> v.Expr:
                    value = v.let(v.load(x, base + element, lanes))
                    return value * value

                mean = add_up(zero, width, square) / T.cast(width, "float32")
                scale = v.let(T.float32(1.0) / T.sqrt(mean + epsilon))

                def emit(element: v.Expr, lanes: int) -> None:
                    value = v.load(x, base + element, lanes) * v.splat(scale, lanes)
                    v.store(x, base + element, value * v.load(weights, element, lanes), lanes)

                walk(zero, width, emit)

        def turn(pair: v.Expr, lanes: int) -> None:
            cos, sin = (v.let(v.load(t, turns + pair, lanes)) for t in (cosines, sines))
            first = v.let(v.load(x, base + pair, lanes))
            second = v.let(v.load(x, base + pairs + pair, lanes))
            v.store(x, base + pair, first * cos - second * sin, lanes)
            v.store(x, base + pairs + pair, second * cos + first * sin, lanes)

        normalize("before")
        with T.If(neighbours != zero):
            with T.Then():
                with T.serial(pairs) as pair:
                    cos, sin = v.let(cosines[turns + pair]), v.let(sines[turns + pair])
                    place = v.let(base + pair * 2)
                    first, second = v.let(x[place]), v.let(x[place + 1])
                    T.buffer_store(x, first * cos - second * sin, [place])
                    T.buffer_store(x, second * cos + first * sin, [place + 1])
            with T.Else():
                walk(zero, pairs, turn)
        normalize("after")


def emit_keep(table: Table) -> None:
    """Keep keys and values of tokens as fp16: [sequences, heads, context, head_dim]."""
    keys, values = table.take_array("keys", "float32"), table.take_array("values", "float32")
    stride, heads, width = table.take("x_stride"), table.take("heads"), table.take("head_dim")
    caches = [table.take_array(f"{kind}_cache", "float16") for kind in ("key", "value")]
    sequences = table.take_array("sequences", "int32")
    positions = table.take_array("positions", "int32")
    sequence_stride, head_stride = table.take("sequence_stride"), table.take("head_stride")
    with T.serial(table.first, table.end) as item:
        token = v.let(item // heads)
        head = v.let(item - token * heads)
        source = v.let(token * stride + head * width)
        target = v.let(
            v.wide(sequences[token]) * sequence_stride
            + head * head_stride
            + v.wide(positions[token]) * width
        )
        for array, cache in zip((keys, values), caches, strict=True):

            def emit(
                place: v.Expr, lanes: int, array: v.Buffer = array, cache: v.Buffer = cache
            ) -> None:
                value = v.cast(v.load(array, source + place, lanes), "float16", lanes)
                v.store(cache, target + place, value, lanes)

            walk(T.int64(0), width, emit)
