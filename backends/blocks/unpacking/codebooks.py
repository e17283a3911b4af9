"""IQ types: codes of 8 or 4 weights that a grid has, with signs; and nibbles of a short table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from tvm.tirx.script import builder as T

from pi2.backends.blocks.machine import Machine, as_bytes, join, pick
from pi2.backends.blocks.room import GRIDS, HALVES
from pi2.backends.blocks.unpacking.block import (
    Block,
    Groups,
    Part,
    Source,
    Unpacking,
    fill,
    high,
    join_halves,
    low,
    split_group,
    split_nibbles,
)
from pi2.backends.compiler import vectors as v

_NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Weights that nibbles of IQ4_NL and IQ4_XS stand for."""
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the floats of 4 bits (E2M1)."""

FindCode = Callable[[int], v.Expr]
"""Returns the code of piece n of the block, or the signs of 8 weights, as int32."""


def _byte(source: Source, place: int) -> v.Expr:
    return v.let(T.cast(source.weights[source.base + place], "int32"))


def _word(source: Source, place: int) -> v.Expr:
    return v.let(T.cast(source.load_as(place, "int16"), "int32") & T.int32(0xFFFF))


def _bits(value: v.Expr, first: int, count: int) -> v.Expr:
    shifted = value if first == 0 else T.shift_right(value, T.int32(first))
    return shifted & T.int32((1 << count) - 1)


def look_up_bytes(arm: bool, numbers: Sequence[int], places: v.Expr, size: int) -> v.Expr:
    """Return the bytes of ``numbers`` [16] at ``places`` uint8 [size], 0 to 15; at least 16."""
    words = np.array(numbers, np.int8).view("<i4").tolist() * (size // 16)
    table = v.reinterpret(v.list_constants(words, "int32"), "int8", size)
    name = (
        "llvm.aarch64.neon.tbl1.v16i8"
        if arm
        else {
            16: "llvm.x86.ssse3.pshuf.b.128",
            32: "llvm.x86.avx2.pshuf.b",
            64: "llvm.x86.avx512.pshuf.b.512",
        }[size]
    )
    found = T.call_llvm_pure_intrin(
        f"int8x{size}", name, table, v.reinterpret(places, "int8", size)
    )
    return v.reinterpret(found, "uint8", size)


def _make_parts(
    source: Source,
    each: int,
    find_code: FindCode,
    find_signs: FindCode | None,
    add: Callable[[int], v.Expr] | None = None,
) -> list[Part]:
    """Look up ``each`` weights for a code; ``find_signs`` gives signs of 8 weights, ``add`` an int8
    correction of 8 weights."""
    width, dtype = source.width, "int64" if each == 8 else "int32"
    parts = []
    for first in range(0, 256, width):
        codes = range(first // each, (first + width) // each)
        found = [
            v.let(v.load_as(source.grid, v.wide(find_code(n)) * each, dtype, 1)) for n in codes
        ]
        value = v.let(v.reinterpret(join(found, 1), "int8", width))
        eights = range(first // 8, (first + width) // 8)
        if find_signs is not None:
            signs = [v.let(T.cast(find_signs(n), "uint8")) for n in eights]
            spread = pick(v.let(join(signs, 1)), len(signs), [k // 8 for k in range(width)])
            tested = spread & fill([1 << k % 8 for k in range(width)])
            zero = v.constant(0, "int8", width)
            is_positive = tested == v.constant(0, "uint8", width)
            value = v.let(T.Select(is_positive, value, zero - value))
        if add is not None:
            added = [v.let(T.cast(add(n), "int8")) for n in eights]
            value = v.let(value + pick(join(added, 1), len(added), [k // 8 for k in range(width)]))
        chunks = tuple(range(first // 16, (first + width) // 16))
        parts.append(Part(weights=value, chunks=chunks))
    return parts


def _find_known_signs(source: Source, name: str, code: v.Expr) -> v.Expr:
    """Return the signs that a code of 7 bits stands for."""
    return v.let(T.cast(source.grid[v.wide(code) + GRIDS[name]], "int32"))


def _join_scales(values: Sequence[v.Expr]) -> v.Expr:
    """Return 2 s + 1 of scales s, as int16."""
    two, one = T.int32(2), T.int32(1)
    return v.let(join([v.let(T.cast(value * two + one, "int16")) for value in values], 1))


def _nibble_scales(source: Source, place: int, count: int) -> v.Expr:
    """Return 2 s + 1 of ``count`` nibbles s, low ones first, as int16."""
    raw = source.load(place, count // 2)
    both = pick(raw, count // 2, [k // 2 for k in range(count)])
    shifts = fill([4 * (k % 2) for k in range(count)], "int16")
    scales = (v.cast(both, "int16", count) >> shifts) & v.constant(15, "int16", count)
    return v.let(scales + scales + v.constant(1, "int16", count))


def _scale(source: Source, factor: float, place: int = 0) -> v.Expr:
    return v.let(source.load_half(place) * T.float32(factor))


def _open_iq2_xxs(source: Source) -> Block:
    words = [v.let(source.load_as(6 + 8 * group, "int32")) for group in range(8)]
    parts = _make_parts(
        source,
        8,
        lambda n: _byte(source, 2 + 8 * (n // 4) + n % 4),
        lambda n: _find_known_signs(source, "iq2_xxs", _bits(words[n // 4], 7 * (n % 4), 7)),
    )
    return Block(
        parts=parts,
        is_signed=True,
        scale=_scale(source, 0.125),
        scales=_join_scales([_bits(word, 28, 4) for word in words]),
    )


def _open_iq2_xs(source: Source) -> Block:
    codes = [_word(source, 2 + 2 * n) for n in range(32)]
    parts = _make_parts(
        source,
        8,
        lambda n: _bits(codes[n], 0, 9),
        lambda n: _find_known_signs(source, "iq2_xs", _bits(codes[n], 9, 7)),
    )
    return Block(
        parts=parts,
        is_signed=True,
        scale=_scale(source, 0.125),
        scales=_nibble_scales(source, 66, 16),
        scale_count=16,
    )


def _open_iq2_s(source: Source) -> Block:
    upper = [_byte(source, 66 + group) for group in range(8)]

    def find_code(n: int) -> v.Expr:
        return _byte(source, 2 + n) | (_bits(upper[n // 4], 2 * (n % 4), 2) << T.int32(8))

    parts = _make_parts(source, 8, find_code, lambda n: _byte(source, 34 + n))
    return Block(
        parts=parts,
        is_signed=True,
        scale=_scale(source, 0.125),
        scales=_nibble_scales(source, 74, 16),
        scale_count=16,
    )


def _open_iq3_xxs(source: Source) -> Block:
    words = [v.let(source.load_as(66 + 4 * group, "int32")) for group in range(8)]
    parts = _make_parts(
        source,
        4,
        lambda n: _byte(source, 2 + n),
        lambda n: _find_known_signs(source, "iq3_xxs", _bits(words[n // 4], 7 * (n % 4), 7)),
    )
    return Block(
        parts=parts,
        is_signed=True,
        scale=_scale(source, 0.25),
        scales=_join_scales([_bits(word, 28, 4) for word in words]),
    )


def _open_iq3_s(source: Source) -> Block:
    upper = [_byte(source, 66 + group) for group in range(8)]

    def find_code(n: int) -> v.Expr:
        return _byte(source, 2 + n) | (_bits(upper[n // 8], n % 8, 1) << T.int32(8))

    parts = _make_parts(source, 4, find_code, lambda n: _byte(source, 74 + n))
    return Block(
        parts=parts,
        is_signed=True,
        scale=source.load_half(0),
        scales=_nibble_scales(source, 106, 8),
    )


def _eighth(is_less: v.Expr) -> v.Expr:
    return T.int32(1) - (is_less << T.int32(1))


def _open_iq1_s(source: Source) -> Block:
    upper = [_word(source, 34 + 2 * group) for group in range(8)]

    def find_code(n: int) -> v.Expr:
        return _byte(source, 2 + n) | (_bits(upper[n // 4], 3 * (n % 4), 3) << T.int32(8))

    parts = _make_parts(source, 8, find_code, None, lambda n: _eighth(_bits(upper[n // 4], 15, 1)))
    return Block(
        parts=parts,
        is_signed=True,
        scale=_scale(source, 0.125),
        scales=_join_scales([_bits(word, 12, 3) for word in upper]),
    )


def _open_iq1_m(source: Source) -> Block:
    upper = [_byte(source, 32 + pair) for pair in range(16)]
    words = [_word(source, 48 + 2 * number) for number in range(4)]
    bits = words[0] >> T.int32(12)
    for number in range(1, 4):
        bits = bits | ((words[number] >> T.int32(12)) << T.int32(4 * number))
    half = T.reinterpret(T.cast(v.let(bits), "uint16"), dtype="float16")
    nibbles = [_bits(upper[n // 2], 4 * (n % 2), 4) for n in range(32)]

    def find_code(n: int) -> v.Expr:
        return _byte(source, n) | (_bits(nibbles[n], 0, 3) << T.int32(8))

    parts = _make_parts(source, 8, find_code, None, lambda n: _eighth(_bits(nibbles[n], 3, 1)))
    return Block(
        parts=parts,
        is_signed=True,
        scale=v.let(T.cast(half, "float32") * T.float32(0.125)),
        scales=_join_scales([_bits(words[n // 4], 3 * (n % 4), 3) for n in range(16)]),
        scale_count=16,
    )


def _look_up(machine: Machine, table: Sequence[int], codes: v.Expr, size: int) -> v.Expr:
    """Return the numbers of nibbles, int8."""
    if machine.dot == "multiply":
        found = v.constant(table[0], "int8", size)
        for code, number in enumerate(table[1:], 1):
            is_it = codes == v.constant(code, "uint8", size)
            found = T.Select(is_it, v.constant(number, "int8", size), found)
        return v.let(found)
    found = look_up_bytes(machine.dot == "sdot", table, codes, size)
    return v.let(as_bytes(found, "int8", size))


def _open_iq4_xs(source: Source) -> Block:
    width, each = source.width, source.width // 16
    parts = []
    for first in range(0, 8, each):
        raw = source.load(8 + 16 * first, width)
        for field, codes in enumerate((low(raw, width), high(raw, width))):
            chunks = tuple(HALVES.place(b, field) for b in range(first, first + each))
            value = _look_up(source.machine, _NON_LINEAR, codes, width)
            parts.append(Part(weights=value, chunks=chunks))
    lower = v.splat(source.load_as(4, "int32"), 8) >> fill(range(0, 32, 4), "int32")
    upper = v.splat(_word(source, 2), 8) >> fill(range(0, 16, 2), "int32")
    joined = (lower & v.constant(15, "int32", 8)) | (
        (upper & v.constant(3, "int32", 8)) << v.constant(4, "int32", 8)
    )
    scales = v.cast(joined - v.constant(32, "int32", 8), "int16", 8)
    return Block(parts=parts, is_signed=True, scale=source.load_half(0), scales=v.let(scales))


def _join_powers(sources: Sequence[Source]) -> v.Expr:
    """Return the scales of MXFP4, halved: exponents of 2 less 127."""
    count = len(sources)
    exponents = v.let(join([_byte(source, 0) for source in sources], 1))

    def number(value: int) -> v.Expr:
        return v.constant(value, "int32", count)

    normal = (exponents - number(1)) << number(23)
    small = number(0x00200000) << T.min(exponents, number(1))
    bits = v.let(T.Select(exponents < number(2), small, normal))
    return v.let(v.reinterpret(bits, "float32", count))


def _split_table(
    machine: Machine, value: v.Expr, size: int, table: Sequence[int]
) -> Sequence[v.Expr]:
    return [_look_up(machine, table, codes, size) for codes in split_nibbles(machine, value, size)]


def _open_nvfp4(source: Source, half: int) -> Block:
    """Half of a block of 64: scales of 16 weights are floats of 8 bits without sign (E4M3)."""
    scales = []
    for number in range(2):
        code = _byte(source, 2 * half + number)
        exponent, fraction = v.let(_bits(code, 3, 4)), v.let(_bits(code, 0, 3))
        bits = ((exponent + T.int32(119)) << T.int32(23)) | (fraction << T.int32(20))
        normal = T.reinterpret(v.let(bits), dtype="float32")
        small = T.cast(fraction, "float32") * T.float32(2.0**-10)
        value = T.Select(exponent == T.int32(0), small, normal)
        is_none = T.Select(code == T.int32(0x7F), T.float32(0.0), value)
        scales.append(v.let(is_none))
    raw = source.load(4 + 16 * half, 16)
    # The low nibbles of 8 bytes, their high ones, and so again.
    both = v.let(pick(raw, 16, [k % 8 + 8 * (k // 16) for k in range(32)]))
    shifted = v.let(
        v.reinterpret(both, "uint32", 8) >> fill([4 * (k // 2 % 2) for k in range(8)], "uint32")
    )
    codes = as_bytes(shifted, "uint8", 32) & v.constant(15, "uint8", 32)
    size = min(source.width, 32)
    parts = [
        Part(weights=_look_up(source.machine, _DOUBLED, part.weights, size), chunks=part.chunks)
        for part in split_group(source, codes)
    ]
    return Block(parts=parts, is_signed=True, scale=T.float32(1.0), part_scales=scales)


_IQ4_NL = Groups(
    split=partial(_split_table, table=_NON_LINEAR),
    scales=partial(join_halves, place=0),
    is_signed=True,
)
_MXFP4 = Groups(
    places=(1,), split=partial(_split_table, table=_DOUBLED), scales=_join_powers, is_signed=True
)
UNPACKINGS = {
    **{
        name: Unpacking(size=size, elements=256, opens=(own,), most=most)
        for name, size, most, own in (
            ("iq1_s", 50, 9, _open_iq1_s),
            ("iq1_m", 56, 9, _open_iq1_m),
            ("iq2_xxs", 66, 43, _open_iq2_xxs),
            ("iq2_xs", 74, 43, _open_iq2_xs),
            ("iq2_s", 82, 43, _open_iq2_s),
            ("iq3_xxs", 98, 62, _open_iq3_xxs),
            ("iq3_s", 110, 15, _open_iq3_s),
            ("iq4_xs", 136, 127, _open_iq4_xs),
        )
    },
    "iq4_nl": Unpacking.of_groups(18, 127, _IQ4_NL),
    "mxfp4": Unpacking.of_groups(17, 12, _MXFP4),
    "nvfp4": Unpacking(
        size=36,
        elements=32,
        opens=(partial(_open_nvfp4, half=0), partial(_open_nvfp4, half=1)),
        most=12,
    ),
}
