"""Blocks of 32 with one fp16 scale, and a minimum in Q4_1 and Q5_1; IQ4_NL looks its codes up.

And Q1_0, Q2_0 and PQ2_0: one or two bits of each weight, in their order, behind an fp16 scale. A
bit stands for -1 or 1 times the scale; two bits for -1, 0, 1 or 2 times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pi2.formats.fitting import (
    fit_lines,
    fit_scales,
    invert,
    list_tiles,
    round_lines,
    turn_groups,
    weigh,
)
from pi2.formats.format import Format, check_finite, list_tables
from pi2.formats.packing import keep_blocks

if TYPE_CHECKING:
    import numpy as np

    from pi2.arrays import F32, U8
else:
    from pi2.formats.format import np

_BLOCK = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group(Format):
    """Scales, minima and codes are bytes in this order; codes of 5 bits have the highest apart."""

    bits: int
    can_encode: bool = True

    def encode(self, rows: F32, importance: F32 | None = None) -> U8:
        check_finite(rows)
        found = np.empty((len(rows), self.count_bytes(rows.shape[1])), np.uint8)
        for own in list_tiles(*rows.shape):
            # Where 4 bits are all, models lose less if large weights err least.
            weights = weigh(rows[own], importance, _BLOCK, evenly=self.bits > 4)
            weights = turn_groups(weights, _BLOCK)
            halves, codes = self._round(turn_groups(rows[own], _BLOCK), weights)
            blocks = np.ascontiguousarray(codes.T.astype(np.int8)).view(np.uint8)
            parts = [np.stack(halves, axis=1).astype("<f2").view(np.uint8), *self._pack(blocks)]
            found[own] = np.concatenate(parts, axis=1).reshape(len(rows[own]), -1)
        return found

    def _round(self, columns: F32, weights: F32) -> tuple[list[F32], F32]:
        """Return what precedes the codes, in fp16's numbers, and codes as bits hold them."""
        if len(self.halves) == 2:
            top = (1 << self.bits) - 1
            lines = fit_lines(columns, weights, top, is_free=True)
            lines.scales = lines.scales.astype(np.float16).astype(np.float32)
            lines.minima = lines.minima.astype(np.float16).astype(np.float32)
            return [lines.scales, -lines.minima], round_lines(columns, lines, top)
        top = (1 << (self.bits - 1)) - 1
        bottom = -top if self.bits == 8 else -top - 1
        scales = fit_scales(columns, weights, bottom, top)
        scales = scales.astype(np.float16).astype(np.float32)
        codes = np.clip(np.rint(columns * invert(scales)), bottom, top)
        return [scales], codes if self.bits == 8 else codes - np.float32(bottom)

    def _pack(self, codes: U8) -> list[U8]:
        if self.bits == 8:
            return [codes]
        low = codes & np.uint8(15)
        nibbles = low[:, :16] | (low[:, 16:] << np.uint8(4))
        if self.bits == 4:
            return [nibbles]
        return [np.packbits(codes >> np.uint8(4), axis=1, bitorder="little"), nibbles]


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


FORMATS: tuple[Format, ...] = list_tables(__name__, {"": Format, "bits": Bits, "group": _Group})
PACKINGS = keep_blocks(
    own for own in FORMATS if own.name not in ("q4_0", "q8_0") and not isinstance(own, Bits)
)
