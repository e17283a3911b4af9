"""The FFN of many tokens: see `pi2.backends.gpu.kernels.ffn`."""

from __future__ import annotations

from collections.abc import Iterator

from tvm.tirx.script import builder as T

from pi2.backends.gpu.kernels import code as c
from pi2.backends.gpu.kernels import many
from pi2.backends.gpu.kernels.few import ROWS
from pi2.backends.gpu.kernels.ffn import Epilogue
from pi2.backends.gpu.kernels.signature import Axis
from pi2.backends.gpu.kernels.specification import FfnKernels
from pi2.backends.gpu.kernels.weights import Weights
from pi2.plan.weights.layout import GROUP


def list_many_kernels(ffn: FfnKernels, fp16: bool) -> Iterator[c.Kernel]:
    """Make them."""
    yield make_many_values(ffn, fp16)
    yield make_many_sums(ffn, fp16)


def make_many_values(ffn: FfnKernels, fp16: bool) -> c.Kernel:
    """Make ``values_64``: 32 gates and their up rows, or 64 up rows where there are no gates."""
    kernel = c.Kernel(f"values_{many.TOKENS}", many.BLOCK)
    tiles = 2 // ffn.parts
    groups = ffn.hidden // GROUP
    with kernel.declare():
        inputs = kernel.take_array("inputs", "float32")
        weights = Weights.take(kernel, "gate_up", ffn.precision, 1, fp16)
        epilogue = Epilogue(kernel, ffn)
        values = kernel.take_array("values", "float32")
        first_tile = kernel.take_number("first_tile")
        neurons, tokens = kernel.take_number("count"), kernel.take_number("tokens")
        with kernel.run(
            Axis(number="count", per=ROWS * tiles), Axis(number="tokens", per=many.TOKENS)
        ) as place:
            base = c.let(place.group[1] * many.TOKENS)
            # A tile beyond the last is read again and not used.
            last = c.let(T.floordiv(neurons - 1, ROWS))
            resident = [
                c.let(first_tile + T.min(place.group[0] * tiles + index, last))
                for index in range(tiles)
            ]
            strips = [
                c.let(tile * ffn.parts + part) for tile in resident for part in range(ffn.parts)
            ]

            def find_row(strip: c.Expr, column: c.Expr) -> c.Expr:
                """The number of a vector among all, where they lie in rows."""
                tile = strip if tiles == 2 else T.int32(0)
                neuron = T.min((place.group[0] * tiles + tile) * ROWS + column, neurons - 1)
                part = strip if ffn.parts == 2 else T.int32(0)
                return (first_tile * ROWS + neuron) * ffn.parts + part

            def load(panels: many.Panels, group: c.Expr) -> None:
                if ffn.in_rows:
                    many.emit_load_vectors(panels, place, weights, find_row, group, groups)
                else:
                    many.emit_load_tiles(panels, place, weights, strips, group, groups)

                def read(token: c.Expr, term: c.Expr) -> c.Expr:
                    row = T.min(base + token, tokens - 1)
                    return inputs[row * ffn.hidden + group * GROUP + term]

                many.emit_load_inputs(panels, place, read)

            def finish(token: c.Expr, half: int, products: list[c.Expr]) -> None:
                row = c.let(place.thread[0] + half * many.SIDE)
                token = c.let(base + token)
                for index in range(tiles):
                    neuron = c.let((place.group[0] * tiles + index) * ROWS + row)
                    with c.when(T.And(token < tokens, neuron < neurons)):
                        own = products[index * ffn.parts : (index + 1) * ffn.parts]
                        value = epilogue.compute(c.let(first_tile * ROWS + neuron), token, own)
                        c.store(values, token * neurons + neuron, value)

            many.emit_many(place, T.int32(groups), load, finish)
    return kernel


def make_many_sums(ffn: FfnKernels, fp16: bool) -> c.Kernel:
    """Make ``sums_64``."""
    kernel = c.Kernel(f"sums_{many.TOKENS}", many.BLOCK)
    groups = ffn.hidden // GROUP
    columns = -(-ffn.hidden // many.COLUMNS)
    with kernel.declare():
        values = kernel.take_array("values", "float32")
        weights = Weights.take(kernel, "down", ffn.precision, 1, fp16)
        partials = kernel.take_array("partials", "float32")
        first_tile = kernel.take_number("first_tile")
        neurons, tokens = kernel.take_number("count"), kernel.take_number("tokens")
        parts = kernel.take_number("parts")
        with kernel.run(
            Axis(times=columns, number="parts"), Axis(number="tokens", per=many.TOKENS)
        ) as place:
            part = c.let(T.floordiv(place.group[0], columns))
            column = c.let(T.floormod(place.group[0], columns) * many.COLUMNS)
            base = c.let(place.group[1] * many.TOKENS)
            size = c.let(T.floordiv(neurons + parts - 1, parts))
            begin = c.let(part * size)
            end = c.let(T.min(begin + size, neurons))

            def load(panels: many.Panels, step: c.Expr) -> None:
                first = c.let(begin + step * GROUP)

                def read_row(term: c.Expr) -> c.Expr:
                    return first_tile * ROWS + T.min(first + term, neurons - 1)

                group = c.let(T.floordiv(column, GROUP))
                many.emit_load_rows(panels, place, weights, read_row, group, groups)

                def read(token: c.Expr, term: c.Expr) -> c.Expr:
                    neuron = c.let(first + term)
                    row = c.let(T.min(base + token, tokens - 1) * neurons)
                    value = c.let(values[row + T.min(neuron, neurons - 1)])
                    return T.Select(neuron < end, value, c.number(0.0))

                many.emit_load_inputs(panels, place, read)

            def finish(token: c.Expr, half: int, totals: list[c.Expr]) -> None:
                token = c.let(base + token)
                for strip, total in enumerate(totals):
                    element = c.let(
                        column + strip * many.STRIP + half * many.SIDE + place.thread[0]
                    )
                    with c.when(T.And(token < tokens, element < ffn.hidden)):
                        row = c.let(part * tokens + token)
                        c.store(partials, row * ffn.hidden + element, total)

            many.emit_many(place, c.divide_up(size, GROUP), load, finish)
    return kernel
