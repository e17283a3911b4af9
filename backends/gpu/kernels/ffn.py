"""The FFN of few tokens over a range of a layer's neurons: activations, then their sum.

======================  ==========================================================================
kernel                  parameters: arrays, then numbers
======================  ==========================================================================
``values_N``            inputs float32 [T, hidden], gate and up weights in tiles, scales,
                        [biases float32 [n, parts]], [routes float32 [T, experts], experts
                        int32 [n]], values float32 [T, count]; count, tokens
``sums_N``              values float32 [T, count], down weights in rows, scales,
                        partials float32 [parts, T, hidden]; count, tokens, parts
``join``                partials, sums float32 [T, hidden]; tokens, parts, adds: whether
                        they are added to what sums holds
======================  ==========================================================================

N is the number of tokens that a work group computes with.  ``parts`` is how many parts the neurons
are divided into: enough work groups run then."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.gpu.kernels import code as c
from pi2.backends.gpu.kernels import products as many
from pi2.backends.gpu.kernels.code import Weights, count_words, unpack_word
from pi2.backends.gpu.kernels.products import BLOCK, FEW, ROWS, SLICES, Matrix, Store, make_product
from pi2.backends.gpu.kernels.specification import Axis, FfnKernels
from pi2.plan.weights.layout import GROUP, Precision


def compute_tanh(x: c.Expr) -> c.Expr:
    """Return tanh of a named value, which does not overflow on any API."""
    size = c.let(T.max(x, c.number(0.0) - x))
    falling = c.let(T.exp(c.number(-2.0) * size))
    result = c.let((c.number(1.0) - falling) / (c.number(1.0) + falling))
    return T.Select(x < c.number(0.0), c.number(0.0) - result, result)


_MATH = v.ScalarMath(c.number, c.let, T.exp, T.erf, compute_tanh)


ELEMENTS = 8
"""Elements of a neuron's down vector that a thread adds up: a *unit*."""
UNITS = GROUP // ELEMENTS
"""Units of a group."""
_JOINED = 256
"""Threads of a work group of ``join``."""


def list_ffn_kernels(ffn: FfnKernels, fp16: bool) -> Iterator[c.Kernel]:
    """Make all of them; neurons in rows are computed one by one for few tokens."""
    for tokens in FEW:
        if not ffn.in_rows:
            yield make_values(ffn, fp16, tokens)
        yield make_sums(ffn, fp16, tokens)
    yield make_join(ffn)
    yield make_values(ffn, fp16, many.TOKENS)
    yield make_many_sums(ffn, fp16)


class Epilogue:
    """Turns the products of a neuron into its value."""

    def __init__(self, kernel: c.Kernel, ffn: FfnKernels) -> None:
        self._ffn = ffn
        self._biases = kernel.take_array("biases") if ffn.options.bias else None
        self._routes = kernel.take_array("routes") if ffn.experts else None
        self._experts = kernel.take_array("experts", "int32") if ffn.experts else None

    def compute(self, neuron: c.Expr, token: c.Expr, products: Sequence[c.Expr]) -> c.Expr:
        """Return the value of the resident neuron ``neuron`` for ``token``."""
        if self._biases is not None:
            parts = self._ffn.parts
            products = [
                c.let(product + self._biases[neuron * parts + part])
                for part, product in enumerate(products)
            ]
        weight = None
        if self._routes is not None and self._experts is not None:
            expert = c.let(self._experts[neuron])
            weight = c.let(self._routes[token * self._ffn.experts + expert])
        if weight is not None and self._ffn.weighs_input:
            products = [c.let(product * weight) for product in products]
        options = self._ffn.options
        value = v.activate(_MATH, options, products[0], products[1] if options.gated else None)
        return value if weight is None or self._ffn.weighs_input else value * weight


def _take_values(kernel: c.Kernel, ffn: FfnKernels) -> Store:
    """Declare what values of neurons are made of, and where they go."""
    epilogue, values = Epilogue(kernel, ffn), kernel.take_array("values")

    def store(token: c.Expr, rows: c.Expr, row: c.Expr, products: list[c.Expr]) -> None:
        c.store(values, token * rows + row, epilogue.compute(row, token, products))

    return store


def make_values(ffn: FfnKernels, fp16: bool, count: int) -> c.Kernel:
    """Make ``values_N``: with 64 tokens, a work group has 32 gates and their up rows, or 64 up rows
    where there are no gates."""
    inputs = Matrix(
        name="gate_up",
        count="count",
        length=ffn.hidden,
        precision=ffn.precision,
        make=lambda kernel: _take_values(kernel, ffn),
        parts=ffn.parts,
        in_rows=ffn.in_rows,
    )
    return make_product("values", inputs, fp16, count)


def make_sums(ffn: FfnKernels, fp16: bool, count: int) -> c.Kernel:
    """Make ``sums_N`` for N few tokens."""
    with c.Kernel.declare(f"sums_{count}", BLOCK) as kernel:
        neurons = kernel.take_number("count")
        emit_sums(
            *(kernel, ffn, fp16, count, neurons),
            lambda _token: neurons,
            lambda _token, neuron: neuron,
        )
    return kernel


