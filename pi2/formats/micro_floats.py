"""Floats of 4 bits with scales of 8 bits: MXFP4 (OCP Microscaling) and NVFP4.

Stores keep MXFP4 as packed vectors. A *code* is 0 to 15: its low three bits are the place of its
magnitude in `MAGNITUDES`, its highest bit is its sign. A scale is one byte, the *exponent* e of the
unit 2^(e - 127) of magnitudes; 0 means zeros. E2M1 has the same code for half of each magnitude: e
is one less than the E8M0 scale of the same group.

Rounding follows the specification: the largest magnitude of a group takes the highest binary place,
ties go to even codes, and larger numbers become the largest code. Numbers that are MXFP4 already
are met exactly (units of 2^-126 and more).

Source: OCP Microscaling Formats (MX) Specification 1.0, section 6.3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pi2.formats.format import Format, list_tables
from pi2.formats.integers import PACKINGS as INTEGERS
from pi2.formats.packing import GROUP, Packing

if TYPE_CHECKING:
    import numpy as np

    from pi2.arrays import F32, I8, U8, Bits, Scales
else:
    from pi2.formats.format import np


MAGNITUDES = (0, 1, 2, 3, 4, 6, 8, 12)
"""What a code without its sign stands for, in units of its group."""
NUMBERS = (*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES))
"""What codes stand for."""
_BYTES = next(own for own in INTEGERS if own.name == "int8")
"""Spread exponents are laid out like codes of 8 bits."""


class _ScaledByBytes(Format):
    """Scales are the first bytes of a block; one code of them stands for no number."""

    __slots__ = ()

    def find_faults(self, raw: U8) -> Bits:
        count, mask = (1, 0xFF) if self.name == "mxfp4" else (4, 0x7F)
        blocks = np.ascontiguousarray(raw).reshape(*raw.shape[:-1], -1, self.block_bytes)
        found: Bits = ((blocks[..., :count] & mask) == mask).any(axis=-1)
        return found

    def encode(self, rows: F32, importance: F32 | None = None) -> U8:
        codes, exponents = find_codes(rows.reshape(len(rows), -1, GROUP), axis=2)
        if exponents.max(initial=0) > 253:
            raise ValueError("a weight does not fit into mxfp4")
        blocks = np.empty((*exponents.shape, self.block_bytes), np.uint8)
        # Files count halves of the units that scales of stores count.
        blocks[..., 0] = exponents + 1
        nibbles = codes.view(np.uint8)
        blocks[..., 1:] = nibbles[..., : GROUP // 2] | nibbles[..., GROUP // 2 :] << np.uint8(4)
        return blocks.reshape(len(rows), -1)


class _PowersOfTwo(Packing):
    """Groups are along rows, or, if spread, across 32 rows, which share exponents: a row's
    exponents are uint8 [length], packed as bytes."""

    __slots__ = ()

    def take_numbers(self, codes: I8) -> F32:
        return np.array(NUMBERS, np.float32)[codes]

    def take_scales(self, scales: Scales) -> F32:
        return (scales.astype(np.uint32) << np.uint32(23)).view(np.float32)

    def quantize(self, rows: F32, *, spread: bool = False) -> tuple[U8, Scales]:
        count, length = rows.shape
        if not spread:
            codes, exponents = find_codes(rows.reshape(count, length // GROUP, GROUP), axis=2)
            return self.pack(codes.reshape(rows.shape)), exponents
        codes, exponents = find_codes(rows.reshape(count // GROUP, GROUP, length), axis=1)
        packed = _BYTES.pack(np.ascontiguousarray(exponents).view(np.int8))
        return self.pack(codes.reshape(rows.shape)), np.repeat(packed, GROUP, axis=0)

    def dequantize(
        self, weights: U8, scales: Scales | None, length: int, *, spread: bool = False
    ) -> F32:
        if not spread:
            return Packing.dequantize(self, weights, scales, length)
        assert scales is not None
        units = _BYTES.unpack(scales.view(np.uint8), length).view(np.uint8)
        numbers = self.take_numbers(self.unpack(weights, length))
        return np.asarray(numbers * self.take_scales(units))


def find_codes(groups: F32, axis: int) -> tuple[I8, U8]:
    """Codes int8 in the shape of ``groups``, and exponents uint8 without ``axis``; ValueError for
    infinite or too large weights."""
    peaks = np.abs(groups).max(axis=axis, keepdims=True)
    if not np.isfinite(peaks).all():
        raise ValueError("a weight is not a finite number")
    exponents = np.where(peaks > 0, np.maximum(np.frexp(peaks)[1] + 123, 1), 0)
    if exponents.max(initial=0) > 254:
        raise ValueError(f"a weight of magnitude {float(peaks.max()):.4g} does not fit into mxfp4")
    units = np.ldexp(np.float32(1), exponents - 127).astype(np.float32)
    sizes = np.abs(groups) / units
    steps = np.where(sizes < 4, np.float32(1), np.where(sizes < 8, np.float32(2), np.float32(4)))
    rounded = np.minimum(np.rint(sizes / steps) * steps, MAGNITUDES[-1])
    places: I8 = np.zeros(MAGNITUDES[-1] + 1, np.int8)
    places[list(MAGNITUDES)] = range(len(MAGNITUDES))
    codes = places[rounded.astype(np.int8)]
    codes[(groups < 0) & (codes > 0)] += np.int8(8)
    return codes, np.squeeze(exponents, axis).astype(np.uint8)


FORMATS = list_tables(__name__, {"": _ScaledByBytes})
PACKINGS = list_tables(__name__, {"powers_of_two": _PowersOfTwo}, table="packings")
