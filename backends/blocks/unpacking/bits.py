"""One or two bits of each weight in their order: Q1_0, Q2_0 and PQ2_0."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tvm.tirx.script import builder as T

from pi2.backends.blocks.machine import join, pick
from pi2.backends.blocks.room import count_bundle
from pi2.backends.blocks.unpacking.block import (
    Block,
    Bundle,
    Source,
    Unpacking,
    fill,
    join_halves,
    mask,
    shift_left,
    shift_right,
    split_group,
)
from pi2.backends.compiler import vectors as v


def _open(source: Source, bits: int, group: int) -> Block:
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


def _bundle(sources: Sequence[Source], bits: int, size: int) -> Bundle:
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


UNPACKINGS = {
    name: Unpacking(
        size=2 + 4 * bits * groups,
        elements=32,
        opens=tuple(partial(_open, bits=bits, group=group) for group in range(groups)),
        bundle=partial(_bundle, bits=bits, size=4 * bits * groups),
        counts=partial(count_bundle, name),
        most=3,
    )
    for name, bits, groups in (("q1_0", 1, 4), ("q2_0", 2, 2), ("pq2_0", 2, 4))
}
