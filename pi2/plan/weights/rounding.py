"""Rounds float32 vectors to packed weights and scales, and back.

Quantisers (round to nearest, one fp16 scale per group of 32 along the vector):

- int4: ``scale = fp16(max|w| / 7)``, ``q = clip(rint(w / scale), -8, 7)``
- int8: ``scale = fp16(max|w| / 127)``, ``q = clip(rint(w / scale), -127, 127)``
- int2: ``q`` = -3, -1, 1 or 3, the nearest to ``w / scale``; the scale is the best of a few for
  the squared error; int3: likewise of -7, -5, ..., 7
- ternary: ``q = clip(rint(w / mean|w|), -1, 1)`` over the vector, whose one float32 scale is the
  mean of |w| where q is not 0: vectors of -s, 0 and s keep their numbers exactly
- fp16: plain values, no scales
- mxfp4: `pi2.plan.weights.rounding`, with a function of its own (`quantize_exponents`)

A group whose scale is 0 has ``q = 0``.

Numbers of MXFP4: 4-bit floats (E2M1) of which 32 share a power of two.

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

from collections import Counter

import numpy as np

from pi2.arrays import F16, F32, I8, U8, U32, Scales
from pi2.plan.weights.layout import GROUP, Precision, split_lanes, weight_bytes

ODD_TOPS = {"int2": 3, "int3": 7}
"""Largest codes of precisions whose codes are odd."""


def pack_codes(codes: I8, precision: Precision) -> U8:
    """Lay int8 [n, length] codes (int4: -8..7; mxfp4: 0..15; int3: -7, -5, ..., 7; int2: -3, -1, 1,
    3; ternary: -1, 0, 1) out as bytes uint8 [n, weight_bytes]."""
    count, length = codes.shape
    packed = np.empty((count, weight_bytes(length, precision)), np.uint8)
    group, byte = 0, 0
    # Blocks of the same number of lanes are laid out together.
    for lanes, blocks in Counter(split_lanes(length)).items():
        elements = blocks * lanes * GROUP
        size = weight_bytes(elements, precision)
        block = np.ascontiguousarray(codes[:, group * GROUP : group * GROUP + elements])
        # Four elements are a word; word w of all lanes comes before word w + 1.
        words = block.view("<u4").reshape(count, blocks, lanes, 8)
        ordered = np.ascontiguousarray(words.transpose(0, 1, 3, 2))
        if precision in ("int4", "mxfp4"):
            ordered = _join_nibbles(ordered[:, :, :4], ordered[:, :, 4:])
            if precision == "int4":
                # With 4 bits, adding 8 is turning the highest over.
                ordered ^= np.uint32(0x88888888)
        elif precision == "int2":
            ordered = _join_pairs(_number_odd(ordered, 3))
        elif precision == "ternary":
            ordered = _join_pairs((ordered.view(np.int8) + np.int8(1)).view(np.uint32))
        elif precision == "int3":
            ordered = _join_triples(_number_odd(ordered, 7))
        packed[:, byte : byte + size] = ordered.reshape(count, -1).view(np.uint8)
        group += blocks * lanes
        byte += size
    return packed


def _join_nibbles(low: U32, high: U32) -> U32:
    """Words of four bytes ``q | q' << 4``, of words of four codes q and q'."""
    joined = high << np.uint32(4)
    joined &= np.uint32(0xF0F0F0F0)
    joined |= low & np.uint32(0x0F0F0F0F)
    return joined


def _number_odd(words: U32, top: int) -> U32:
    """Words of four numbers ``(q + top) / 2``, of words of four odd codes q."""
    return ((words.view(np.int8) + np.int8(top)) >> np.int8(1)).view(np.uint32)


def _join_triples(fields: U32) -> U32:
    """Words [n, blocks, 3, lanes]: the lower two bits of the numbers in the ``fields`` [n, blocks,
    8, lanes], then the highest ones."""
    highest = np.zeros_like(fields[:, :, :1])
    for word in range(8):
        own = (fields[:, :, word : word + 1] >> np.uint32(2)) & np.uint32(0x01010101)
        highest |= own << np.uint32(word)
    return np.concatenate([_join_pairs(fields & np.uint32(0x03030303)), highest], axis=2)


def _join_pairs(fields: U32) -> U32:
    """Words [n, blocks, 2, lanes] of the numbers of two bits in the ``fields`` [n, blocks, 8,
    lanes], four in each."""
    joined = np.zeros_like(fields[:, :, :2])
    for turn in range(4):
        joined |= fields[:, :, 2 * turn : 2 * turn + 2] << np.uint32(2 * turn)
    return joined


def unpack_codes(weights: U8, length: int, precision: Precision) -> I8:
    """Undo `pack_codes`: bytes uint8 [n, weight_bytes] -> codes int8 [n, length]."""
    count = weights.shape[0]
    codes = np.empty((count, length), np.int8)
    group, byte = 0, 0
    for lanes in split_lanes(length):
        elements = lanes * GROUP
        size = weight_bytes(elements, precision)
        source = weights[:, byte : byte + size]
        block = np.empty((count, lanes, GROUP), np.int8)
        if precision in ("int4", "mxfp4"):
            ordered = source.reshape(count, 4, lanes, 4).transpose(0, 2, 1, 3)
            pairs = ordered.reshape(count, lanes, 16)
            block[:, :, :16] = pairs & np.uint8(15)
            block[:, :, 16:] = pairs >> np.uint8(4)
            if precision == "int4":
                block -= np.int8(8)
        elif precision == "ternary" or precision in ODD_TOPS:
            ordered = source[:, : 8 * lanes].reshape(count, 2, lanes, 4).transpose(0, 2, 1, 3)
            fours = ordered.reshape(count, lanes, 8)
            for turn in range(4):
                fields = (fours >> np.uint8(2 * turn)) & np.uint8(3)
                block[:, :, 8 * turn : 8 * turn + 8] = fields
            if precision == "int3":
                highest = source[:, 8 * lanes :].reshape(count, lanes, 4)
                for word in range(8):
                    own = (highest >> np.uint8(word)) & np.uint8(1)
                    block[:, :, 4 * word : 4 * word + 4] += (own << np.uint8(2)).view(np.int8)
            if precision == "ternary":
                block -= np.int8(1)
            else:
                block *= np.int8(2)
                block -= np.int8(ODD_TOPS[precision])
        else:
            ordered = source.reshape(count, 8, lanes, 4).transpose(0, 2, 1, 3)
            block[:] = ordered.reshape(count, lanes, GROUP).view(np.int8)
        codes[:, group * GROUP : group * GROUP + elements] = block.reshape(count, elements)
        group += lanes
        byte += size
    return codes


def order_words(weights: U8, length: int, precision: Precision) -> U32:
    """Put the words of packed vectors uint8 [n, weight_bytes] in the order of groups: uint32 [n,
    groups, words of a group]."""
    count = len(weights)
    words = weight_bytes(GROUP, precision) // 4
    if precision == "fp16":
        plain = np.ascontiguousarray(weights).view("<u4")
        return np.asarray(plain.reshape(count, length // GROUP, words), np.uint32)
    ordered = np.empty((count, length // GROUP, words), np.uint32)
    group, byte = 0, 0
    for lanes, blocks in Counter(split_lanes(length)).items():
        groups = blocks * lanes
        size = weight_bytes(groups * GROUP, precision)
        source = np.ascontiguousarray(weights[:, byte : byte + size]).view("<u4")
        block = source.reshape(count, blocks, words, lanes).transpose(0, 1, 3, 2)
        ordered[:, group : group + groups].reshape(count, blocks, lanes, words)[:] = block
        group += groups
        byte += size
    return ordered


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