def emit_sums(
    kernel: c.Kernel,
    ffn: FfnKernels,
    fp16: bool,
    count: int,
    pitch: c.Expr,
    count_neurons: Callable[[c.Expr], c.Expr],
    find_row: Callable[[c.Expr, c.Expr], c.Expr],
) -> None:
    """Add parameters and body of a kernel that adds up down vectors for ``count`` tokens.

    A thread adds up 8 elements of the sum over every eighth neuron. ``pitch`` is the number of
    values that a token has room for, ``count_neurons(token)`` the number that it has, and
    ``find_row(token, neuron)`` the row of a neuron, for the first of the tokens. Neurons that are
    zero for all of the tokens are not read."""
    lanes = count_words(ffn.precision) * ELEMENTS // GROUP
    units = ffn.hidden // ELEMENTS
    columns = -(-units // ROWS)
    values = kernel.take_array("values")
    weights = Weights.take(kernel, "down", ffn.precision, lanes, fp16)
    partials = kernel.take_array("partials")
    tokens, parts = kernel.take_numbers("tokens parts")
    with kernel.run(Axis(times=columns, number="parts"), Axis(number="tokens", per=count)) as place:
        lane, slice_number, _ = place.thread
        part = c.let(T.floordiv(place.group[0], columns))
        place_of_unit = c.let(T.floormod(place.group[0], columns) * ROWS + lane)
        unit = c.let(T.min(place_of_unit, units - 1))
        base = c.let(place.group[1] * count)
        firsts = [c.let(T.min(base + turn, tokens - 1) * pitch) for turn in range(count)]
        neurons = count_neurons(base)
        size = c.let(T.floordiv(neurons + parts - 1, parts))
        begin = c.let(part * size)
        end = c.let(T.min(begin + size, neurons))
        sums = [c.make_zeros(ELEMENTS) for _ in range(count)]
        with T.serial(c.divide_up(size, SLICES)) as turn:
            neuron = c.let(begin + turn * SLICES + slice_number)
            with c.when(neuron < end):
                factors = [c.let(values[first + neuron]) for first in firsts]
                row = c.let(find_row(base, neuron))
                with ExitStack() as stack:
                    if not ffn.is_smooth:
                        stack.enter_context(c.when(_is_any_set(factors)))
                    _add_neuron(weights, units, row, unit, factors, sums)
        shared = c.share(SLICES * ELEMENTS * ROWS)
        for turn in range(count):
            if turn:
                c.wait_for_group()
            for index, cell in enumerate(sums[turn]):
                c.store(shared, (slice_number * ELEMENTS + index) * ROWS + lane, cell.get())
            c.wait_for_group()
            # From here on, the second axis counts elements.
            total = c.Cell(shared[slice_number * ROWS + lane])
            for piece in range(1, SLICES):
                total.add(shared[(piece * ELEMENTS + slice_number) * ROWS + lane])
            token = c.let(base + turn)
            with c.when(T.And(token < tokens, place_of_unit < units)):
                part_row = c.let(part * tokens + token)
                element = find_element(ffn.precision, unit, slice_number)
                c.store(partials, part_row * ffn.hidden + element, total.get())


def _is_any_set(factors: Sequence[c.Expr]) -> c.Expr:
    size: c.Expr = T.max(factors[0], c.number(0.0) - factors[0])
    for factor in factors[1:]:
        size = T.max(size, T.max(factor, c.number(0.0) - factor))
    return size > c.number(0.0)


def _add_neuron(
    weights: Weights,
    units: int,
    row: c.Expr,
    unit: c.Expr,
    factors: Sequence[c.Expr],
    sums: list[list[c.Cell]],
) -> None:
    """Add 8 elements of a neuron's down vector, times each of the factors."""
    words = weights.load(row * units + unit)
    groups = units * ELEMENTS // GROUP
    scale = weights.load_scale(row * groups + T.floordiv(unit, UNITS))
    scaled = [c.let(factor * scale) for factor in factors]
    numbers = [value for word in words for value in unpack_word(weights.precision, word)]
    for factor, cells in zip(scaled, sums, strict=True):
        for cell, value in zip(cells, numbers, strict=True):
            cell.add(value * factor)


def find_element(precision: Precision, unit: c.Expr, index: c.Expr) -> c.Expr:
    if count_words(precision) >= ELEMENTS:
        return unit * ELEMENTS + index
    group, word = T.floordiv(unit, UNITS), T.floormod(unit, UNITS)
    # The second half of a word's elements is half a group further on.
    half = T.floordiv(index, ELEMENTS // 2) * (GROUP // 2 - ELEMENTS // 2)
    return group * GROUP + word * (ELEMENTS // 2) + index + half


def make_join(ffn: FfnKernels) -> c.Kernel:
    with c.Kernel.declare("join", (_JOINED, 1, 1)) as kernel:
        partials, sums = kernel.take_arrays("partials sums")
        tokens, parts, adds = kernel.take_numbers("tokens parts adds")
        with kernel.run_elements(ffn.hidden) as (element, token):
            index = c.let(token * ffn.hidden + element)
            total = c.Cell(c.number(0.0))
            with c.when(adds > 0):
                total.add(sums[index])
            with T.serial(parts) as part:
                total.add(partials[part * tokens * ffn.hidden + index])
            c.store(sums, index, total.get())
    return kernel


def make_many_sums(ffn: FfnKernels, fp16: bool) -> c.Kernel:
    groups = ffn.hidden // GROUP
    columns = -(-ffn.hidden // many.COLUMNS)
    with c.Kernel.declare(f"sums_{many.TOKENS}", many.TILE_BLOCK) as kernel:
        values = kernel.take_array("values")
        weights = Weights.take(kernel, "down", ffn.precision, 1, fp16)
        partials = kernel.take_array("partials")
        neurons, tokens, parts = kernel.take_numbers("count tokens parts")
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
                    return T.min(first + term, neurons - 1)

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
