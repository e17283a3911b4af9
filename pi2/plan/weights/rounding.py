"""Rounds float32 vectors to packed weights and scales, and back.

Quantisers (round to nearest, one fp16 scale per group of 32 along the vector):

- int4: ``scale = fp16(max|w| / 7)``, ``q = clip(rint(w / scale), -8, 7)``
- int8: ``scale = fp16(max|w| / 127)``, ``q = clip(rint(w / scale), -127, 127)``
- int2: ``q`` = -3, -1, 1 or 3, the nearest to ``w / scale``; the scale is the best of a few for
  the squared error; int3: likewise of -7, -5, ..., 7
- ternary: ``q = clip(rint(w / mean|w|), -1, 1)`` over the vector, whose one float32 scale is the
  mean of |w| where q is not 0: vectors of -s, 0 and s keep their numbers exactly
- fp16: plain values, no scales
- mxfp4: `pi2.plan.weights.mxfp4`, with a function of its own (`quantize_exponents`)

A group whose scale is 0 has ``q = 0``.
"""

from __future__ import annotations

import numpy as np

from pi2.arrays import F16, F32, I8, U8, Scales
from pi2.plan.weights.codes import ODD_TOPS, pack_codes, unpack_codes
from pi2.plan.weights.layout import GROUP, Precision, weight_bytes
from pi2.plan.weights.mxfp4 import find_codes, take_units, take_values

_TOP = {"int4": 7, "int8": 127}
_BOTTOM = {"int4": -8, "int8": -127}
_CHUNK_WEIGHTS = 2**18
"""Weights quantised together: their temporaries stay within a core's cache."""
_ODD_SCALES = {"int2": (0.42, 0.5, 0.58), "int3": (0.24, 0.29, 0.34)}
"""Scales that are tried, as parts of a group's root mean square: the second is best for normal
ones."""


