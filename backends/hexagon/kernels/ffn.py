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

from collections.abc import Mapping
from typing import Any

import tvm
from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.hexagon.arrays import INPUTS, VECTORS, count_row_bytes
from pi2.backends.hexagon.specification import ALIGNMENT, LANES, LAYOUTS, FfnShape, Weights
from pi2.plan.weights.layout import GROUP

Expr = Any
Buffer = Any
Operands = Mapping[str, Expr]
_SIZE = 2**30
"""Elements of a view: nothing checks them."""


def view(address: Expr, dtype: str, align: int = 4) -> Buffer:
    """Return the memory at ``address`` as a flat array; ``align`` is a power of two."""
    # The compiler believes an alignment that it can see.
    wide = T.cast(address & T.int32(-align), "int64")
    kind = tvm.ir.PointerType(tvm.ir.PrimType(dtype))
    pointer = T.bind(T.reinterpret(wide, dtype=kind))
    return T.decl_buffer((_SIZE,), dtype, data=pointer, align=align)


def _call_hvx(name: str, *operands: Expr) -> Expr:
    """Return the words that an instruction of the vector unit gives."""
    return T.call_llvm_pure_intrin("int32x32", f"llvm.hexagon.V6.{name}.128B", *operands)


def call(name: str, *operands: Expr) -> None:
    T.evaluate(T.call_extern("int32", name, *operands))


def _number(value: float) -> Expr:
    return T.FloatImm("float32", value)


def _widen(value: Expr) -> Expr:
    return T.cast(value, "float32")


MAGIC = 12582912.0
"""1.5 * 2^23: added to a float, it leaves the nearest integer in the lowest bits."""
_MAGIC_BITS = 0x4B400000


def round_to_integer(value: Expr) -> Expr:
    """Return the nearest int32 of a float32 below 2^22 in size; of two, the even one."""
    return T.reinterpret(value + _number(MAGIC), dtype="int32") - T.int32(_MAGIC_BITS)


def _round_off(value: Expr) -> Expr:
    return T.cast(round_to_integer(value), "float32")


