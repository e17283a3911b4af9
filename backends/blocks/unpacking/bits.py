"""One or two bits of each weight in their order: Q1_0, Q2_0 and PQ2_0."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tvm.tirx.script import builder as T

from pi2.backends.blocks.machine import join, pick
from pi2.backends.blocks.unpacking.block import (
    Block,
    Bundle,
    Source,
    Unpacking,
    fill,
    join_halves,
    split_group,
)
from pi2.backends.compiler import vectors as v


def _take(raw: v.Expr, size: int, bits: int, elements: Sequence[int]) -> v.Expr:
    """Return weights larger by 1, uint8, of some ``elements`` of ``size`` bytes."""
    each, count = 8 // bits, len(elements)
    spread = v.let(pick(raw, size, [element // each for element in elements]))
    zero, found = v.constant(0, "uint8", count), None
    for bit in range(bits):
        tested = spread & fill([1 << (element % each * bits + bit) for element in elements])
        worth = v.constant(2 if bits == 1 else 1 << bit, "uint8", count)
        flags = T.Select(tested != zero, worth, zero)
        found = flags if found is None else found | flags
    return v.let(found)


def _open(source: Source, bits: int, group: int) -> Block:
    raw = source.load(2 + 4 * bits * group, 4 * bits)
    parts = split_group(source, _take(raw, 4 * bits, bits, range(32)))
    return Block(parts=parts, scale=source.load_half(0), offset=1)


def _bundle(sources: Sequence[Source], bits: int) -> Bundle:
    width = sources[0].machine.width
    each = width // 16 // len(sources)
    size, count = 4 * bits * each, each * len(sources)
    loads = [source.load(2 + 4 * bits * source.group, size) for source in sources]
    raw = v.let(join(loads, size))
    halves = [[k // 16 * 32 + half + k % 16 for k in range(width)] for half in (0, 16)]
    scales = pick(join_halves(sources, 0), len(sources), [k // each for k in range(count)])
    return Bundle(
        parts=[_take(raw, size * len(sources), bits, half) for half in halves],
        owners=(tuple(range(count)),) * 2,
        scales=v.let(scales),
        offset=1,
    )


UNPACKINGS = {
    name: Unpacking(
        size=2 + 4 * bits * groups,
        elements=32,
        opens=tuple(partial(_open, bits=bits, group=group) for group in range(groups)),
        bundle=partial(_bundle, bits=bits),
    )
    for name, bits, groups in (("q1_0", 1, 4), ("q2_0", 2, 2), ("pq2_0", 2, 4))
}
