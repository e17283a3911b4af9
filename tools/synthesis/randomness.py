"""Random numbers that are the same everywhere: raw bits of SFC64, and tables made of them.

numpy promises that the raw stream of a bit generator never changes, and nothing of the kind about
its distributions; so those come from tables.
"""

from __future__ import annotations

from functools import cache
from statistics import NormalDist

import numpy as np

from pi2.arrays import F32, F64, I8, I32, U8, U16

_INT4_DEVIATION = 2.7
_INT8_DEVIATION = 42.0


def draw_bits(count: int, *key: int) -> U16:
    """``count`` random uint16; ``key`` names the stream."""
    # Without its length, a key would name the same stream as itself with a zero behind it.
    sequence = np.random.SeedSequence((len(key), *key))
    raw = np.random.SFC64(sequence).random_raw(-(-count // 4))
    return np.asarray(raw, "<u8").view("<u2")[:count]


def draw_normals(shape: tuple[int, ...], *key: int) -> F32:
    """Standard normal float32 of ``shape``."""
    return _normal_table()[draw_bits(int(np.prod(shape)), *key)].reshape(shape)


def draw_integers(shape: tuple[int, ...], deviation: float, bound: int, *key: int) -> F32:
    """Normal float32 of ``shape``, rounded to whole numbers within +-``bound``.

    Sums of products of whole numbers below 2^24 are exact in float32, in whatever order a matrix
    product adds them.
    """
    table = np.clip(np.rint(_normal_table() * np.float32(deviation)), -bound, bound)
    values: F32 = table[draw_bits(int(np.prod(shape)), *key)]
    return values.reshape(shape)


def draw_signs(count: int, *key: int) -> F32:
    """+1 or -1, float32 [count]."""
    signs: F32 = np.where(draw_bits(count, *key) & 1, 1.0, -1.0).astype(np.float32)
    return signs


def draw_permutation(count: int, *key: int) -> I32:
    """A random order of ``count`` things, int32."""
    keys = draw_bits(4 * count, *key).view("<u8")
    return np.argsort(keys, kind="stable").astype(np.int32)


def draw_int4_pairs(count: int, *key: int) -> U8:
    """``count`` bytes of two biased int4 weights each, normal, -7..7."""
    return _int4_table()[draw_bits(count, *key)]


def draw_int8(count: int, *key: int) -> U8:
    """``count`` bytes of one int8 weight each, normal."""
    levels = draw_bits(-(-count // 2), *key).view(np.uint8)[:count]
    weights: U8 = _int8_table()[levels]
    return weights


def draw_ternary(count: int, *key: int) -> U8:
    """``count`` bytes of four ternary weights each, as fields ``q + 1``: 5 of 16 are -1, and 5 are
    1."""
    return _ternary_table()[draw_bits(count, *key)]


def measure_ternary_deviation() -> float:
    """Deviation of the weights of `draw_ternary`, in steps."""
    low = (_ternary_table() & 3).astype(np.float64) - 1
    return float(np.sqrt(np.mean(low**2)))


def measure_int4_deviation() -> float:
    """Deviation of the weights of `draw_int4_pairs`, in steps."""
    low = (_int4_table() & 15).astype(np.float64) - 8
    return float(np.sqrt(np.mean(low**2)))


def measure_int8_deviation() -> float:
    """Deviation of the weights of `draw_int8`, in steps."""
    return float(np.sqrt(np.mean(_int8_table().view(np.int8).astype(np.float64) ** 2)))


@cache
def _normal_table() -> F32:
    """The middle of each of 65536 equally likely intervals."""
    return _list_quantiles(65536).astype(np.float32)


@cache
def _int4_table() -> U8:
    codes = np.clip(np.rint(_list_quantiles(256) * _INT4_DEVIATION), -7, 7).astype(np.int64) + 8
    both = np.arange(65536)
    pairs: U8 = (codes[both & 255] | codes[both >> 8] << 4).astype(np.uint8)
    return pairs


@cache
def _ternary_table() -> U8:
    fields = np.repeat(np.arange(3), (5, 6, 5))
    four = np.arange(65536)
    packed = np.zeros(len(four), np.uint8)
    for turn in range(4):
        packed |= (fields[four >> 4 * turn & 15] << 2 * turn).astype(np.uint8)
    return packed


@cache
def _int8_table() -> U8:
    codes: I8 = np.rint(_list_quantiles(256) * _INT8_DEVIATION).astype(np.int8)
    return codes.view(np.uint8)


def _list_quantiles(count: int) -> F64:
    normal = NormalDist()
    return np.array([normal.inv_cdf((index + 0.5) / count) for index in range(count)])
