"""One or two bits of each weight, in their order, behind an fp16 scale: Q1_0, Q2_0 and PQ2_0.

A bit stands for -1 or 1 times the scale; two bits for -1, 0, 1 or 2 times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pi2.formats.format import Format

if TYPE_CHECKING:
    import numpy as np

    from pi2.arrays import F32, U8
else:
    from pi2.formats.format import np


@dataclass(frozen=True, slots=True, kw_only=True)
class Bits(Format):
    bits: int

    def decode(self, raw: U8) -> F32:
        blocks = np.ascontiguousarray(raw).reshape(*raw.shape[:-1], -1, self.block_bytes)
        scales = np.ascontiguousarray(blocks[..., :2]).view("<f2").astype(np.float32)
        places = np.arange(0, 8, self.bits, dtype=np.uint8)
        fields = blocks[..., 2:, None] >> places & np.uint8((1 << self.bits) - 1)
        codes = fields.reshape(*blocks.shape[:-1], -1).astype(np.float32)
        numbers = codes * np.float32(2 // self.bits) - np.float32(1)
        with np.errstate(invalid="ignore"):
            return np.asarray((numbers * scales).reshape(*raw.shape[:-1], -1))


def _make(name: str, number: int, block: int, bits: int) -> Format:
    return Bits(
        name=name,
        number=number,
        block=block,
        block_bytes=2 + block * bits // 8,
        activations="q8_0",
        halves=(0,),
        bits=bits,
    )


FORMATS = (
    _make("q1_0", 41, 128, 1),
    _make("q2_0", 42, 64, 2),
    # The same with longer blocks, which older files call 42.
    _make("pq2_0", 142, 128, 2),
)
