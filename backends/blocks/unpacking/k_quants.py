"""Q2_K to Q6_K: fields of bits in order, integer scales of 16 or 32 weights; and ternary types."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pi2.backends.blocks.machine import as_bytes, pick
from pi2.backends.blocks.room import NIBBLES, PAIRS, SIXES
from pi2.backends.blocks.unpacking import columns
from pi2.backends.blocks.unpacking.block import (
    Block,
    Part,
    Source,
    Unpacking,
    fill,
    find_flags,
    gather_chunks,
    high,
    low,
    mask,
    repeat_half,
    shift_left,
    shift_right,
)
from pi2.backends.blocks.unpacking.columns import Turned
from pi2.backends.compiler import vectors as v


def _split_scales(source: Source) -> tuple[v.Expr, v.Expr]:
    """Return 8 scales and 8 minima of 6 bits, whose last four have their upper bits elsewhere."""
    words = source.load_as(0, "int32", 4)
    unsigned = v.let(v.reinterpret(words, "uint32", 4))
    whole = pick(unsigned, 4, (1, 3, 2, 3)) >> fill((0, 0, 0, 4), "uint32")
    whole = whole & fill((0x3F3F3F3F, 0x0F0F0F0F) * 2, "uint32")
    upper = pick(unsigned, 4, (1, 1, 2, 2)) >> v.constant(2, "uint32", 4)
    upper = upper & fill((0, 0x30303030) * 2, "uint32")
    found = v.let(v.reinterpret(whole | upper, "uint8", 16))
    scales, mins = pick(found, 16, range(8)), pick(found, 16, range(8, 16))
    return v.let(v.cast(scales, "int16", 8)), v.let(v.cast(mins, "int16", 8))


def _open_nibbles(source: Source, place: int, qh_place: int | None) -> Block:
    """Q4_K, and Q5_K with a fifth bit of each weight."""
    width, each = source.width, source.width // 16
    scales, mins = _split_scales(source)
    parts = []
    for first in range(0, 8, each):
        raw = source.load(place + 16 * first, width)
        bits = None
        if qh_place is not None:
            half = min(width, 32)
            start = qh_place + 16 * (first % 2)
            bits = repeat_half(source.load(start, half), half, width)
        for field, value in enumerate((low(raw, width), high(raw, width))):
            chunks = tuple(NIBBLES.place(b, field) for b in range(first, first + each))
            if bits is not None:
                value = value | find_flags(bits, [c // 2 for c in chunks], 16, width)
            parts.append(Part(weights=v.let(value), chunks=chunks))
    return Block(
        parts=parts,
        scale=source.load_half(0),
        scales=scales,
        mins=mins,
        min_scale=source.load_half(2),
    )


def _open_pairs(source: Source, place: int, h_place: int | None) -> list[Part]:
    """Fields of two bits of 64 bytes, and with them a third bit of each weight."""
    width, each = source.width, source.width // 16
    parts = []
    for first in range(0, 4, each):
        raw = source.load(place + 16 * first, width)
        bits = None
        if h_place is not None:
            half = min(width, 32)
            start = h_place + 16 * (first % 2)
            bits = repeat_half(source.load(start, half), half, width)
        for field in range(4):
            chunks = tuple(PAIRS.place(b, field) for b in range(first, first + each))
            value = mask(shift_right(raw, 2 * field, width), 3, width)
            if bits is not None:
                value = value | find_flags(bits, [c // 2 for c in chunks], 4, width)
            parts.append(Part(weights=v.let(value), chunks=chunks))
    return parts


def _open_q2_k(source: Source) -> Block:
    raw = source.load(0, 16)
    return Block(
        parts=_open_pairs(source, 16, None),
        scale=source.load_half(80),
        scales=v.let(v.cast(low(raw, 16), "int16", 16)),
        scale_count=16,
        mins=v.let(v.cast(high(raw, 16), "int16", 16)),
        min_scale=source.load_half(82),
    )


def _open_q3_k(source: Source) -> Block:
    words = v.let(v.reinterpret(source.load_as(92, "int32", 4), "uint32", 4))
    lower = pick(words, 4, (1, 2, 1, 2)) >> fill((0, 0, 4, 4), "uint32")
    upper = pick(words, 4, (3, 3, 3, 3)) >> fill((0, 2, 4, 6), "uint32")
    upper = (upper & v.constant(0x03030303, "uint32", 4)) << v.constant(4, "uint32", 4)
    joined = (lower & v.constant(0x0F0F0F0F, "uint32", 4)) | upper
    scales = v.cast(v.reinterpret(joined, "uint8", 16), "int16", 16)
    return Block(
        parts=_open_pairs(source, 32, 0),
        scale=source.load_half(108),
        scales=v.let(scales - v.constant(32, "int16", 16)),
        scale_count=16,
        offset=4,
    )


def _open_q6_k(source: Source) -> Block:
    width, each = source.width, source.width // 16
    half = min(width, 32)
    parts = []
    for first in range(0, 8, each):
        raw = source.load(16 * first, width)
        for field, value in enumerate((low(raw, width), high(raw, width))):
            chunks = tuple(SIXES.place(b, field) for b in range(first, first + each))
            start = 128 + 32 * (chunks[0] // 8) + 16 * (chunks[0] % 2)
            bits = repeat_half(source.load(start, half), half, width)
            units = [c % 8 // 2 for c in chunks]
            moved = (
                shift_left(bits, [4 - 2 * u for u in units], width)
                if field == 0
                else shift_right(bits, [2 * u - 4 for u in units], width)
            )
            value = value | mask(moved, 0x30, width)
            parts.append(Part(weights=v.let(value), chunks=chunks))
    raw = as_bytes(source.load(192, 16), "int8", 16)
    return Block(
        parts=parts,
        scale=source.load_half(208),
        scales=v.let(v.cast(raw, "int16", 16)),
        scale_count=16,
        offset=32,
    )


def _open_tq2_0(source: Source) -> Block:
    return Block(parts=_open_pairs(source, 0, None), scale=source.load_half(64), offset=1)


_POWERS = (1, 3, 9, 27, 81)


def _take_digits(value: v.Expr, powers: Sequence[int]) -> v.Expr:
    """Return base-3 digits of 16 bytes that stand for fractions of 256."""
    wide = v.cast(value, "uint16", 16) * fill(powers, "uint16")
    digits = (wide & v.constant(255, "uint16", 16)) * v.constant(3, "uint16", 16)
    return v.let(v.cast(digits >> v.constant(8, "uint16", 16), "uint8", 16))


def _open_tq1_0(source: Source) -> Block:
    first, second, third = (source.load(place, 16) for place in (0, 16, 32))
    chunks = [_take_digits(raw, [p] * 16) for p in _POWERS for raw in (first, second)]
    chunks += [_take_digits(third, [p] * 16) for p in _POWERS]
    last = v.let(pick(source.load(48, 4), 4, [k % 4 for k in range(16)]))
    chunks.append(_take_digits(last, [_POWERS[k // 4] for k in range(16)]))
    each = source.width // 16
    parts = [
        Part(weights=gather_chunks(chunks[n : n + each]), chunks=tuple(range(n, n + each)))
        for n in range(0, 16, each)
    ]
    return Block(parts=parts, scale=source.load_half(52), offset=1)


UNPACKINGS = {
    "tq1_0": Unpacking(size=54, elements=256, opens=(_open_tq1_0,), most=2),
    "q2_k": Unpacking(size=84, elements=256, opens=(_open_q2_k,), most=3),
    "q3_k": Unpacking(size=110, elements=256, opens=(_open_q3_k,), most=7),
    "q4_k": Unpacking(
        size=144,
        elements=256,
        opens=(partial(_open_nibbles, place=16, qh_place=None),),
        most=15,
        turned=Turned(unpack=partial(columns.unpack_nibbles, place=16, fifths=None), has_mins=True),
    ),
    "q5_k": Unpacking(
        size=176,
        elements=256,
        opens=(partial(_open_nibbles, place=48, qh_place=16),),
        most=31,
        turned=Turned(unpack=partial(columns.unpack_nibbles, place=48, fifths=16), has_mins=True),
    ),
    "q6_k": Unpacking(
        size=210,
        elements=256,
        opens=(_open_q6_k,),
        most=63,
        turned=Turned(unpack=columns.unpack_q6_k, pieces=16, offset=32),
    ),
    "tq2_0": Unpacking(size=66, elements=256, opens=(_open_tq2_0,), most=3),
}
