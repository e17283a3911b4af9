"""Read rates of a flash device between its measured points.

A figure holds for one block size, pattern, extent of the file, issuing core, depth and number of
threads.  A question takes the figures of its pattern; of several cores, depths or thread counts
those nearest to the question; and interpolates the rate over extent and block size, both on
logarithmic scales, because rates follow powers of both over wide stretches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log
from typing import Literal

from pi2.plan.documents.device import Storage

Pattern = Literal["sequential", "random"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashPoint:
    """One figure of a device's ``storage.reads``."""

    pattern: Pattern
    block_bytes: int
    rate_bytes_s: float
    range_bytes: int | None = None
    core: str | None = None
    depth: int | None = None
    threads: int | None = None
    burst: int | None = None
    """Reads that are asked for at once; None for as many as keep the storage busy."""
    overlap: float | None = None
    """Part of their time that computing hides; None where nobody measured it."""


def list_points(storage: Storage) -> tuple[FlashPoint, ...]:
    """The rates of a device document; those of short bursts are no rates of the storage."""
    return tuple(item for item in _list_all(storage) if item.burst is None)


def list_bursts(storage: Storage) -> tuple[FlashPoint, ...]:
    """What a few reads at a time reach: the fixed part of a batch shows in them."""
    return tuple(item for item in _list_all(storage) if item.burst is not None)


def _list_all(storage: Storage) -> tuple[FlashPoint, ...]:
    return tuple(
        FlashPoint(
            pattern=item.pattern,
            block_bytes=item.block,
            rate_bytes_s=float(item.rate),
            range_bytes=item.range,
            core=item.cluster,
            depth=item.depth,
            threads=item.threads,
            burst=item.burst,
            overlap=item.overlap,
        )
        for item in storage.reads
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Flash:
    """The flash of a device, as far as reading goes."""

    points: tuple[FlashPoint, ...]
    latency_s: float
    """One small read in an idle queue."""
    reader_penalty: float
    """Part of the rate lost where several threads issue reads."""
    block_bytes: int
    """Block size that direct reads are multiples of."""
    queue: int = 128
    """Reads in flight beyond which the storage is not faster."""
    has_io_uring: bool = True
    """Whether programs may use it."""
    bursts: tuple[FlashPoint, ...] = ()
    """Rates of a few reads at a time."""

    def find_rate_bytes_s(
        self,
        pattern: Pattern,
        block_bytes: int,
        *,
        range_bytes: int | None = None,
        core: str | None = None,
        threads: int = 1,
    ) -> float:
        """Rate of back-to-back reads of ``block_bytes`` within ``range_bytes`` of a file.  Smaller
        blocks than any that is stated take a read's latency for as many as are under way, and no
        longer than the smallest one.

        Raises ``LookupError`` where the device has no figure of the pattern.
        """
        points = [item for item in self.points if item.pattern == pattern]
        if not points:
            raise LookupError(pattern)
        points = keep_core(points, core)
        by_block: list[tuple[float, float]] = []
        for block in sorted({item.block_bytes for item in points}):
            same = [item for item in points if item.block_bytes == block]
            by_block.append((block, _rate_in_range(same, range_bytes)))
        smallest, rate = by_block[0]
        if block_bytes < smallest:
            seconds = max(block_bytes / rate, self.latency_s / threads)
            return block_bytes / min(seconds, smallest / rate)
        return _interpolate(by_block, block_bytes)


def keep_core(points: Iterable[FlashPoint], core: str | None) -> list[FlashPoint]:
    """Where figures differ in the core only, keep the wanted core's, else the fastest."""
    kept: dict[tuple[object, ...], FlashPoint] = {}
    for item in points:
        key = (
            item.pattern,
            item.block_bytes,
            item.range_bytes,
            item.depth,
            item.threads,
            item.burst,
        )
        old = kept.get(key)
        better = old is None or (
            old.core != core and (item.core == core or item.rate_bytes_s > old.rate_bytes_s)
        )
        if better:
            kept[key] = item
    return list(kept.values())


def _rate_in_range(points: Sequence[FlashPoint], range_bytes: int | None) -> float:
    """Rate of figures of one block size at an extent; one without an extent is the widest."""
    wide = [item for item in points if item.range_bytes is None]
    narrow = [item for item in points if item.range_bytes is not None]
    if not narrow or (range_bytes is None and wide):
        return max(item.rate_bytes_s for item in wide)
    curve: list[tuple[float, float]] = []
    for extent in sorted({item.range_bytes for item in narrow if item.range_bytes is not None}):
        same = [item for item in narrow if item.range_bytes == extent]
        curve.append((extent, max(item.rate_bytes_s for item in same)))
    return _interpolate(curve, range_bytes or curve[0][0])


def _interpolate(curve: Sequence[tuple[float, float]], at: float) -> float:
    """Interpolate on logarithmic scales; constant below the first point and above the last."""
    if at <= curve[0][0]:
        return curve[0][1]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if at <= x1:
            share = (log(at) - log(x0)) / (log(x1) - log(x0))
            return exp(log(y0) + share * (log(y1) - log(y0)))
    return curve[-1][1]
