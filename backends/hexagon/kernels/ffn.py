"""The FFN in three passes: values of neurons, rounded to bytes, and their sums; and products.

Tokens come in *blocks* of as many as a pass over weights computes.  All arrays are described in
`products` and in `pi2.backends.hexagon.packing`.

Tiles of 32 rows times a few tokens, in integers.

Weights are unsigned bytes and inputs signed ones (``vrmpy``: 4 products are added to each of 32
words).  What the unsigned codes add is taken off before: sums begin with *offsets*, which are
-8 (int4) or -128 (int8) times the sum of the inputs.

Arrays of a tile; word k of a token holds its elements 4k to 4k + 3:

- inputs: int32 [words, tokens], the words of all tokens side by side;
- int4: vector 4g + c has word c of group g in its low and word 4 + c in its high nibbles, as
  ``q + 8``; offsets int32 [groups, tokens]; multipliers int16, even halves for even groups.  A
  row's product is the sum of its groups' products times their multipliers.
- int8: vector k holds word k, as ``q + 128``; offsets int32 [tokens]."""

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.hexagon.arrays import INPUTS, VECTORS, count_row_bytes
from pi2.backends.hexagon.kernels import code as c
from pi2.backends.hexagon.specification import LANES, LAYOUTS, FfnShape, Weights
from pi2.plan.weights.layout import GROUP

MAGIC = 12582912.0
"""1.5 * 2^23: added to a float, it leaves the nearest integer in the lowest bits."""
_MAGIC_BITS = 0x4B400000


def round_to_integer(value: c.Expr) -> c.Expr:
    """Return the nearest int32 of a float32 below 2^22 in size; of two, the even one."""
    return T.reinterpret(value + c.number(MAGIC), dtype="int32") - T.int32(_MAGIC_BITS)


def _round_off(value: c.Expr) -> c.Expr:
    return T.cast(round_to_integer(value), "float32")


_MATH = v.ScalarMath(
    c.number,
    v.let,
    lambda x: v.take_exponential(x, 1, _round_off),
    lambda x: v.take_error_function(x, 1, _round_off),
    lambda x: v.take_tanh(x, 1, _round_off),
)


_LOW = 0x0F0F0F0F
_PACKED_VECTORS = 4
"""Vectors of a group in int4."""
_UNROLLED = 8
"""Words of int8 that are multiplied without a jump."""


