"""Attention over an fp16 KV cache."""

from __future__ import annotations

from tvm.tirx.script import builder as T

from pi2.backends.blocks.elements import add_up, walk
from pi2.backends.blocks.tables import Table
from pi2.backends.compiler import vectors as v


def emit_attend(table: Table) -> None:
    """What heads of tokens mix of the values before them."""
    queries, query_stride = table.take_array("queries", "float32"), table.take("query_stride")
    heads, group, width = table.take("heads"), table.take("group"), table.take("head_dim")
    keys, values = (table.take_array(f"{kind}_cache", "float16") for kind in ("key", "value"))
    sequences = table.take_array("sequences", "int32")
    positions = table.take_array("positions", "int32")
    sequence_stride, head_stride = table.take("sequence_stride"), table.take("head_stride")
    window, scale, cap = table.take("window"), table.take_float("scale"), table.take_float("cap")
    sinks, has_sinks = table.take_array("sinks", "float32"), table.take("has_sinks")
    y, y_stride = table.take_array("y", "float32"), table.take("y_stride")
    scores, zero = table.take_array("scores", "float32"), T.int64(0)
    own = v.let(table.thread * table.take("scores_stride"))
    with T.serial(table.first, table.end) as item:
        token = v.let(item // heads)
        head = v.let(item - token * heads)
        query = v.let(token * query_stride + head * width)
        base = v.let(v.wide(sequences[token]) * sequence_stride + (head // group) * head_stride)
        end = v.let(v.wide(positions[token]) + 1)
        first = v.let(T.Select(window > zero, T.max(end - window, zero), zero))
        largest = v.Cell(T.float32(-3.0e38))
        with T.If(has_sinks != zero), T.Then():
            largest.set(sinks[head])
        with T.serial(first, end) as place:
            start = v.let(base + place * width)

            def multiply(element: v.Expr, lanes: int) -> v.Expr:
                key = v.cast(v.load(keys, start + element, lanes), "float32", lanes)
                return key * v.load(queries, query + element, lanes)

            score = v.Cell(add_up(zero, width, multiply) * scale)
            with T.If(cap != T.float32(0.0)), T.Then():
                score.set(v.take_tanh(score.get() / cap, 1) * cap)
            T.buffer_store(scores, score.get(), [own + place])
            largest.set(T.max(largest.get(), score.get()))
        top = v.let(largest.get())

        def exponentiate(place: v.Expr, lanes: int) -> v.Expr:
            value = v.load(scores, own + place, lanes) - v.splat(top, lanes)
            weight = v.let(v.take_exponential(value, lanes))
            v.store(scores, own + place, weight, lanes)
            return weight

        total = v.Cell(add_up(first, end, exponentiate))
        with T.If(has_sinks != zero), T.Then():
            total.set(total.get() + v.take_exponential(sinks[head] - top, 1))
        inverse = v.let(T.float32(1.0) / total.get())
        target = v.let(token * y_stride + head * width)

        def mix(element: v.Expr, lanes: int) -> None:
            cell = v.Cell(v.constant(0.0, "float32", lanes))
            with T.serial(first, end) as place:
                value = v.load(values, base + place * width + element, lanes)
                weight = v.splat(v.let(scores[own + place]), lanes)
                cell.set(T.fma(v.cast(value, "float32", lanes), weight, cell.get()))
            v.store(y, target + element, cell.get() * v.splat(inverse, lanes), lanes)

        walk(zero, width, mix)
