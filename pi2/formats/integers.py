"""Integers with a scale, and floats as they are.

Stores have int4 and int8 to nearest, and ternary; files Q4_0 and its like, and one or two bits of
each weight.

- int4: ``scale = fp16(max|w| / 7)``, ``code = clip(rint(w / scale), -8, 7)``
- int8: ``scale = fp16(max|w| / 127)``, ``code = clip(rint(w / scale), -127, 127)``
- ternary: ``code = clip(rint(w / mean|w|), -1, 1)`` over the vector, whose one float32 scale is the
  mean of |w| where the code is not 0: vectors of -s, 0 and s keep their numbers exactly

A group whose scale is 0 has codes of 0.

Blocks of files have 32 codes with one fp16 scale, and a minimum in Q4_1 and Q5_1; IQ4_NL looks its
codes up.  Q1_0, Q2_0 and PQ2_0 have codes in their order, behind an fp16 scale. A bit stands for -1
or 1 times the scale; two bits for -1, 0, 1 or 2 times."""

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
from pi2.formats.format import MOST_FLOAT16, Format, check_finite, list_tables
from pi2.formats.packing import GROUP, Packing, explain_overflow, keep_blocks

if TYPE_CHECKING:
    import numpy as np

    from pi2.arrays import F32, I8, U8, Bits, Scales
else:
    from pi2.formats.format import np


class _Plain(Format):
    """Floats; a number of them that is not finite is a fault."""

    __slots__ = ()

    def encode(self, rows: F32, importance: F32 | None = None) -> U8:
        check_finite(rows, None if self.block_bytes == 4 or self.name == "bf16" else MOST_FLOAT16)
        if self.name != "bf16":
            return np.ascontiguousarray(rows, f"<f{self.block_bytes}").view(np.uint8)
        bits = np.ascontiguousarray(rows).view(np.uint32)
        # To nearest, ties to even: bfloat16 is the upper half.
        bits = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
        return (bits >> np.uint32(16)).astype("<u2").view(np.uint8)

    def find_faults(self, raw: U8) -> Bits:
        found: Bits = ~np.isfinite(self.decode(raw))
        return found


class _PlainVectors(Packing):
    __slots__ = ()

    def quantize(self, rows: F32, *, spread: bool = False) -> tuple[U8, None]:
        with np.errstate(over="ignore"):
            plain = np.ascontiguousarray(rows, dtype=self.plain_type)
        if not np.isfinite(plain).all():
            raise ValueError(explain_overflow(rows))
        return plain.view(np.uint8), None

    def dequantize(
        self, weights: U8, scales: Scales | None, length: int, *, spread: bool = False
    ) -> F32:
        assert scales is None and self.plain_type is not None
        plain = np.ascontiguousarray(weights).view(self.plain_type)
        return plain.reshape(len(weights), length).astype(np.float32)


class _Ternaries(Format):
    """Codes of a store's ternary rows, 4 in each byte; a row's scale is elsewhere."""

    __slots__ = ()

    def decode(self, raw: U8) -> F32:
        blocks = np.ascontiguousarray(raw).reshape(*raw.shape[:-1], -1, 1, 8)
        fields = blocks >> np.array([[0], [2], [4], [6]], np.uint8) & np.uint8(3)
        return (fields.astype(np.float32) - 1).reshape(*raw.shape[:-1], -1)


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
            weights = weigh(rows[own], importance, GROUP, evenly=self.bits > 4)
            weights = turn_groups(weights, GROUP)
            halves, codes = self._round(turn_groups(rows[own], GROUP), weights)
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
class BitCodes(Format):
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


_GROUPS: tuple[Format, ...] = list_tables("groups", {"": Format, "bits": BitCodes, "group": _Group})
_PLAIN: tuple[Format, ...] = list_tables("integers", {"": _Plain, "ternaries": _Ternaries})
FORMATS = (*_GROUPS, *_PLAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Nearest(Packing):
    """Codes from ``bottom`` to ``top``."""

    bottom: int

    def find_codes(self, rows: F32, scales_out: Scales) -> I8:
        groups = rows.reshape(len(rows), -1, GROUP)
        peaks = _find_peaks(rows).reshape(scales_out.shape)
        with np.errstate(over="ignore", invalid="ignore"):
            scales_out[:] = peaks / np.float32(self.top)
        if not np.isfinite(scales_out).all():
            raise ValueError(explain_overflow(rows))
        scales = scales_out.astype(np.float32)
        scales[scales == 0.0] = 1.0
        quotients = groups / scales[:, :, None]
        np.rint(quotients, out=quotients)
        np.clip(quotients, self.bottom, self.top, out=quotients)
        codes = quotients.astype(np.int8)
        # A scale that underflowed to 0 stands for zeros whatever the tiny weights were.
        codes[scales_out == 0.0] = 0
        return codes.reshape(rows.shape)


class _Ternary(Packing):
    __slots__ = ()

    def find_codes(self, rows: F32, scales_out: Scales) -> I8:
        if not np.isfinite(rows).all():
            raise ValueError(explain_overflow(rows))
        sizes = np.abs(rows)
        means = sizes.mean(axis=1, keepdims=True, dtype=np.float64)
        means[means == 0.0] = 1.0
        fires = sizes > 0.5 * means
        # In float64 the mean of equal numbers is that number.
        total = np.where(fires, sizes, 0).sum(axis=1, keepdims=True, dtype=np.float64)
        scales_out[:] = total / np.maximum(fires.sum(axis=1, keepdims=True), 1)
        return np.where(fires, np.sign(rows), 0).astype(np.int8)


def _find_peaks(rows: F32) -> F32:
    """Largest magnitude of every group, float32 [n * groups]."""
    # Without their signs, floats are in the order of their bits, which are compared twice as fast;
    # halving one long vector is four times as fast as a reduction over rows of 32.
    peaks = (np.ascontiguousarray(rows).view(np.uint32) & np.uint32(0x7FFFFFFF)).reshape(-1)
    while len(peaks) > rows.size // GROUP:
        peaks = np.maximum(peaks[::2], peaks[1::2])
    return peaks.view(np.float32)


_VECTORS: tuple[Packing, ...] = list_tables(
    "integers", {"nearest": _Nearest, "plain": _PlainVectors, "ternary": _Ternary}, table="packings"
)
PACKINGS = (*keep_blocks(_GROUPS), *_VECTORS)
