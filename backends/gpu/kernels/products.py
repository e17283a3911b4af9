"""Products of inputs with a matrix in tiles: projections, predictors and the head.

``NAME_N``: inputs float32 [T, blocks, length], matrix weights in tiles, scales, [biases float32
[rows]], outputs float32 [T, rows or ``pitch``]; rows, tokens.  NAME is `ProductKernels.name`, N the
number of tokens that a work group computes with.  The rows are divided into ``blocks`` equal parts,
each of which is multiplied with its own inputs.
"""

from __future__ import annotations

from collections.abc import Iterator

from tvm.tirx.script import builder as T

from pi2.backends.gpu.kernels import code as c
from pi2.backends.gpu.kernels import many
from pi2.backends.gpu.kernels.few import BLOCK, ROWS, VECTOR, Tiles, emit_few
from pi2.backends.gpu.kernels.signature import Axis
from pi2.backends.gpu.kernels.specification import ProductKernels
from pi2.backends.gpu.kernels.weights import Weights
from pi2.plan.weights.layout import GROUP

FEW = (1, 4)
_TILES = many.COLUMNS // many.STRIP


def list_product_kernels(product: ProductKernels, fp16: bool) -> Iterator[c.Kernel]:
    """Make all of them."""
    for tokens in FEW:
        yield make_product(product, fp16, tokens)
    if product.blocks == 1:
        yield make_many_product(product, fp16)


class _Finish:
    """What becomes of a product."""

    def __init__(self, kernel: c.Kernel, product: ProductKernels) -> None:
        self._product = product
        self._biases = kernel.take_array("biases", "float32") if product.bias else None
        self._outputs = kernel.take_array("outputs", "float32")

    def store(self, token: c.Expr, rows: c.Expr, row: c.Expr, value: c.Expr) -> None:
        """Write the product of a token with ``row`` of ``rows``."""
        pitch = rows if self._product.pitch is None else self._product.pitch
        index = c.let(token * pitch + row)
        if self._biases is not None:
            value = c.let(value + self._biases[row])
        if self._product.relu:
            value = T.max(value, c.number(0.0))
        if self._product.adds:
            value = self._outputs[index] + value
        c.store(self._outputs, index, value)


def make_product(product: ProductKernels, fp16: bool, count: int) -> c.Kernel:
    """Make ``NAME_N`` for N few tokens."""
    kernel = c.Kernel(f"{product.name}_{count}", BLOCK)
    with kernel.declare():
        inputs = kernel.take_array("inputs", "float32x4")
        weights = Weights.take(kernel, "matrix", product.precision, VECTOR, fp16)
        result = _Finish(kernel, product)
        rows, tokens = kernel.take_number("rows"), kernel.take_number("tokens")
        with kernel.run(Axis(number="rows", per=ROWS), Axis(number="tokens", per=count)) as place:
            tile = place.group[0]
            base = c.let(place.group[1] * count)
            named = [c.let(T.min(base + turn, tokens - 1)) for turn in range(count)]
            if product.blocks > 1:
                own = T.min(tile * ROWS + place.thread[0], rows - 1)
                block = c.let(T.floordiv(own * product.blocks, rows))
                named = [c.let(token * product.blocks + block) for token in named]

            def finish(row: c.Expr, turn: c.Expr, products: list[c.Expr]) -> None:
                token, row = c.let(base + turn), c.let(tile * ROWS + row)
                with c.when(T.And(token < tokens, row < rows)):
                    result.store(token, rows, row, products[0])

            emit_few(Tiles(weights, 1, product.length), inputs, place, tile, named, finish)
    return kernel


def make_many_product(product: ProductKernels, fp16: bool) -> c.Kernel:
    """Make ``NAME_64``."""
    kernel = c.Kernel(f"{product.name}_{many.TOKENS}", many.BLOCK)
    groups = product.length // GROUP
    with kernel.declare():
        inputs = kernel.take_array("inputs", "float32")
        weights = Weights.take(kernel, "matrix", product.precision, 1, fp16)
        result = _Finish(kernel, product)
        rows, tokens = kernel.take_number("rows"), kernel.take_number("tokens")
        with kernel.run(
            Axis(number="rows", per=many.COLUMNS), Axis(number="tokens", per=many.TOKENS)
        ) as place:
            base = c.let(place.group[1] * many.TOKENS)
            # A tile beyond the last is read again and not used.
            last = c.let(T.floordiv(rows - 1, ROWS))
            strips = [
                c.let(T.min(place.group[0] * _TILES + index, last)) for index in range(_TILES)
            ]

            def load(panels: many.Panels, group: c.Expr) -> None:
                many.emit_load_tiles(panels, place, weights, strips, group, groups)

                def read(token: c.Expr, term: c.Expr) -> c.Expr:
                    row = T.min(base + token, tokens - 1)
                    return inputs[row * product.length + group * GROUP + term]

                many.emit_load_inputs(panels, place, read)

            def finish(token: c.Expr, half: int, products: list[c.Expr]) -> None:
                token = c.let(base + token)
                for strip, value in enumerate(products):
                    in_tile = place.thread[0] + half * many.SIDE
                    row = c.let((place.group[0] * _TILES + strip) * ROWS + in_tile)
                    with c.when(T.And(token < tokens, row < rows)):
                        result.store(token, rows, row, value)

            many.emit_many(place, T.int32(groups), load, finish)
    return kernel
