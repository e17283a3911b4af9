"""MXFP4 unpacked."""

from __future__ import annotations

from tvm.tirx import Shuffle
from tvm.tirx.script import builder as T

from pi2.backends.blocks.unpacking.codebooks import look_up_bytes
from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.operands import DotPrimitive, Vector
from pi2.backends.kernels.unpacking.unpacking import Block, Nibbles, Place, look_up_floats
from pi2.formats import find_packing
from pi2.formats.micro_floats import MAGNITUDES, NUMBERS
from pi2.formats.packing import GROUP

_TOP = MAGNITUDES[-1]


class _MicroFloats(Nibbles):
    begins_with_offset = False

    def unpack_word(self, isa: Isa, block: Block, word: v.Expr, tile: Place) -> list[v.Expr]:
        vector, lanes = block.vector, block.lanes
        table = isa.lanes == 16 and lanes == 16
        if table:
            values = v.let(v.list_constants(list(NUMBERS), "float32"))
        scales = []
        if vector.spread:
            # Bytes of the int8 layout, whose chunks have half as many elements of a group.
            base = vector.scales_base + v.wide(block.first * GROUP + tile * (4 * lanes))
            scales = [
                v.let(v.load_as(vector.scales, base + half * (16 * lanes), "int32", lanes))
                for half in range(2)
            ]
        result = []
        for index in range(8):
            code = word >> v.constant(4 * index, "int32", lanes) if index else word
            weights = look_up_floats(values, code) if table else _find_number(v.let(code), lanes)
            if vector.spread:
                weights = weights * _take_unit(scales[index % 2], index // 2, lanes)
            result.append(weights)
        return result

    def load_scales(self, vector: Vector, group: v.Expr, count: int) -> v.Expr:
        exponents = v.load(vector.scales, vector.scales_base + v.wide(group), count)
        bits = v.cast(exponents, "int32", count) << v.constant(23, "int32", count)
        return v.reinterpret(bits, "float32", count)

    def splits(self, dot: DotPrimitive) -> bool:
        return not dot.whole_bytes

    def split(self, dot: DotPrimitive, raw: v.Expr) -> list[v.Expr]:
        return [
            v.let(self._look_up(dot, dot.take_low(raw))),
            v.let(self._look_up(dot, dot.take_high(raw))),
        ]

    def _look_up(self, dot: DotPrimitive, codes: v.Expr) -> v.Expr:
        """Return what codes stand for, plus 12 unless weights are signed."""
        if dot.dot == "multiply":
            return _find_magnitudes(codes, 4 * dot.width)
        offset = 0 if dot.signed else _TOP
        numbers = [number + offset for number in NUMBERS]
        return look_up_bytes(dot.dot == "sdot", numbers, codes, 4 * dot.width)

    def has_offset(self, dot: DotPrimitive) -> bool:
        return not dot.signed

    def finish(self, total: v.Expr, sums: v.Expr, width: int) -> v.Expr:
        half = v.let(sums >> v.constant(1, "int32", width))
        return total + sums + half

    def find_numbers(self, codes: v.Expr, size: int) -> v.Expr:
        if size >= 16:
            return v.reinterpret(look_up_bytes(False, NUMBERS, codes, size), "int8", size)
        # As many lanes have to be given as are taken.
        wide = v.let(Shuffle([codes] * (16 // size), list(range(16))))
        found = v.let(v.reinterpret(look_up_bytes(False, NUMBERS, wide, 16), "int8", 16))
        return Shuffle([found], list(range(size)))


def _find_number(code: v.Expr, lanes: int) -> v.Expr:
    """Return what the low 4 bits of int32 lanes stand for, as float32."""
    # A number of 32 bits has room for eight magnitudes of four.
    digits = sum(magnitude << (4 * place) for place, magnitude in enumerate(MAGNITUDES))
    seven, four = v.constant(7, "uint32", lanes), v.constant(2, "uint32", lanes)
    shift = (v.cast(code, "uint32", lanes) & seven) << four
    magnitude = (v.constant(digits, "uint32", lanes) >> shift) & v.constant(15, "uint32", lanes)
    number = v.reinterpret(v.cast(magnitude, "float32", lanes), "int32", lanes)
    sign = (code & v.constant(8, "int32", lanes)) << v.constant(28, "int32", lanes)
    return v.reinterpret(number | sign, "float32", lanes)


def _find_magnitudes(codes: v.Expr, lanes: int) -> v.Expr:
    """Return q + 12 of codes without an instruction that looks up bytes."""

    def number(value: int) -> v.Expr:
        return v.constant(value, "uint8", lanes)

    place = v.let(codes & number(7))
    # 5, 6 and 7 stand for 6, 8 and 12.
    magnitude = v.let(
        place
        + T.max(place, number(4))
        - number(4)
        + T.Select(place == number(7), number(2), number(0))
    )
    return T.Select(codes > place, number(_TOP) - magnitude, number(_TOP) + magnitude)


def _take_unit(word: v.Expr, byte: int, lanes: int) -> v.Expr:
    """Return the unit (`pi2.formats.micro_floats`) whose exponent is a byte of int32 lanes."""
    shift = v.constant(abs(23 - 8 * byte), "int32", lanes)
    moved = word << shift if byte < 3 else word >> shift
    bits = moved & v.constant(0x7F800000, "int32", lanes)
    return v.reinterpret(bits, "float32", lanes)


UNPACKINGS = {"mxfp4": _MicroFloats(find_packing("mxfp4"))}
