"""Blocks of 32 weights with a scale of their own."""

from __future__ import annotations

from tvm.tirx.script import builder as T

from pi2.backends.blocks.machine import as_bytes, pick
from pi2.backends.blocks.unpacking.block import (
    Block,
    Part,
    Source,
    Unpacking,
    fill,
)
from pi2.backends.compiler import vectors as v


def _split(source: Source, whole: v.Expr) -> list[Part]:
    """Return 32 bytes in registers."""
    if source.width >= 32:
        return [Part(weights=v.let(whole), chunks=(0, 1))]
    whole = v.let(whole)
    halves = [v.let(pick(whole, 32, range(k, k + 16))) for k in (0, 16)]
    return [Part(weights=half, chunks=(k,)) for k, half in enumerate(halves)]


def _open_nibbles(source: Source, place: int) -> v.Expr:
    """Return 32 nibbles, of which 16 bytes have the low ones first."""
    raw = source.load(place, 16)
    pair = v.let(pick(raw, 16, [k % 16 for k in range(32)]))
    return v.let(_shift_upper(pair) & v.constant(15, "uint8", 32))


def _shift_upper(pair: v.Expr) -> v.Expr:
    words = v.reinterpret(pair, "uint32", 8) >> fill((0,) * 4 + (4,) * 4, "uint32")
    return as_bytes(words, "uint8", 32)


def _fifth_bits(source: Source, place: int) -> v.Expr:
    raw = source.load(place, 4)
    spread = v.let(pick(raw, 4, [k // 8 for k in range(32)]))
    tested = spread & fill([1 << k % 8 for k in range(32)])
    zero = v.constant(0, "uint8", 32)
    return T.Select(tested != zero, v.constant(16, "uint8", 32), zero)


def _open_q4_0(source: Source) -> Block:
    parts = _split(source, _open_nibbles(source, 2))
    return Block(parts=parts, scale=source.load_half(0), offset=8)


def _open_q4_1(source: Source) -> Block:
    parts = _split(source, _open_nibbles(source, 4))
    return Block(parts=parts, scale=source.load_half(0), min_scale=source.load_half(2))


def _open_q5_0(source: Source) -> Block:
    parts = _split(source, _open_nibbles(source, 6) | _fifth_bits(source, 2))
    return Block(parts=parts, scale=source.load_half(0), offset=16)


def _open_q5_1(source: Source) -> Block:
    parts = _split(source, _open_nibbles(source, 8) | _fifth_bits(source, 4))
    return Block(parts=parts, scale=source.load_half(0), min_scale=source.load_half(2))


def _open_q8_0(source: Source) -> Block:
    parts = _split(source, as_bytes(source.load(2, 32), "int8", 32))
    return Block(parts=parts, scale=source.load_half(0), is_signed=True)


UNPACKINGS = {
    name: Unpacking(size=size, elements=32, open=own)
    for name, size, own in (
        ("q4_0", 18, _open_q4_0),
        ("q4_1", 20, _open_q4_1),
        ("q5_0", 22, _open_q5_0),
        ("q5_1", 24, _open_q5_1),
        ("q8_0", 34, _open_q8_0),
    )
}
