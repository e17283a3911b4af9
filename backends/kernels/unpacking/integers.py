"""Integers of 2, 4 and 8 bits, and MXFP4, unpacked."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.tirx import Shuffle
from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.operands import DotPrimitive, Vector, look_up_bytes
from pi2.backends.kernels.unpacking.unpacking import Block, Chunk, Place, Unpacking, look_up_floats
from pi2.formats import find_packing
from pi2.formats.micro_floats import MAGNITUDES, NUMBERS
from pi2.formats.packing import GROUP, Packing


class Bytes(Unpacking):
    """A field is a code; if the primitive takes no whole bytes, two nibbles of one."""

    divides_bytes = False
    stream_places = 4

    def list_elements(self, tile: Place) -> list[v.Expr]:
        return [4 * tile + index for index in range(4)]

    def unpack_word(self, isa: Isa, block: Block, word: v.Expr, tile: Place) -> list[v.Expr]:
        lanes = block.lanes
        result = []
        for index in range(4):
            shifted = word << v.constant(24 - 8 * index, "int32", lanes) if index < 3 else word
            code = shifted >> v.constant(24, "int32", lanes)
            result.append(v.cast(code, "float32", lanes))
        return result

    def splits(self, dot: DotPrimitive) -> bool:
        return not dot.whole_bytes

    def split(self, dot: DotPrimitive, raw: v.Expr) -> list[v.Expr]:
        if dot.signed:
            return [v.let(v.reinterpret(raw, "int8", 4 * dot.width))]
        unsigned = v.let(raw ^ v.constant(0x80, "uint8", 4 * dot.width))
        if self.splits(dot):
            return [v.let(dot.take_low(unsigned)), v.let(dot.take_high(unsigned))]
        return [unsigned]

    def has_offset(self, dot: DotPrimitive) -> bool:
        return not dot.signed

    def finish(self, total: v.Expr, sums: v.Expr, width: int) -> v.Expr:
        return total + (sums << v.constant(4, "int32", width))

    def split_words(
        self, arm: bool, words: v.Expr, word: Place, count: int
    ) -> list[tuple[v.Expr, v.Expr]]:
        return [(word, v.reinterpret(words, "int8", 4 * count))]


class Nibbles(Unpacking):
    """Codes are fields less 8."""

    begins_with_offset = True
    values: Sequence[int] = range(-8, 8)

    def list_elements(self, tile: Place) -> list[v.Expr]:
        return [4 * tile + index // 2 + 16 * (index % 2) for index in range(8)]

    def unpack_word(self, isa: Isa, block: Block, word: v.Expr, tile: Place) -> list[v.Expr]:
        lanes = block.lanes
        table = isa.lanes == 16 and lanes == 16
        if table:
            values = v.let(v.cast(T.ramp(-8, 1, 16), "float32", 16))
        else:
            # q + 8 with its top bit flipped is q in two's complement.
            word = v.let(word ^ v.constant(-2004318072, "int32", lanes))
        result = []
        for index in range(8):
            if table:
                code = word >> v.constant(4 * index, "int32", lanes) if index else word
                result.append(look_up_floats(values, code))
                continue
            shifted = word << v.constant(28 - 4 * index, "int32", lanes) if index < 7 else word
            code = shifted >> v.constant(28, "int32", lanes)
            result.append(v.cast(code, "float32", lanes))
        return result

    def split(self, dot: DotPrimitive, raw: v.Expr) -> list[v.Expr]:
        return [v.let(dot.take_low(raw)), v.let(dot.take_high(raw))]

    def finish(self, total: v.Expr, sums: v.Expr, width: int) -> v.Expr:
        return total + sums

    def split_words(
        self, arm: bool, words: v.Expr, word: Place, count: int
    ) -> list[tuple[v.Expr, v.Expr]]:
        size = 4 * count
        codes = v.let(v.reinterpret(words, "uint8", size))
        low = codes & v.constant(15, "uint8", size)
        high = codes >> v.constant(4, "uint8", size)
        return [
            (chunk, self.find_numbers(arm, code, size))
            for chunk, code in ((word, low), (word + 4, high))
        ]

    def find_numbers(self, arm: bool, codes: v.Expr, size: int) -> v.Expr:
        """Return what nibbles uint8 [size] stand for, as int8."""
        return v.reinterpret(codes, "int8", size) - v.constant(8, "int8", size)


class Pairs(Unpacking):
    """Fields of two bits, less 1; a tile is half of a chunk."""

    def __init__(self, packing: Packing) -> None:
        super().__init__(packing)
        self.tiles = self.chunks * 2

    def find_chunk(self, tile: Place) -> Place:
        return tile // 2

    def list_elements(self, tile: Place) -> list[v.Expr]:
        # Field by field, so that the elements of a field lie side by side.
        first = 4 * self.find_chunk(tile) + 16 * (tile % 2)
        return [first + index % 4 + 8 * (index // 4) for index in range(8)]

    def unpack_word(self, isa: Isa, block: Block, word: v.Expr, tile: Place) -> list[v.Expr]:
        lanes = block.lanes
        one, three = (v.constant(number, "int32", lanes) for number in (1, 3))
        table = isa.lanes == 16 and lanes == 16
        if table:
            # Of the low 4 bits of each lane, two are the next code's.
            values = v.let(v.cast((T.ramp(0, 1, 16) & three) - one, "float32", 16))
        half = tile % 2
        turn = T.int32(4 * half) if isinstance(half, int) else T.cast(half * 4, "int32")
        word = v.let(word >> v.splat(turn, lanes))
        result = []
        for index in range(8):
            shift = 8 * (index % 4) + 2 * (index // 4)
            code = word >> v.constant(shift, "int32", lanes) if shift else word
            if table:
                result.append(look_up_floats(values, code))
            else:
                result.append(v.cast((code & three) - one, "float32", lanes))
        return result

    def count_folded(self, isa: Isa, lanes: int) -> int:
        # Both chunks of one lane fill half of a register, and two fields of them a whole one.
        return 4 if lanes == 1 else super().count_folded(isa, lanes)

    def take_fields(self, dot: DotPrimitive, chunk: Chunk) -> list[v.Expr]:
        whole = self.chunks * chunk.lanes
        if dot.width <= whole:
            return super().take_fields(dot, chunk)
        raw = v.let(chunk.load(chunk.byte, 4 * whole))
        half = DotPrimitive(dot.isa, whole)
        fields = [v.let(half.take_pair(raw, number)) for number in range(4)]
        return [v.let(Shuffle(fields[first : first + 2], list(range(16)))) for first in (0, 2)]

    def split(self, dot: DotPrimitive, raw: v.Expr) -> list[v.Expr]:
        return [v.let(dot.take_pair(raw, number)) for number in range(4)]

    def finish(self, total: v.Expr, sums: v.Expr, width: int) -> v.Expr:
        return total + (sums >> v.constant(3, "int32", width))

    def split_words(
        self, arm: bool, words: v.Expr, word: Place, count: int
    ) -> list[tuple[v.Expr, v.Expr]]:
        size, found = 4 * count, []
        codes = v.let(v.reinterpret(words, "uint8", size))
        three, one = v.constant(3, "uint8", size), v.constant(1, "int8", size)
        for field in range(4):
            code = (codes >> v.constant(2 * field, "uint8", size)) & three
            found.append((word + 2 * field, v.reinterpret(code, "int8", size) - one))
        return found


_TOP = MAGNITUDES[-1]


class _MicroFloats(Nibbles):
    begins_with_offset = False
    values = NUMBERS

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

    def find_numbers(self, arm: bool, codes: v.Expr, size: int) -> v.Expr:
        if size >= 16:
            return v.reinterpret(look_up_bytes(arm, NUMBERS, codes, size), "int8", size)
        # As many lanes have to be given as are taken.
        wide = v.let(Shuffle([codes] * (16 // size), list(range(16))))
        found = v.let(v.reinterpret(look_up_bytes(arm, NUMBERS, wide, 16), "int8", 16))
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


UNPACKINGS = {
    "mxfp4": _MicroFloats(find_packing("mxfp4")),
    "ternary": Pairs(find_packing("ternary")),
    "int4": Nibbles(find_packing("int4")),
    "int8": Bytes(find_packing("int8")),
}
