"""Blocks of 32 weights with a scale of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from tvm.tirx.script import builder as T

from pi2.backends.blocks.machine import as_bytes, join, pick
from pi2.backends.blocks.unpacking.block import (
    Block,
    Bundle,
    Source,
    Unpacking,
    fill,
    join_halves,
    join_nibbles,
    split_group,
    take_nibbles,
)
from pi2.backends.compiler import vectors as v

MakeBundle = Callable[[Sequence[Source]], Bundle]


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


def _bundle_nibbles(
    sources: Sequence[Source], place: int, bits: int | None, offset: int, has_min: bool
) -> Bundle:
    """Nibbles from a byte on, with a fifth bit each where ``bits`` says where they are."""
    count = len(sources)
    width, owner = 16 * count, tuple(range(count))
    parts = list(join_nibbles(sources, place))
    if bits is not None:
        words = v.let(join([source.load_as(bits, "int32") for source in sources], 1))
        raw = v.let(v.reinterpret(words, "uint8", 4 * count))
        for half in range(2):
            places = [4 * (k // 16) + 2 * half + k % 16 // 8 for k in range(width)]
            tested = pick(raw, 4 * count, places) & fill([1 << k % 8 for k in range(width)])
            zero = v.constant(0, "uint8", width)
            fifth = T.Select(tested != zero, v.constant(16, "uint8", width), zero)
            parts[half] = v.let(parts[half] | fifth)
    return Bundle(
        parts=parts,
        owners=(owner, owner),
        scales=join_halves(sources, 0),
        offset=offset,
        mins=join_halves(sources, 2) if has_min else None,
    )


def _bundle_q8_0(sources: Sequence[Source]) -> Bundle:
    parts, owners = [], []
    for first in range(0, len(sources), sources[0].width // 32):
        taken = range(first, first + sources[0].width // 32)
        raw = v.let(join([sources[n].load(2, 32) for n in taken], 32))
        parts.append(v.let(as_bytes(raw, "int8", 32 * len(taken))))
        owners.append(tuple(n for n in taken for _ in range(2)))
    return Bundle(parts=parts, owners=owners, scales=join_halves(sources, 0), is_signed=True)


def _bundle(place: int, bits: int | None, offset: int, has_min: bool) -> MakeBundle:
    return partial(_bundle_nibbles, place=place, bits=bits, offset=offset, has_min=has_min)


UNPACKINGS = {
    name: Unpacking(size=size, elements=32, opens=(own,), bundle=bundle)
    for name, size, own, bundle in (
        ("q4_0", 18, _open_q4_0, _bundle(2, None, 8, False)),
        ("q4_1", 20, _open_q4_1, _bundle(4, None, 0, True)),
        ("q5_0", 22, _open_q5_0, _bundle(6, 2, 16, False)),
        ("q5_1", 24, _open_q5_1, _bundle(8, 4, 0, True)),
        ("q8_0", 34, _open_q8_0, _bundle_q8_0),
    )
}
