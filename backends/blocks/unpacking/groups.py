"""Blocks of 32 weights with a scale of their own."""

from __future__ import annotations

from tvm.tirx.script import builder as T

from pi2.backends.blocks.machine import as_bytes, pick
from pi2.backends.blocks.unpacking.block import (
    Block,
    Source,
    Unpacking,
    fill,
    split_group,
    take_nibbles,
)
from pi2.backends.compiler import vectors as v


def _fifth_bits(source: Source, place: int) -> v.Expr:
    raw = source.load(place, 4)
    spread = v.let(pick(raw, 4, [k // 8 for k in range(32)]))
    tested = spread & fill([1 << k % 8 for k in range(32)])
    zero = v.constant(0, "uint8", 32)
    return T.Select(tested != zero, v.constant(16, "uint8", 32), zero)


def _open_q4_0(source: Source) -> Block:
    parts = split_group(source, take_nibbles(source, 2))
    return Block(parts=parts, scale=source.load_half(0), offset=8)


def _open_q4_1(source: Source) -> Block:
    parts = split_group(source, take_nibbles(source, 4))
    return Block(parts=parts, scale=source.load_half(0), min_scale=source.load_half(2))


def _open_q5_0(source: Source) -> Block:
    parts = split_group(source, take_nibbles(source, 6) | _fifth_bits(source, 2))
    return Block(parts=parts, scale=source.load_half(0), offset=16)


def _open_q5_1(source: Source) -> Block:
    parts = split_group(source, take_nibbles(source, 8) | _fifth_bits(source, 4))
    return Block(parts=parts, scale=source.load_half(0), min_scale=source.load_half(2))


def _open_q8_0(source: Source) -> Block:
    parts = split_group(source, as_bytes(source.load(2, 32), "int8", 32))
    return Block(parts=parts, scale=source.load_half(0), is_signed=True)


UNPACKINGS = {
    name: Unpacking(size=size, elements=32, opens=(own,))
    for name, size, own in (
        ("q4_0", 18, _open_q4_0),
        ("q4_1", 20, _open_q4_1),
        ("q5_0", 22, _open_q5_0),
        ("q5_1", 24, _open_q5_1),
        ("q8_0", 34, _open_q8_0),
    )
}
