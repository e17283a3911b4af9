"""Blocks of 32 weights with a scale of their own, or of 64 and 128 with one or two bits each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tvm.tirx.script import builder as T

from pi2.backends.blocks.machine import Machine, as_bytes, join, pick
from pi2.backends.blocks.room import count_bundle
from pi2.backends.blocks.unpacking.block import (
    Block,
    Bundle,
    Groups,
    Source,
    Unpacking,
    fill,
    join_halves,
    mask,
    shift_left,
    shift_right,
    split_group,
    split_nibbles,
)
from pi2.backends.compiler import vectors as v


def _bundle_q8_0(sources: Sequence[Source]) -> Bundle:
    parts, owners = [], []
    for first in range(0, len(sources), sources[0].width // 32):
        taken = range(first, first + sources[0].width // 32)
        raw = v.let(join([sources[n].load(2, 32) for n in taken], 32))
        parts.append(v.let(as_bytes(raw, "int8", 32 * len(taken))))
        owners.append(tuple(n for n in taken for _ in range(2)))
    return Bundle(parts=parts, owners=owners, scales=join_halves(sources, 0), is_signed=True)


def _take_bytes(machine: Machine, value: v.Expr, size: int) -> Sequence[v.Expr]:
    return [v.let(as_bytes(value, "int8", size))]


def _take_pairs(value: v.Expr, size: int, first: int) -> v.Expr:
    """Return two bits of each byte: ``first`` and the next of 8 bytes, two places on of others, and
    so on."""
    moves = [first + 2 * (k % 4 // 2) for k in range(size // 4)]
    words = v.reinterpret(value, "uint32", size // 4) >> fill(moves, "uint32")
    return v.let(as_bytes(words, "uint8", size) & v.constant(3, "uint8", size))


def _open_ternary(source: Source) -> Block:
    twice = v.let(pick(source.load(0, 8), 8, [k % 8 for k in range(16)]))
    halves = [_take_pairs(twice, 16, first) for first in (0, 4)]
    parts = split_group(source, join(halves, 16))
    return Block(parts=parts, scale=v.constant(1.0, "float32"), offset=1)


def _bundle_ternary(sources: Sequence[Source]) -> Bundle:
    count = len(sources)
    width, owner = 16 * count, tuple(range(count))
    raw = v.let(join([source.load(0, 8) for source in sources], 8))
    twice = v.let(pick(raw, 8 * count, [8 * (k // 16) + k % 8 for k in range(width)]))
    return Bundle(
        parts=[_take_pairs(twice, width, first) for first in (0, 4)],
        owners=(owner, owner),
        scales=v.constant(1.0, "float32", count),
        offset=1,
    )


_SCALES = partial(join_halves, place=0)

_nibbles = partial(Groups, split=split_nibbles, scales=_SCALES)
_Q8_0 = Groups(places=(2, 18), split=_take_bytes, scales=_SCALES, is_signed=True)
UNPACKINGS = {
    "q4_0": Unpacking.of_groups(18, 15, _nibbles(offset=8)),
    "q4_1": Unpacking.of_groups(20, 15, _nibbles(places=(4,), mins=2)),
    "q5_0": Unpacking.of_groups(22, 31, _nibbles(places=(6,), fifths=2, offset=16)),
    "q5_1": Unpacking.of_groups(24, 31, _nibbles(places=(8,), fifths=4, mins=2)),
    "q8_0": Unpacking(size=34, elements=32, opens=(_Q8_0.open,), bundle=_bundle_q8_0, groups=_Q8_0),
    "ternary": Unpacking(
        size=8, elements=32, opens=(_open_ternary,), bundle=_bundle_ternary, most=3
    ),
}


def _open_bits(source: Source, bits: int, group: int) -> Block:
    """Weights of a group, larger by 1."""
    raw, each = source.load(2 + 4 * bits * group, 4 * bits), 8 // bits
    spread = v.let(pick(raw, 4 * bits, [k // each for k in range(32)]))
    zero, found = v.constant(0, "uint8", 32), None
    for bit in range(bits):
        tested = spread & fill([1 << (k % each * bits + bit) for k in range(32)])
        worth = v.constant(2 if bits == 1 else 1 << bit, "uint8", 32)
        flags = T.Select(tested != zero, worth, zero)
        found = flags if found is None else found | flags
    return Block(parts=split_group(source, found), scale=source.load_half(0), offset=1)


def _bundle_bits(sources: Sequence[Source], bits: int, size: int) -> Bundle:
    """Fields of whole registers: field f of byte b is element f + b * fields."""
    width, fields = sources[0].machine.width, 8 // bits
    raw = v.let(join([source.load(2, size) for source in sources], size))
    parts = []
    for field in range(fields):
        # A bit becomes 0 or 2.
        place = bits * field - (bits == 1)
        moved = shift_left(raw, 1, width) if place < 0 else shift_right(raw, place, width)
        parts.append(v.let(mask(moved, 2 if bits == 1 else 3, width)))
    lanes, count = width // 4, width * fields // 32
    owners = tuple(lane * count // lanes for lane in range(lanes))
    scales = join_halves(sources, 0)
    places = [group * len(sources) // count for group in range(count)]
    return Bundle(
        parts=parts,
        owners=(owners,) * fields,
        scales=v.let(pick(scales, len(sources), places)),
        offset=1,
    )


UNPACKINGS |= {
    name: Unpacking(
        size=2 + 4 * bits * groups,
        elements=32,
        opens=tuple(partial(_open_bits, bits=bits, group=group) for group in range(groups)),
        bundle=partial(_bundle_bits, bits=bits, size=4 * bits * groups),
        counts=partial(count_bundle, name),
        most=3,
    )
    for name, bits, groups in (("q1_0", 1, 4), ("q2_0", 2, 2), ("pq2_0", 2, 4))
}