def emit_multiply_int4(
    together: int,
    weights: c.Expr,
    multipliers: c.Expr,
    inputs: c.Expr,
    offsets: c.Expr,
    pairs: c.Expr,
    sums: c.Expr,
) -> None:
    """``sums`` int32 [tokens, 32] of ``pairs`` pairs of groups."""
    packed, factors = c.view_vectors(weights), c.view_vectors(multipliers)
    words, starts = c.view(inputs, "int32", 8), c.view(offsets, "int32", 8)
    totals = [v.Cell(c.splat(T.int32(0))) for _ in range(together)]
    mask, shift = v.let(c.splat(T.int32(_LOW))), c.splat(T.int32(4))
    with T.serial(pairs) as pair:
        factor = v.let(c.load(factors, pair))
        for half in range(2):
            group = v.let(pair * 2 + half)
            dots = [v.Cell(c.splat(starts[group * together + token])) for token in range(together)]
            for vector in range(_PACKED_VECTORS):
                codes = v.let(c.load(packed, group * _PACKED_VECTORS + vector))
                low, high = v.let(codes & mask), v.let((codes >> shift) & mask)
                for bytes_, word in ((low, vector), (high, _PACKED_VECTORS + vector)):
                    first = v.let((group * (GROUP // 4) + word) * together)
                    _emit_add(dots, bytes_, words, first)
            for total, dot in zip(totals, dots, strict=True):
                if half == 0:
                    added = c.call_hvx("vmpyiewh.acc", total.get(), dot.get(), factor)
                else:
                    added = total.get() + c.call_hvx("vmpyiowh", dot.get(), factor)
                total.set(added)
    _emit_store(totals, sums)


def emit_multiply_int8(
    together: int, weights: c.Expr, inputs: c.Expr, offsets: c.Expr, count: c.Expr, sums: c.Expr
) -> None:
    """``sums`` int32 [tokens, 32] of ``count`` words, a multiple of 8."""
    codes = c.view_vectors(weights)
    words, starts = c.view(inputs, "int32", 8), c.view(offsets, "int32", 4)
    totals = [v.Cell(c.splat(starts[token])) for token in range(together)]
    with T.serial(T.shift_right(count, T.int32(3))) as step:
        for place in range(_UNROLLED):
            word = v.let(step * _UNROLLED + place)
            _emit_add(totals, v.let(c.load(codes, word)), words, v.let(word * together))
    _emit_store(totals, sums)


def _emit_add(sums: list[v.Cell], codes: c.Expr, words: c.Buffer, first: c.Expr) -> None:
    for token, total in enumerate(sums):
        total.set(c.call_hvx("vrmpybus.acc", total.get(), codes, words[first + token]))


def _emit_store(sums: list[v.Cell], address: c.Expr) -> None:
    out = c.view_vectors(address)
    for token, total in enumerate(sums):
        c.store(out, T.int32(token), total.get())


VALUES = (
    *(*VECTORS, "biases", "experts", "plane"),
    *(*INPUTS, "routes", "tiles", "blocks", "count", "values", "sums"),
)
"""Parameters of `emit_values`, and so on."""
REQUANTIZE = ("values", "neurons", "blocks", *INPUTS)
SUMS = (
    *("down", "down_scales", "stride", "columns", "words", "blocks"),
    *(*INPUTS, "results", "sums"),
)
PRODUCT = (*VECTORS, "tiles", "blocks", *INPUTS, "results", "sums")
_TOP = 127.0


def name_multiply(weights: Weights, together: int) -> str:
    """The function that multiplies a tile with a block of tokens."""
    return f"multiply_{weights}_{together}"


def count_tile_bytes(weights: Weights, length: int) -> tuple[int, int]:
    """Bytes of a tile of 32 vectors of ``length``, and of its multipliers."""
    codes, multipliers = count_row_bytes(weights, length)
    return LANES * codes, LANES * multipliers


def count_block_bytes(weights: Weights, length: int, together: int) -> tuple[int, int]:
    return together * length, together * 4 * LAYOUTS[weights].count_groups(length)


def emit_call(
    weights: Weights,
    length: int,
    together: int,
    tile: tuple[c.Expr, c.Expr],
    block: tuple[c.Expr, c.Expr],
    sums: c.Expr,
) -> None:
    """Multiply a tile, codes and multipliers, with a block of tokens, inputs and offsets."""
    (codes, multipliers), (inputs, offsets) = tile, block
    name = name_multiply(weights, together)
    if LAYOUTS[weights].has_groups:
        pairs = T.int32(length // (2 * GROUP))
        c.call(name, codes, multipliers, inputs, offsets, pairs, sums)
    else:
        c.call(name, codes, inputs, offsets, T.int32(length // 4), sums)


def emit_values(ffn: FfnShape, together: int, *operands: c.Expr) -> None:
    """``values`` float32 [tokens, neurons] of ``tiles`` tiles; values from neuron ``count`` on are
    0. ``plane`` has the bytes from one vector's scales and biases to the next one's."""
    o = dict(zip(VALUES, operands, strict=True))
    code_bytes, factor_bytes = count_tile_bytes(ffn.weights, ffn.length)
    input_bytes, offset_bytes = count_block_bytes(ffn.weights, ffn.length, together)
    neurons = v.let(o["tiles"] * LANES)
    sums = c.view(o["sums"], "int32", c.VECTOR_BYTES)
    scales, values = c.view(o["scales"], "float32"), c.view(o["values"], "float32")
    rows = [c.view(o["row_scales"] + o["plane"] * part, "float32") for part in range(ffn.inputs)]
    biases = [c.view(o["biases"] + o["plane"] * part, "float32") for part in range(ffn.inputs)]
    experts, routes = c.view(o["experts"], "int32"), c.view(o["routes"], "float32")
    with T.serial(o["tiles"]) as tile, T.serial(o["blocks"]) as block:
        for part in range(ffn.inputs):
            place = v.let(tile * ffn.inputs + part)
            emit_call(
                ffn.weights,
                ffn.length,
                together,
                (o["weights"] + place * code_bytes, o["multipliers"] + place * factor_bytes),
                (o["inputs"] + block * input_bytes, o["offsets"] + block * offset_bytes),
                o["sums"] + part * together * c.VECTOR_BYTES,
            )
        with T.serial(together) as index, T.serial(LANES) as lane:
            token = v.let(block * together + index)
            neuron = v.let(tile * LANES + lane)
            scale = v.let(scales[token])
            products = []
            for part in range(ffn.inputs):
                total = sums[(part * together + index) * LANES + lane]
                product = c.widen(total) * (rows[part][neuron] * scale)
                products.append(
                    v.let(product + biases[part][neuron] if ffn.options.bias else product)
                )
            weight = None
            if ffn.experts:
                weight = v.let(routes[token * ffn.experts + experts[neuron]])
            if weight is not None and ffn.weighs_input:
                products = [v.let(product * weight) for product in products]
            up = products[1] if ffn.options.gated else None
            value = v.activate(_MATH, ffn.options, products[0], up)
            if weight is not None and not ffn.weighs_input:
                value = value * weight
            value = T.Select(neuron < o["count"], value, c.number(0.0))
            c.write(values, token * neurons + neuron, value)


def emit_requantize(together: int, *operands: c.Expr) -> None:
    """Round ``values`` float32 [tokens, neurons] to bytes with a scale for every token: the inputs,
    offsets and scales of an int8 product."""
    o = dict(zip(REQUANTIZE, operands, strict=True))
    values, scales = c.view(o["values"], "float32"), c.view(o["scales"], "float32")
    offsets, out = c.view(o["offsets"], "int32"), c.view(o["inputs"], "int32")
    words = v.let(T.shift_right(o["neurons"], T.int32(2)))
    with T.serial(o["blocks"]) as block, T.serial(together) as index:
        token = v.let(block * together + index)
        row = v.let(token * o["neurons"])
        peak = v.Cell(c.number(0.0))
        with T.serial(o["neurons"]) as neuron:
            peak.set(T.max(peak.get(), T.abs(values[row + neuron])))
        largest = v.let(peak.get())
        is_zero = largest == c.number(0.0)
        safe = v.let(T.Select(is_zero, c.number(1.0), largest))
        inverse = v.let(T.Select(is_zero, c.number(0.0), c.number(_TOP) / safe))
        total = v.Cell(T.int32(0))
        with T.serial(words) as word:
            packed = T.int32(0)
            for place in range(4):
                code = v.let(round_to_integer(values[row + word * 4 + place] * inverse))
                total.set(total.get() + code)
                packed = packed | ((code & T.int32(255)) << T.int32(8 * place))
            c.write(out, (block * words + word) * together + index, packed)
        c.write(scales, token, largest * c.number(1.0 / _TOP))
        c.write(offsets, token, total.get() * -128)


def emit_sums(hidden: int, together: int, *operands: c.Expr) -> None:
    """Add the neurons' down columns times their values to ``results`` float32 [tokens, hidden]."""
    o = dict(zip(SUMS, operands, strict=True))
    sums, results = c.view(o["sums"], "int32", c.VECTOR_BYTES), c.view(o["results"], "float32")
    columns, scales = c.view(o["down_scales"], "float32"), c.view(o["scales"], "float32")
    name = name_multiply("int8", together)
    with T.serial(o["columns"]) as column, T.serial(o["blocks"]) as block:
        c.call(
            name,
            o["down"] + column * o["stride"],
            o["inputs"] + block * o["words"] * (4 * together),
            o["offsets"] + block * (4 * together),
            o["words"],
            o["sums"],
        )
        with T.serial(together) as index, T.serial(LANES) as lane:
            token = v.let(block * together + index)
            element = v.let(column * LANES + lane)
            place = v.let(token * hidden + element)
            product = c.widen(sums[index * LANES + lane]) * (columns[element] * scales[token])
            c.write(results, place, results[place] + product)


def emit_product(weights: Weights, length: int, together: int, *operands: c.Expr) -> None:
    """``results`` float32 [tokens, rows] of ``tiles`` tiles of a matrix."""
    o = dict(zip(PRODUCT, operands, strict=True))
    code_bytes, factor_bytes = count_tile_bytes(weights, length)
    input_bytes, offset_bytes = count_block_bytes(weights, length, together)
    sums, results = c.view(o["sums"], "int32", c.VECTOR_BYTES), c.view(o["results"], "float32")
    rows, scales = c.view(o["row_scales"], "float32"), c.view(o["scales"], "float32")
    with T.serial(o["tiles"]) as tile, T.serial(o["blocks"]) as block:
        emit_call(
            weights,
            length,
            together,
            (o["weights"] + tile * code_bytes, o["multipliers"] + tile * factor_bytes),
            (o["inputs"] + block * input_bytes, o["offsets"] + block * offset_bytes),
            o["sums"],
        )
        with T.serial(together) as index, T.serial(LANES) as lane:
            token = v.let(block * together + index)
            row = v.let(tile * LANES + lane)
            product = c.widen(sums[index * LANES + lane]) * (rows[row] * scales[token])
            c.write(results, token * (o["tiles"] * LANES) + row, product)
