"""Numbers of MXFP4: 4-bit floats (E2M1) of which 32 share a power of two.

A *code* is 0 to 15: its low three bits are the place of its magnitude in `MAGNITUDES`, its highest
bit is its sign.  An *exponent* e, one byte, is that of the unit 2^(e - 127) of magnitudes; 0 stands
for zeros.  E2M1 calls half of each magnitude by the same code, so that e is one less than the E8M0
scale of the same group.

Rounding is that of the format's specification: the largest magnitude of a group takes the highest
binary place there is, ties go to even codes, and what passes the largest code becomes that.
Numbers that are MXFP4 already are met exactly (units of 2^-126 and more).

Source: OCP Microscaling Formats (MX) Specification 1.0, section 6.3.
"""

from __future__ import annotations

import numpy as np

from pi2.arrays import F32, I8, U8

MAGNITUDES = (0, 1, 2, 3, 4, 6, 8, 12)
"""What a code without its sign stands for, in units of its group."""

_VALUES = np.array([*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)], np.float32)
_PLACES = np.zeros(MAGNITUDES[-1] + 1, np.int8)
_PLACES[list(MAGNITUDES)] = range(len(MAGNITUDES))


def find_codes(groups: F32, axis: int) -> tuple[I8, U8]:
    """Codes int8 of ``groups`` float32, in its shape, and exponents uint8, in its shape without
    ``axis``, along which groups lie.  Raises `ValueError` if a weight is not finite, or larger than
    the largest code times the largest power of two."""
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
    codes = _PLACES[rounded.astype(np.int8)]
    codes[(groups < 0) & (codes > 0)] += np.int8(8)
    return codes, np.squeeze(exponents, axis).astype(np.uint8)


def take_values(codes: I8) -> F32:
    """What codes stand for, in units of their groups."""
    return _VALUES[codes]


def take_units(exponents: U8) -> F32:
    """Units of groups: 2^(e - 127), or 0 where e is 0."""
    return (exponents.astype(np.uint32) << np.uint32(23)).view(np.float32)
