"""The simulator's constants, and read rates of a flash device between its measured points.

A figure holds for one block size, pattern, extent of the file, issuing core, depth and number of
threads. A question takes the figures of its pattern; of several cores, depths or thread counts it
takes the nearest. It interpolates the rate over extent and block size, both on logarithmic scales,
because rates follow powers of both over wide ranges."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import pairwise
from math import exp, log
from typing import Any, Literal

from pi2.plan.documents.device import ReadFigure
from pi2.plan.documents.quantities import approximate_number


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of a document that was used."""

    name: str
    status: str
    source: str


def describe_statuses(figures: tuple[Figure, ...]) -> str:
    counts = Counter(item.status for item in figures)
    parts = [f"{count} {status}" for status, count in sorted(counts.items())]
    return f"{len(figures)} figures of device and model: {', '.join(parts)}"


Pattern = Literal["sequential", "random"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flash:
    """The flash of a device, as far as reading goes."""

    points: tuple[ReadFigure, ...]
    """Rates of as many reads at a time as keep the storage busy."""
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
    bursts: tuple[ReadFigure, ...] = ()
    """Rates of a few reads at a time."""

    def find_rate_bytes_s(
        self,
        pattern: Pattern,
        block_bytes: int,
        *,
        range_bytes: int | None = None,
        threads: int = 1,
    ) -> float:
        """Rate of reads of ``block_bytes`` within ``range_bytes`` of a file, interpolated on
        logarithmic scales; LookupError if the device has no figure of the pattern."""
        points = [item for item in self.points if item.pattern == pattern]
        if not points:
            raise LookupError(pattern)
        by_block: list[tuple[float, float]] = []
        for block in sorted({item.block for item in points}):
            same = [item for item in points if item.block == block]
            by_block.append((block, _rate_in_range(same, range_bytes)))
        smallest, rate = by_block[0]
        if block_bytes < smallest:
            seconds = max(block_bytes / rate, self.latency_s / threads)
            return block_bytes / min(seconds, smallest / rate)
        return interpolate_logs(by_block, block_bytes)

    def find_random_rate(
        self, points: Iterable[ReadFigure], block_bytes: int, range_bytes: int, lanes: int = 1
    ) -> float:
        """Rate by some ``points``."""
        own = replace(self, points=tuple(points))
        return own.find_rate_bytes_s("random", block_bytes, range_bytes=range_bytes, threads=lanes)

    def scale(self, share: float) -> Flash:
        """The same with ``share`` of all rates."""
        points, bursts = (
            tuple(item.model_copy(update={"rate": share * item.rate}) for item in items)
            for items in (self.points, self.bursts)
        )
        return replace(self, points=points, bursts=bursts, latency_s=self.latency_s / share)

    def find_stream_rate(self, block_bytes: int = 4 << 20) -> float:
        """Bytes per second of a layer that is read in order, ``block_bytes`` at a time."""
        return self.find_rate_bytes_s("sequential", block_bytes)


def keep_core(points: Iterable[ReadFigure], core: str | None) -> list[ReadFigure]:
    """If figures differ in the core only, keep the wanted core's, else the fastest."""
    kept: dict[tuple[object, ...], ReadFigure] = {}
    for item in points:
        key = (item.pattern, item.block, item.range, item.depth, item.threads)
        old = kept.get(key)
        better = old is None or (
            old.cluster != core and (item.cluster == core or item.rate > old.rate)
        )
        if better:
            kept[key] = item
    return list(kept.values())


def _rate_in_range(points: Sequence[ReadFigure], range_bytes: int | None) -> float:
    """Rate of figures of one block size at an extent; one without an extent is the widest."""
    wide = [item for item in points if item.range is None]
    narrow = [item for item in points if item.range is not None]
    if not narrow or (range_bytes is None and wide):
        return max(item.rate for item in wide)
    curve: list[tuple[float, float]] = []
    for extent in sorted({item.range for item in narrow if item.range is not None}):
        same = [item for item in narrow if item.range == extent]
        curve.append((extent, max(item.rate for item in same)))
    return interpolate_logs(curve, range_bytes or curve[0][0])


def interpolate_logs(curve: Sequence[tuple[float, float]], at: float) -> float:
    """Interpolate on logarithmic scales; constant below the first point and above the last."""
    if at <= curve[0][0]:
        return curve[0][1]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if at <= x1:
            share = (log(at) - log(x0)) / (log(x1) - log(x0))
            return exp(log(y0) + share * (log(y1) - log(y0)))
    return curve[-1][1]


def _read(name: str) -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(resources.files("pi2.costs").joinpath(name).read_text("utf-8"))


FIGURES, _CORES = _read("constants.toml"), _read("cores.toml")


def count_pipes(core: str | None, architecture: str | None) -> int:
    """Vector pipes of 128 bits of a ``core``, such as ``cortex-x4``."""
    known = (n for name, n in _CORES["pipes"].items() if core and core.startswith(name))
    return next(known, int(_CORES["architectures"].get(architecture or "", 2)))


class Constants:
    """Properties of programs and of kinds of hardware, the same for every plan, model and device;
    ``constants.toml`` has their units, origins and meanings."""

    def __init__(self, **changes: float) -> None:
        """``changes``: other values, by name."""
        assert changes.keys() <= FIGURES.keys(), changes
        self.__dict__.update({name: item["value"] for name, item in FIGURES.items()} | changes)

    def __getattr__(self, name: str) -> float:
        raise AttributeError(name)

    def find_spread(self, name: str) -> Spread:
        """How far devices of a class are from a share that is assumed of them."""
        item = FIGURES[name]
        return Spread(low=item["low"] / item["value"], high=item["high"] / item["value"])

    def find_label_spread(self, status: str) -> Spread:
        """How far a stated figure may be from what programs find."""
        return Spread.around(getattr(self, f"{status.replace('-', '_')}_factor"))


Side = Literal["low", "high"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Factors of an expected rate."""

    low: float = 1.0
    high: float = 1.0

    @classmethod
    def around(cls, factor: float) -> Spread:
        return cls(low=1.0 / factor, high=factor)

    def find(self, side: Side) -> float:
        return self.low if side == "low" else self.high

    def stretch(self, rate: float) -> Range:
        return Range(low=rate * self.low, expected=rate, high=rate * self.high)

    def invert(self) -> Spread:
        """Of times instead of rates."""
        return Spread(low=1.0 / self.high, high=1.0 / self.low)

    def widen(self, other: Spread) -> Spread:
        return Spread(low=min(self.low, other.low), high=max(self.high, other.high))


CERTAIN = Spread()


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Tokens per second: the least that a plan promises, the expected ones, and the most."""

    low: float
    expected: float
    high: float

    def write(self) -> str:
        """``"7.1 - 9.8 - 12"``, or one number if all are written alike."""
        ends = dict.fromkeys(map(approximate_number, (self.low, self.expected, self.high)))
        return " - ".join(ends)

    def describe(self) -> dict[str, Any]:
        return {key: round(getattr(self, key), 4) for key in ("low", "expected", "high")}