def quantize(rows: F32, precision: Precision) -> tuple[U8, Scales | None]:
    """Quantise and pack ``rows`` float32 [n, length].

    Returns packed weights uint8 [n, weight_bytes] and scales float16 [n, length / 32] (None for
    fp16; float32 [n, 1] for ternary).  Raises `ValueError` if a weight is not finite or does not
    fit into fp16.
    """
    count, length = rows.shape
    assert rows.dtype == np.float32 and precision != "mxfp4", (rows.dtype, precision)
    if precision == "fp16":
        with np.errstate(over="ignore"):
            halves = np.ascontiguousarray(rows, dtype="<f2")
        if not np.isfinite(halves).all():
            raise ValueError(_explain_overflow(rows))
        return halves.view(np.uint8).reshape(count, 2 * length), None
    weights = np.empty((count, weight_bytes(length, precision)), np.uint8)
    step = max(1, _CHUNK_WEIGHTS // length)
    if precision == "ternary":
        units = np.empty((count, 1), "<f4")
        for start in range(0, count, step):
            piece = slice(start, start + step)
            weights[piece] = pack_codes(_find_ternary(rows[piece], units[piece]), precision)
        return weights, units
    scales = np.empty((count, length // GROUP), "<f2")
    find_codes = _quantize_odd if precision in ODD_TOPS else _quantize_groups
    for start in range(0, count, step):
        piece = slice(start, start + step)
        codes = find_codes(rows[piece], precision, scales[piece])
        weights[piece] = pack_codes(codes, precision)
    return weights, scales


def dequantize(weights: U8, scales: Scales | None, length: int, precision: Precision) -> F32:
    """Undo `quantize`: packed uint8 [n, weight_bytes] -> float32 [n, length]."""
    count = weights.shape[0]
    if precision == "fp16":
        assert scales is None
        return np.ascontiguousarray(weights).view("<f2").reshape(count, length).astype(np.float32)
    assert scales is not None and precision != "mxfp4"
    codes = unpack_codes(weights, length, precision).reshape(count, length // GROUP, GROUP)
    values = codes.astype(np.float32)
    values *= scales.astype(np.float32)[:, :, None]
    return values.reshape(count, length)


def quantize_exponents(rows: F32, *, spread: bool) -> tuple[U8, U8]:
    """Quantise and pack ``rows`` float32 [n, length] as mxfp4.

    Returns packed weights uint8 [n, length / 2] and exponents: uint8 [n, length / 32] of groups
    along the rows, or, where they are ``spread``, [n, length] in the int8 layout: every 32 rows, of
    which there is a multiple, share those of their elements.  Raises `ValueError` as `find_codes`
    does.
    """
    count, length = rows.shape
    if not spread:
        codes, exponents = find_codes(rows.reshape(count, length // GROUP, GROUP), axis=2)
        return pack_codes(codes.reshape(rows.shape), "mxfp4"), exponents
    codes, exponents = find_codes(rows.reshape(count // GROUP, GROUP, length), axis=1)
    packed = pack_codes(np.ascontiguousarray(exponents).view(np.int8), "int8")
    return pack_codes(codes.reshape(rows.shape), "mxfp4"), np.repeat(packed, GROUP, axis=0)


def dequantize_exponents(weights: U8, exponents: U8, length: int, *, spread: bool) -> F32:
    """Undo `quantize_exponents`: float32 [n, length]."""
    values = take_values(unpack_codes(weights, length, "mxfp4"))
    if spread:
        units = take_units(unpack_codes(exponents, length, "int8").view(np.uint8))
        return np.asarray(values * units)
    groups = values.reshape(len(values), length // GROUP, GROUP)
    groups *= take_units(exponents)[:, :, None]
    return values


def _find_ternary(rows: F32, scales_out: F32) -> I8:
    """Fill ``scales_out`` [n, 1] and return codes int8 [n, length]."""
    if not np.isfinite(rows).all():
        raise ValueError(_explain_overflow(rows))
    sizes = np.abs(rows)
    means = sizes.mean(axis=1, keepdims=True, dtype=np.float64)
    means[means == 0.0] = 1.0
    fires = sizes > 0.5 * means
    # In float64 the mean of equal numbers is that number.
    total = np.where(fires, sizes, 0).sum(axis=1, keepdims=True, dtype=np.float64)
    scales_out[:] = total / np.maximum(fires.sum(axis=1, keepdims=True), 1)
    return np.where(fires, np.sign(rows), 0).astype(np.int8)


def _quantize_groups(rows: F32, precision: Precision, scales_out: F16) -> I8:
    """Fill ``scales_out`` [n, groups] and return codes int8 [n, length]."""
    count, length = rows.shape
    groups = rows.reshape(count, length // GROUP, GROUP)
    peaks = _find_peaks(rows).reshape(scales_out.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        scales_out[:] = peaks / np.float32(_TOP[precision])
    if not np.isfinite(scales_out).all():
        raise ValueError(_explain_overflow(rows))
    scales = scales_out.astype(np.float32)
    scales[scales == 0.0] = 1.0
    quotients = groups / scales[:, :, None]
    np.rint(quotients, out=quotients)
    np.clip(quotients, _BOTTOM[precision], _TOP[precision], out=quotients)
    codes = quotients.astype(np.int8)
    # A scale that underflowed to 0 stands for zeros whatever the tiny weights were.
    codes[scales_out == 0.0] = 0
    return codes.reshape(count, length)


def _quantize_odd(rows: F32, precision: Precision, scales_out: F16) -> I8:
    """Fill ``scales_out`` [n, groups] and return odd codes int8 [n, length]."""
    top = ODD_TOPS[precision]
    count, length = rows.shape
    groups = rows.reshape(count, length // GROUP, GROUP)
    if not np.isfinite(groups).all():
        raise ValueError(_explain_overflow(rows))
    spread = np.sqrt(np.square(groups).mean(axis=2, keepdims=True))
    spread[spread == 0.0] = 1.0
    best = np.full(spread.shape, np.inf, np.float32)
    scales = np.zeros_like(spread)
    for part in _ODD_SCALES[precision]:
        codes = _find_odd(groups, spread * np.float32(part), top)
        # The best scale for these codes.
        found = (groups * codes).sum(axis=2, keepdims=True)
        found = np.maximum(found / np.square(codes).sum(axis=2, keepdims=True), 0)
        error = np.square(groups - codes * found).sum(axis=2, keepdims=True)
        better = error < best
        best, scales = np.where(better, error, best), np.where(better, found, scales)
    with np.errstate(over="ignore"):
        scales_out[:] = scales[:, :, 0]
    if not np.isfinite(scales_out).all():
        raise ValueError(_explain_overflow(rows))
    rounded = scales_out.astype(np.float32)[:, :, None]
    rounded[rounded == 0.0] = 1.0
    return _find_odd(groups, rounded, top).astype(np.int8).reshape(rows.shape)


def _find_odd(groups: F32, scales: F32, top: int) -> F32:
    """The nearest odd numbers from ``-top`` to ``top`` to ``groups`` over ``scales``."""
    half = top // 2
    return np.asarray(2 * np.clip(np.floor(groups / (2 * scales)), -half - 1, half) + 1, np.float32)


def _find_peaks(rows: F32) -> F32:
    """Largest magnitude of every group, float32 [n * groups]."""
    # Without their signs, floats are in the order of their bits, which are compared twice as fast;
    # halving one long vector is four times as fast as a reduction over rows of 32.
    peaks = (np.ascontiguousarray(rows).view(np.uint32) & np.uint32(0x7FFFFFFF)).reshape(-1)
    while len(peaks) > rows.size // GROUP:
        peaks = np.maximum(peaks[::2], peaks[1::2])
    return peaks.view(np.float32)


def _explain_overflow(rows: F32) -> str:
    if not np.isfinite(rows).all():
        return "a weight is not a finite number"
    return f"a weight of magnitude {float(np.abs(rows).max()):.4g} does not fit into fp16"
