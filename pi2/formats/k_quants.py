"""Q4_K, Q5_K and Q6_K: 256 elements whose fp16 scale, and minimum, groups multiply by numbers of
6 or 8 bits; and such blocks that pi2 only reads: Q2_K, Q3_K, IQ and ternary types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
from pi2.formats.format import Format, check_finite
from pi2.formats.packing import keep_blocks

if TYPE_CHECKING:
    import numpy as np

    from pi2.arrays import F32, U8, Bits
else:
    from pi2.formats.format import np

_BLOCK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class _KQuant(Format):
    """One of groups of ``length``."""

    length: int
    shared: SuperBlock
    can_encode: bool = True

    def encode(self, rows: F32, importance: F32 | None = None) -> U8:
        check_finite(rows)
        found = np.empty((len(rows), self.count_bytes(rows.shape[1])), np.uint8)
        for own in list_tiles(*rows.shape):
            weights = weigh(rows[own], importance, self.length, evenly=True)
            weights = turn_groups(weights, self.length)
            columns = turn_groups(rows[own], self.length)
            settled = self.shared.settle(columns, weights, self._fit(columns, weights))
            step, down = settled.spread(self.shared.groups)
            codes = self.shared.round(columns, settled.scales * step, settled.minima * down)
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
        return fit_lines(columns, weights, self.shared.top)

    def _pack(self, codes: U8, settled: Settled) -> U8:
        count = len(codes)
        halves = np.stack([settled.step, settled.down], axis=1).astype("<f2").view(np.uint8)
        pairs = codes.reshape(count, 4, 2, 32)
        parts = [halves, _pack_scales(settled.scales, settled.minima)]
        if self.shared.top > 15:
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
        scales = fit_scales(columns, weights, self.shared.bottom, self.shared.top)
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


def _make(
    name: str, number: int, block_bytes: int, *halves: int, kind: type[Format] = Format, **own: Any
) -> Format:
    return kind(
        name=name,
        number=number,
        block=_BLOCK,
        block_bytes=block_bytes,
        activations="q8_k",
        halves=halves,
        **own,
    )


def _share(groups: int, lowest: int, highest: int, bottom: int, top: int) -> dict[str, Any]:
    own = SuperBlock(groups=groups, lowest=lowest, highest=highest, bottom=bottom, top=top)
    return {"length": _BLOCK // groups, "shared": own}


FORMATS = (
    _make("q4_k", 12, 144, 0, 2, kind=_WithMinima, **_share(8, 0, 63, 0, 15)),
    _make("q5_k", 13, 176, 0, 2, kind=_WithMinima, **_share(8, 0, 63, 0, 31)),
    _make("q6_k", 14, 210, 208, kind=_WithoutMinima, **_share(16, -128, 127, -32, 31)),
    _make("q2_k", 10, 84, 80, 82),
    _make("q3_k", 11, 110, 108),
    _make("iq2_xxs", 16, 66, 0),
    _make("iq2_xs", 17, 74, 0),
    _make("iq3_xxs", 18, 98, 0),
    _make("iq1_s", 19, 50, 0),
    _make("iq3_s", 21, 110, 0),
    _make("iq2_s", 22, 82, 0),
    _make("iq4_xs", 23, 136, 0),
    _make("iq1_m", 29, 56, kind=_SpreadScale),
    _make("tq1_0", 34, 54, 52),
    _make("tq2_0", 35, 66, 64),
)
PACKINGS = keep_blocks(own for own in FORMATS if not own.name.startswith("tq"))
