"""Packed vectors unpacked to floats, a tile at a time.

A *tile* is what one chunk of a block unpacks to: 4 ``lanes`` bytes.  Its elements are in *lane
order*: within a block of L lanes, element e of group j stands at ``e * L + j``; fp16 vectors are in
natural order.
"""

from __future__ import annotations

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.operands import Vector, list_runs
from pi2.plan.weights.layout import GROUP, Precision, count_chunks, weight_bytes


def list_tiles(hidden: int, precision: Precision) -> list[tuple[int, int, int]]:
    """Return (lanes, first group, number of tiles) for each run of equal blocks.

    A *tile* is the part of y that one 4 ``lanes``-byte chunk unpacks to.
    """
    if precision == "fp16":
        return [(16, 0, hidden // GROUP)]
    per_block = count_chunks(precision)
    return [(lanes, first, count * per_block) for lanes, first, count in list_runs(hidden)]


def emit_tile(
    isa: Isa, vector: Vector, lanes: int, first: v.Expr, chunk: v.Expr | int
) -> list[tuple[v.Expr, v.Expr]]:
    """Unpack a tile: (place in y, weights without their scale as float32 x lanes) of each element.

    ``first`` is the block's first group, ``chunk`` the chunk within the block.
    """
    if vector.precision == "fp16":
        byte = vector.weights_base + v.wide(first * GROUP * 2)
        return [
            (first * GROUP + half * 16, v.load_halves(vector.weights, byte + half * 32, 16))
            for half in range(2)
        ]
    group_bytes = weight_bytes(GROUP, vector.precision)
    byte = vector.weights_base + v.wide(first * group_bytes + chunk * (4 * lanes))
    word = v.let(v.load_as(vector.weights, byte, "int32", lanes))
    start = first * GROUP
    if vector.precision == "int2":
        return _unpack_pairs(isa, word, start, lanes, chunk)
    if vector.precision == "int8":
        result = []
        for index in range(4):
            place = start + (4 * chunk + index) * lanes
            shifted = word << v.constant(24 - 8 * index, "int32", lanes) if index < 3 else word
            code = shifted >> v.constant(24, "int32", lanes)
            result.append((place, v.cast(code, "float32", lanes)))
        return result
    table = isa.lanes == 16 and lanes == 16
    if table:
        # vpermps looks at the low 4 bits of each lane only: no mask, no subtraction.
        values = v.let(v.cast(T.ramp(-8, 1, 16), "float32", 16))
    else:
        # q + 8 with its top bit flipped is q in two's complement.
        word = v.let(word ^ v.constant(-2004318072, "int32", lanes))
    result = []
    for index in range(8):
        element = 4 * chunk + index // 2 + 16 * (index % 2)
        place = start + element * lanes
        if table:
            code = word >> v.constant(4 * index, "int32", lanes) if index else word
            weights = T.call_llvm_pure_intrin(
                "float32x16", "llvm.x86.avx512.permvar.sf.512", values, code
            )
        else:
            shifted = word << v.constant(28 - 4 * index, "int32", lanes) if index < 7 else word
            code = shifted >> v.constant(28, "int32", lanes)
            weights = v.cast(code, "float32", lanes)
        result.append((place, weights))
    return result


def _unpack_pairs(
    isa: Isa, word: v.Expr, start: v.Expr, lanes: int, chunk: v.Expr | int
) -> list[tuple[v.Expr, v.Expr]]:
    """Unpack a tile of int2."""
    table = isa.lanes == 16 and lanes == 16
    three = v.constant(3, "int32", lanes)
    if table:
        # vpermps looks at the low 4 bits of each lane, of which two are the next code's.
        numbers = T.ramp(0, 1, 16) & three
        values = v.let(v.cast(numbers + numbers - three, "float32", 16))
    result = []
    for index in range(16):
        # Field by field, so that the elements of a field lie side by side.
        byte, field = index % 4, index // 4
        place = start + (4 * chunk + byte + 8 * field) * lanes
        shift = 8 * byte + 2 * field
        code = word >> v.constant(shift, "int32", lanes) if shift else word
        if table:
            weights = T.call_llvm_pure_intrin(
                "float32x16", "llvm.x86.avx512.permvar.sf.512", values, code
            )
        else:
            number = v.let(code & three)
            weights = v.cast(number + number - three, "float32", lanes)
        result.append((place, weights))
    return result


def list_places(
    precision: Precision, lanes: int, first: v.Expr, chunk: v.Expr | int
) -> list[v.Expr]:
    """Return where the elements of a tile stand in y, in the order of `emit_tile`."""
    start = first * GROUP
    if precision == "fp16":
        return [v.let(start + half * 16) for half in range(2)]
    if precision == "int8":
        return [v.let(start + (4 * chunk + index) * lanes) for index in range(4)]
    elements = [4 * chunk + index // 2 + 16 * (index % 2) for index in range(8)]
    return [v.let(start + element * lanes) for element in elements]


def load_block_scale(vector: Vector, lanes: int, first: v.Expr) -> v.Expr:
    """Return the scales of a block as float32 x lanes."""
    if vector.precision == "fp16":
        return v.constant(1.0, "float32", lanes)
    return v.load_halves(vector.scales, vector.scales_base + v.wide(first * 2), lanes)