_MATH = v.ScalarMath(
    _number,
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
    weights: Expr,
    multipliers: Expr,
    inputs: Expr,
    offsets: Expr,
    pairs: Expr,
    sums: Expr,
) -> None:
    """``sums`` int32 [tokens, 32] of ``pairs`` pairs of groups."""
    packed, factors = view(weights, "int32", ALIGNMENT), view(multipliers, "int32", ALIGNMENT)
    words, starts = view(inputs, "int32", 8), view(offsets, "int32", 8)
    totals = [v.Cell(v.constant(0, "int32", LANES)) for _ in range(together)]
    mask, shift = v.let(v.constant(_LOW, "int32", LANES)), v.constant(4, "int32", LANES)
    with T.serial(pairs) as pair:
        factor = v.let(v.load(factors, pair * LANES, LANES))
        for half in range(2):
            group = v.let(pair * 2 + half)
            begin = [starts[group * together + token] for token in range(together)]
            dots = [v.Cell(v.splat(start, LANES)) for start in begin]
            for vector in range(_PACKED_VECTORS):
                codes = v.let(v.load(packed, (group * _PACKED_VECTORS + vector) * LANES, LANES))
                low, high = v.let(codes & mask), v.let((codes >> shift) & mask)
                for bytes_, word in ((low, vector), (high, _PACKED_VECTORS + vector)):
                    first = v.let((group * (GROUP // 4) + word) * together)
                    _emit_add(dots, bytes_, words, first)
            for total, dot in zip(totals, dots, strict=True):
                if half == 0:
                    added = _call_hvx("vmpyiewh.acc", total.get(), dot.get(), factor)
                else:
                    added = total.get() + _call_hvx("vmpyiowh", dot.get(), factor)
                total.set(added)
    _emit_store(totals, sums)


def emit_multiply_int8(
    together: int, weights: Expr, inputs: Expr, offsets: Expr, count: Expr, sums: Expr
) -> None:
    """``sums`` int32 [tokens, 32] of ``count`` words, a multiple of 8."""
    codes = view(weights, "int32", ALIGNMENT)
    words, starts = view(inputs, "int32", 8), view(offsets, "int32", 4)
    totals = [v.Cell(v.splat(starts[token], LANES)) for token in range(together)]
    with T.serial(T.shift_right(count, T.int32(3))) as step:
        for place in range(_UNROLLED):
            word = v.let(step * _UNROLLED + place)
            loaded = v.let(v.load(codes, word * LANES, LANES))
            _emit_add(totals, loaded, words, v.let(word * together))
    _emit_store(totals, sums)


def _emit_add(sums: list[v.Cell], codes: Expr, words: Buffer, first: Expr) -> None:
    for token, total in enumerate(sums):
        total.set(_call_hvx("vrmpybus.acc", total.get(), codes, words[first + token]))


def _emit_store(sums: list[v.Cell], address: Expr) -> None:
    out = view(address, "int32", ALIGNMENT)
    for token, total in enumerate(sums):
        v.store(out, T.int32(token * LANES), total.get(), LANES)


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


def _multiply_tile(
    o: Operands, kind: tuple[Weights, int, int], tile: Expr, block: Expr, sums: Expr
) -> None:
    """Multiply a tile with a block of tokens; ``kind``: of weights, their length, and the tokens
    of a block."""
    weights, length, together = kind
    codes, factors = count_row_bytes(weights, length)
    rows, inputs = o["weights"] + tile * (LANES * codes), o["inputs"] + block * (together * length)
    offsets = o["offsets"] + block * (together * 4 * LAYOUTS[weights].count_groups(length))
    name = name_multiply(weights, together)
    if LAYOUTS[weights].has_groups:
        multipliers, pairs = o["multipliers"] + tile * (LANES * factors), length // (2 * GROUP)
        call(name, rows, multipliers, inputs, offsets, T.int32(pairs), sums)
    else:
        call(name, rows, inputs, offsets, T.int32(length // 4), sums)


def emit_values(ffn: FfnShape, together: int, *operands: Expr) -> None:
    """``values`` float32 [tokens, neurons] of ``tiles`` tiles; values from neuron ``count`` on are
    0. ``plane`` has the bytes from one vector's scales and biases to the next one's."""
    o = dict(zip(VALUES, operands, strict=True))
    kind = ffn.weights, ffn.length, together
    neurons = v.let(o["tiles"] * LANES)
    sums = view(o["sums"], "int32", ALIGNMENT)
    scales, values = view(o["scales"], "float32"), view(o["values"], "float32")
    rows = [view(o["row_scales"] + o["plane"] * part, "float32") for part in range(ffn.inputs)]
    biases = [view(o["biases"] + o["plane"] * part, "float32") for part in range(ffn.inputs)]
    experts, routes = view(o["experts"], "int32"), view(o["routes"], "float32")
    with T.serial(o["tiles"]) as tile, T.serial(o["blocks"]) as block:
        for part in range(ffn.inputs):
            place = v.let(tile * ffn.inputs + part)
            _multiply_tile(o, kind, place, block, o["sums"] + part * together * ALIGNMENT)
        with T.serial(together) as index, T.serial(LANES) as lane:
            token = v.let(block * together + index)
            neuron = v.let(tile * LANES + lane)
            scale = v.let(scales[token])
            products = []
            for part in range(ffn.inputs):
                total = sums[(part * together + index) * LANES + lane]
                product = _widen(total) * (rows[part][neuron] * scale)
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
            value = T.Select(neuron < o["count"], value, _number(0.0))
            v.store(values, token * neurons + neuron, value, 1)


def emit_requantize(together: int, *operands: Expr) -> None:
    """Round ``values`` float32 [tokens, neurons] to bytes with a scale for every token: the inputs,
    offsets and scales of an int8 product."""
    o = dict(zip(REQUANTIZE, operands, strict=True))
    values, scales = view(o["values"], "float32"), view(o["scales"], "float32")
    offsets, out = view(o["offsets"], "int32"), view(o["inputs"], "int32")
    words = v.let(T.shift_right(o["neurons"], T.int32(2)))
    with T.serial(o["blocks"]) as block, T.serial(together) as index:
        token = v.let(block * together + index)
        row = v.let(token * o["neurons"])
        peak = v.Cell(_number(0.0))
        with T.serial(o["neurons"]) as neuron:
            peak.set(T.max(peak.get(), T.abs(values[row + neuron])))
        largest = v.let(peak.get())
        is_zero = largest == _number(0.0)
        safe = v.let(T.Select(is_zero, _number(1.0), largest))
        inverse = v.let(T.Select(is_zero, _number(0.0), _number(_TOP) / safe))
        total = v.Cell(T.int32(0))
        with T.serial(words) as word:
            packed = T.int32(0)
            for place in range(4):
                code = v.let(round_to_integer(values[row + word * 4 + place] * inverse))
                total.set(total.get() + code)
                packed = packed | ((code & T.int32(255)) << T.int32(8 * place))
            v.store(out, (block * words + word) * together + index, packed, 1)
        v.store(scales, token, largest * _number(1.0 / _TOP), 1)
        v.store(offsets, token, total.get() * -128, 1)


def emit_sums(hidden: int, together: int, *operands: Expr) -> None:
    """Add the neurons' down columns times their values to ``results`` float32 [tokens, hidden]."""
    o = dict(zip(SUMS, operands, strict=True))
    sums, results = view(o["sums"], "int32", ALIGNMENT), view(o["results"], "float32")
    columns, scales = view(o["down_scales"], "float32"), view(o["scales"], "float32")
    name = name_multiply("int8", together)
    with T.serial(o["columns"]) as column, T.serial(o["blocks"]) as block:
        call(
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
            product = _widen(sums[index * LANES + lane]) * (columns[element] * scales[token])
            v.store(results, place, results[place] + product, 1)


def emit_product(weights: Weights, length: int, together: int, *operands: Expr) -> None:
    """``results`` float32 [tokens, rows] of ``tiles`` tiles of a matrix."""
    o = dict(zip(PRODUCT, operands, strict=True))
    sums, results = view(o["sums"], "int32", ALIGNMENT), view(o["results"], "float32")
    rows, scales = view(o["row_scales"], "float32"), view(o["scales"], "float32")
    with T.serial(o["tiles"]) as tile, T.serial(o["blocks"]) as block:
        _multiply_tile(o, (weights, length, together), tile, block, o["sums"])
        with T.serial(together) as index, T.serial(LANES) as lane:
            token = v.let(block * together + index)
            row = v.let(tile * LANES + lane)
            product = _widen(sums[index * LANES + lane]) * (rows[row] * scales[token])
            v.store(results, token * (o["tiles"] * LANES) + row, product, 1)
