"""Q4_K, Q5_K and Q6_K: 256 elements whose fp16 scale, and minimum, groups multiply by numbers of
6 or 8 bits; and such blocks that pi2 only reads: Q2_K, Q3_K, IQ and ternary types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pi2.formats.fitting import (
    Lines,
    Settled,
    SuperBlock,
    fit_lines,
    fit_scales,
    list_tiles,
    turn_groups,
    weigh,
)
from pi2.formats.format import Format, check_finite, list_tables
from pi2.formats.packing import keep_blocks

if TYPE_CHECKING:
    import numpy as np

    from pi2.arrays import F32, U8, Bits
else:
    from pi2.formats.format import np

_BLOCK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class _KQuant(Format):
    """Groups share a scale, as `SuperBlock` has it."""

    shared: tuple[int, ...]
    can_encode: bool = True

    @property
    def sharing(self) -> SuperBlock:
        return SuperBlock(*self.shared)

    def encode(self, rows: F32, importance: F32 | None = None) -> U8:
        check_finite(rows)
        found = np.empty((len(rows), self.count_bytes(rows.shape[1])), np.uint8)
        sharing = self.sharing
        length = _BLOCK // sharing.groups
        for own in list_tiles(*rows.shape):
            weights = turn_groups(weigh(rows[own], importance, length, evenly=True), length)
            columns = turn_groups(rows[own], length)
            settled = sharing.settle(columns, weights, self._fit(columns, weights))
            step, down = settled.spread(sharing.groups)
            codes = sharing.round(columns, settled.scales * step, settled.minima * down)
            blocks = np.ascontiguousarray(codes.T.astype(np.int8)).reshape(-1, _BLOCK)
            found[own] = self._pack(blocks.view(np.uint8), settled).reshape(len(rows[own]), -1)
        return found

    def _fit(self, columns: F32, weights: F32) -> Lines:
        raise NotImplementedError

    def _pack(self, codes: U8, settled: Settled) -> U8:
        """Return blocks uint8 [n, block bytes] of codes [n, 256], bytes of int8."""
        raise NotImplementedError


class _WithMinima(_KQuant):
    """Q4_K and Q5_K; the latter's fifth bits lie together."""

    __slots__ = ()

    def _fit(self, columns: F32, weights: F32) -> Lines:
        return fit_lines(columns, weights, self.sharing.top)

    def _pack(self, codes: U8, settled: Settled) -> U8:
        count = len(codes)
        halves = np.stack([settled.step, settled.down], axis=1).astype("<f2").view(np.uint8)
        pairs = codes.reshape(count, 4, 2, 32)
        parts = [halves, _pack_scales(settled.scales, settled.minima)]
        if self.sharing.top > 15:
            places = np.arange(8, dtype=np.uint8)[:, None]
            high = (codes.reshape(count, 8, 32) >> np.uint8(4)) << places
            parts.append(np.bitwise_or.reduce(high, axis=1))
            pairs = pairs & np.uint8(15)
        nibbles = pairs[:, :, 0] | (pairs[:, :, 1] << np.uint8(4))
        return np.concatenate([*parts, nibbles.reshape(count, -1)], axis=1)


def _pack_scales(scales: F32, minima: F32) -> U8:
    """Return 6-bit numbers of 8 groups, and of their minima, as 12 bytes: the first four of each
    have a byte, with the highest two bits of the last four, whose lowest four share bytes."""
    own, low = (part.astype(np.uint8).reshape(-1, 8) for part in (scales, minima))
    first = [part[:, :4] | ((part[:, 4:] >> np.uint8(4)) << np.uint8(6)) for part in (own, low)]
    last = (own[:, 4:] & np.uint8(15)) | ((low[:, 4:] & np.uint8(15)) << np.uint8(4))
    return np.concatenate([*first, last], axis=1)


class _WithoutMinima(_KQuant):
    """Q6_K: low nibbles, then pairs of high bits, then the numbers of groups."""

    __slots__ = ()

    def _fit(self, columns: F32, weights: F32) -> Lines:
        scales = fit_scales(columns, weights, self.sharing.bottom, self.sharing.top)
        return Lines(scales, np.zeros_like(scales))

    def _pack(self, codes: U8, settled: Settled) -> U8:
        count = len(codes)
        quarters = (codes + np.uint8(32)).reshape(count, 2, 4, 32)
        low = quarters & np.uint8(15)
        nibbles = low[:, :, :2] | (low[:, :, 2:] << np.uint8(4))
        turns = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
        pairs = np.bitwise_or.reduce((quarters >> np.uint8(4)) << turns, axis=2)
        scales = settled.scales.astype(np.int8).view(np.uint8).reshape(count, -1)
        half = settled.step.astype("<f2").view(np.uint8).reshape(count, 2)
        parts = (nibbles.reshape(count, -1), pairs.reshape(count, -1), scales, half)
        return np.concatenate(parts, axis=1)


class _SpreadScale(Format):
    """IQ1_M, whose scale is four times four bits."""

    __slots__ = ()

    def find_faults(self, raw: U8) -> Bits:
        blocks = np.ascontiguousarray(raw).reshape(*raw.shape[:-1], -1, self.block_bytes)
        # The exponent is three of the last four bits, and two of the four before.
        last, before = blocks[..., 55] >> 4, blocks[..., 53] >> 4
        found: Bits = (last & 0x7 == 0x7) & (before & 0xC == 0xC)
        return found


FORMATS: tuple[Format, ...] = list_tables(
    __name__,
    {
        "": Format,
        "spread_scale": _SpreadScale,
        "with_minima": _WithMinima,
        "without_minima": _WithoutMinima,
    },
)
PACKINGS = keep_blocks(FORMATS)
