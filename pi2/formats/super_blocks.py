"""Blocks of 256 with an fp16 scale for integer scales of 16 or 32 that pi2 only reads: Q2_K, Q3_K,
IQ and ternary types."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pi2.formats.format import Format
from pi2.formats.packing import keep_blocks

if TYPE_CHECKING:
    import numpy as np

    from pi2.arrays import U8, Bits
else:
    from pi2.formats.format import np


class _SpreadScale(Format):
    """IQ1_M, whose scale is four times four bits."""

    __slots__ = ()

    def find_faults(self, raw: U8) -> Bits:
        blocks = np.ascontiguousarray(raw).reshape(*raw.shape[:-1], -1, self.block_bytes)
        # Its highest bits are the exponent: those of the last four, and one of those before.
        last, before = blocks[..., 55] >> 4, blocks[..., 53] >> 4
        found: Bits = (last & 0x7 == 0x7) & (before & 0xC == 0xC)
        return found


def _make(name: str, number: int, block_bytes: int, *halves: int) -> Format:
    kind = Format if halves else _SpreadScale
    return kind(
        name=name,
        number=number,
        block=256,
        block_bytes=block_bytes,
        activations="q8_k",
        halves=halves,
    )


FORMATS = (
    _make("q2_k", 10, 84, 80, 82),
    _make("q3_k", 11, 110, 108),
    _make("iq2_xxs", 16, 66, 0),
    _make("iq2_xs", 17, 74, 0),
    _make("iq3_xxs", 18, 98, 0),
    _make("iq1_s", 19, 50, 0),
    _make("iq3_s", 21, 110, 0),
    _make("iq2_s", 22, 82, 0),
    _make("iq4_xs", 23, 136, 0),
    _make("iq1_m", 29, 56),
    _make("tq1_0", 34, 54, 52),
    _make("tq2_0", 35, 66, 64),
)
PACKINGS = keep_blocks(own for own in FORMATS if not own.name.startswith("tq"))
