"""Packed vectors unpacked to floats, a tile at a time."""

from __future__ import annotations

from tvm.tirx import Shuffle
from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.operands import Vector, list_runs
from pi2.formats import find_packing
from pi2.formats.micro_floats import MAGNITUDES
from pi2.plan.weights.layout import GROUP, Precision, weight_bytes


def list_tiles(hidden: int, precision: Precision) -> list[tuple[int, int, int]]:
    """Return (lanes, first group, number of tiles) for each run of equal blocks."""
    if precision == "fp16":
        return [(16, 0, hidden // GROUP)]
    per_block = count_tiles(precision)
    return [(lanes, first, count * per_block) for lanes, first, count in list_runs(hidden)]


def count_tiles(precision: Precision) -> int:
    """Return the tiles of a block."""
    if precision == "fp16":
        return 1
    return 4 if precision == "ternary" else find_packing(precision).chunks


def count_tile_bytes(precision: Precision, lanes: int) -> int:
    """Return the bytes of weights that a tile of a block of ``lanes`` begins to read."""
    if precision == "fp16":
        return 2 * GROUP
    return 4 * lanes * find_packing(precision).chunks // count_tiles(precision)


def emit_tile(
    isa: Isa, vector: Vector, lanes: int, first: v.Expr, tile: v.Expr | int
) -> list[tuple[v.Expr, v.Expr]]:
    """Unpack a tile: (place in y, weights without their scale as float32 x lanes) of each element;
    with it, where it has one of its own.

    ``first`` is the block's first group, ``tile`` the tile within the block.
    """
    if vector.precision == "fp16":
        byte = vector.weights_base + v.wide(first * GROUP * 2)
        return [
            (first * GROUP + half * 16, v.load_halves(vector.weights, byte + half * 32, 16))
            for half in range(2)
        ]
    group_bytes = weight_bytes(GROUP, vector.precision)
    chunk = tile // 2 if vector.precision == "ternary" else tile
    byte = vector.weights_base + v.wide(first * group_bytes + chunk * (4 * lanes))
    word = v.let(v.load_as(vector.weights, byte, "int32", lanes))
    start = first * GROUP
    if vector.precision == "ternary":
        return _unpack_ternary(isa, word, start, lanes, tile)
    if vector.precision == "int2":
        return _unpack_pairs(isa, word, start, lanes, chunk)
    if vector.precision == "int3":
        place = vector.weights_base + v.wide(first * group_bytes + 8 * lanes)
        highest = v.let(v.load_as(vector.weights, place, "int32", lanes))
        return _unpack_triples(word, highest, start, lanes, chunk)
    if vector.precision == "int8":
        result = []
        for index in range(4):
            place = start + (4 * chunk + index) * lanes
            shifted = word << v.constant(24 - 8 * index, "int32", lanes) if index < 3 else word
            code = shifted >> v.constant(24, "int32", lanes)
            result.append((place, v.cast(code, "float32", lanes)))
        return result
    if vector.precision == "mxfp4":
        return _unpack_magnitudes(isa, vector, word, start, lanes, chunk)
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


def _unpack_ternary(
    isa: Isa, word: v.Expr, start: v.Expr, lanes: int, tile: v.Expr | int
) -> list[tuple[v.Expr, v.Expr]]:
    """Unpack a tile of ternary: the lower or the higher two fields of each byte of a chunk."""
    table = isa.lanes == 16 and lanes == 16
    one, three = v.constant(1, "int32", lanes), v.constant(3, "int32", lanes)
    if table:
        # vpermps looks at the low 4 bits of each lane, of which two are the next code's.
        values = v.let(v.cast((T.ramp(0, 1, 16) & three) - one, "float32", 16))
    half = tile % 2
    turn = T.int32(4 * half) if isinstance(half, int) else T.cast(half * 4, "int32")
    own = v.let(word >> v.splat(turn, lanes))
    result = []
    for place, index in zip(_list_ternary_places(start, lanes, tile), range(8), strict=True):
        shift = 8 * (index % 4) + 2 * (index // 4)
        code = own >> v.constant(shift, "int32", lanes) if shift else own
        if table:
            weights = T.call_llvm_pure_intrin(
                "float32x16", "llvm.x86.avx512.permvar.sf.512", values, code
            )
        else:
            weights = v.cast((code & three) - one, "float32", lanes)
        result.append((place, weights))
    return result


def _list_ternary_places(start: v.Expr, lanes: int, tile: v.Expr | int) -> list[v.Expr]:
    first = 4 * (tile // 2) + 16 * (tile % 2)
    return [start + (first + index % 4 + 8 * (index // 4)) * lanes for index in range(8)]


def _unpack_magnitudes(
    isa: Isa, vector: Vector, word: v.Expr, start: v.Expr, lanes: int, chunk: v.Expr | int
) -> list[tuple[v.Expr, v.Expr]]:
    """Unpack a tile of mxfp4."""
    table = isa.lanes == 16 and lanes == 16
    if table:
        numbers = [*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)]
        values = v.let(v.list_constants(numbers, "float32"))
    scales = []
    if vector.spread:
        # Bytes of the int8 layout, whose chunks have half as many elements of a group.
        base = vector.scales_base + v.wide(start + chunk * (4 * lanes))
        scales = [
            v.let(v.load_as(vector.scales, base + half * (16 * lanes), "int32", lanes))
            for half in range(2)
        ]
    result = []
    for index in range(8):
        byte, half = index // 2, index % 2
        place = start + (4 * chunk + byte + 16 * half) * lanes
        code = word >> v.constant(4 * index, "int32", lanes) if index else word
        if table:
            weights = T.call_llvm_pure_intrin(
                "float32x16", "llvm.x86.avx512.permvar.sf.512", values, code
            )
        else:
            weights = _find_magnitude(v.let(code), lanes)
        if vector.spread:
            weights = weights * _take_unit(scales[half], byte, lanes)
        result.append((place, weights))
    return result


def _find_magnitude(code: v.Expr, lanes: int) -> v.Expr:
    """Return what the low 4 bits of int32 lanes stand for in mxfp4, as float32."""
    # A number of 32 bits has room for eight magnitudes of four.
    digits = sum(magnitude << (4 * place) for place, magnitude in enumerate(MAGNITUDES))
    seven, four = v.constant(7, "uint32", lanes), v.constant(2, "uint32", lanes)
    shift = (v.cast(code, "uint32", lanes) & seven) << four
    magnitude = (v.constant(digits, "uint32", lanes) >> shift) & v.constant(15, "uint32", lanes)
    number = v.reinterpret(v.cast(magnitude, "float32", lanes), "int32", lanes)
    sign = (code & v.constant(8, "int32", lanes)) << v.constant(28, "int32", lanes)
    return v.reinterpret(number | sign, "float32", lanes)


def _take_unit(word: v.Expr, byte: int, lanes: int) -> v.Expr:
    """Return the unit (`pi2.formats.micro_floats`) whose exponent is a byte of int32 lanes."""
    shift = v.constant(abs(23 - 8 * byte), "int32", lanes)
    moved = word << shift if byte < 3 else word >> shift
    bits = moved & v.constant(0x7F800000, "int32", lanes)
    return v.reinterpret(bits, "float32", lanes)


def load_scales(vector: Vector, group: v.Expr, count: int) -> v.Expr:
    """Return the scales of ``count`` groups from ``group`` on as float32."""
    if vector.precision == "ternary":
        return v.splat(v.load_as(vector.scales, vector.scales_base, "float32", 1), count)
    if vector.precision != "mxfp4":
        return v.load_halves(vector.scales, vector.scales_base + v.wide(group * 2), count)
    exponents = v.load(vector.scales, vector.scales_base + v.wide(group), count)
    bits = v.cast(exponents, "int32", count) << v.constant(23, "int32", count)
    return v.reinterpret(bits, "float32", count)


def _unpack_triples(
    word: v.Expr, highest: v.Expr, start: v.Expr, lanes: int, chunk: v.Expr | int
) -> list[tuple[v.Expr, v.Expr]]:
    """Unpack a tile of int3."""
    one, three, seven = (v.constant(value, "int32", lanes) for value in (1, 3, 7))
    turn = T.int32(chunk) if isinstance(chunk, int) else T.cast(chunk, "int32")
    own = v.let(highest >> v.splat(turn, lanes))
    result = []
    for index in range(16):
        # Field by field, so that the elements of a field lie side by side.
        byte, field = index % 4, index // 4
        place = start + (4 * chunk + byte + 8 * field) * lanes
        shift = v.constant(8 * byte + 2 * field, "int32", lanes)
        lower, high = (word >> shift) & three, (own >> shift) & one
        number = v.let(lower + (high << v.constant(2, "int32", lanes)))
        result.append((place, v.cast(number + number - seven, "float32", lanes)))
    return result


def list_places(
    precision: Precision, lanes: int, first: v.Expr, tile: v.Expr | int
) -> list[v.Expr]:
    """Return where the elements of a tile stand in y, in the order of `emit_tile`."""
    start = first * GROUP
    if precision == "ternary":
        return [v.let(place) for place in _list_ternary_places(start, lanes, tile)]
    if precision == "fp16":
        return [v.let(start + half * 16) for half in range(2)]
    if precision == "int8":
        return [v.let(start + (4 * tile + index) * lanes) for index in range(4)]
    elements = [4 * tile + index // 2 + 16 * (index % 2) for index in range(8)]
    return [v.let(start + element * lanes) for element in elements]


def load_block_scale(vector: Vector, lanes: int, first: v.Expr) -> v.Expr:
    """Return the scales of a block as float32 x lanes, times the vector's factor: what `emit_tile`
    leaves out."""
    has_scales = vector.precision != "fp16" and not vector.spread
    one = v.constant(1.0, "float32", lanes)
    scales = load_scales(vector, first, lanes) if has_scales else one
    if vector.factor_base is None:
        return scales
    factor = v.splat(v.load_as(vector.weights, vector.factor_base, "float32", 1), lanes)
    return scales * factor if has_scales else factor


WIDE = 16
"""Elements that are unpacked together."""
_FIELDS = 4
"""Elements of a group in a word: a byte each, which in weights has two."""


def can_widen(isa: Isa, precision: Precision, lanes: int) -> bool:
    """Return whether `emit_narrow_block` unpacks blocks of ``lanes``."""
    return isa.lanes == WIDE and lanes < WIDE and precision in ("int4", "mxfp4")


def emit_narrow_block(vector: Vector, lanes: int, first: v.Expr) -> list[tuple[v.Expr, v.Expr]]:
    """Unpack the block of ``lanes`` that begins with group ``first``: (place in y, weights without
    their scale as float32 x 16) of each 16 elements."""
    byte = vector.weights_base + v.wide(first * weight_bytes(GROUP, vector.precision))
    words = _Words(vector.weights, byte, lanes)
    units = None
    if vector.spread:
        units = _Words(vector.scales, vector.scales_base + v.wide(first * GROUP), lanes)
    table = v.let(v.list_constants(_list_values(vector.precision), "float32"))
    found = []
    for number in range(2 * lanes):
        element = number * WIDE // lanes
        half = element // (GROUP // 2)
        code = words.take_fields(element % (GROUP // 2), 4 * half)
        weights = T.call_llvm_pure_intrin(
            "float32x16", "llvm.x86.avx512.permvar.sf.512", table, code
        )
        if units is not None:
            exponents = units.take_fields(element, 0) << v.constant(23, "int32", WIDE)
            bits = exponents & v.constant(0x7F800000, "int32", WIDE)
            weights = weights * v.reinterpret(bits, "float32", WIDE)
        found.append((v.let(first * GROUP + number * WIDE), v.let(weights)))
    return found


def load_wide_scale(vector: Vector, value: v.Expr, lanes: int, first: v.Expr) -> v.Expr:
    """Return what each of 16 elements is multiplied with: the scale of its group, times a neuron's
    ``value``."""
    scale = v.let(load_block_scale(vector, lanes, first) * v.splat(value, lanes))
    return _repeat(scale, lanes, [lane % lanes for lane in range(WIDE)])


class _Words:
    """int32 words of a block, chunk by chunk, each of which has one for every group."""

    def __init__(self, buffer: v.Buffer, byte: v.Expr, lanes: int) -> None:
        self._buffer = buffer
        self._byte = byte
        self._lanes = lanes
        self._loaded: dict[int, v.Expr] = {}

    def take_fields(self, element: int, shift: int) -> v.Expr:
        """Return int32 x 16 whose low bits are the bytes of 16 elements, from ``element`` of the
        groups on, without their lowest ``shift`` bits; the bits above have no meaning."""
        lanes = self._lanes
        own = [element + lane // lanes for lane in range(WIDE)]
        first = own[0] // _FIELDS
        count = (own[-1] // _FIELDS - first + 1) * lanes
        if first not in self._loaded:
            place = self._byte + 4 * first * lanes
            self._loaded[first] = v.let(v.load_as(self._buffer, place, "int32", count))
        words = [(at // _FIELDS - first) * lanes + lane % lanes for lane, at in enumerate(own)]
        shifts = v.list_constants([8 * (at % _FIELDS) + shift for at in own], "int32")
        return _repeat(self._loaded[first], count, words) >> shifts


def _repeat(value: v.Expr, lanes: int, places: list[int]) -> v.Expr:
    """Return the lanes ``places`` [16] of a vector of ``lanes``."""
    if lanes == 1:
        return v.splat(value, WIDE)
    # As many lanes have to be given as are taken.
    return v.let(Shuffle([value] * (WIDE // lanes), places))


def _list_values(precision: Precision) -> list[int]:
    """What the 16 codes of 4 bits stand for."""
    if precision == "mxfp4":
        return [*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)]
    return list(range(-8, 8))
