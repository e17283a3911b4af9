"""How neurons may be read, and how long that takes: the choices of ``[io]``.

A batch of reads takes a fixed time, until it has been asked for and its last read is over, and a
time for every read.  Both follow from rates of few and of many reads at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import log
from typing import Literal

from pi2.planning.activity import MergedReads
from pi2.planning.bundle_layout import find_touched_bytes
from pi2.simulate.flash import Flash, FlashPoint

Engine = Literal["pread", "io_uring"]
ALONE = MergedReads()
"""Every missing neuron has a read of its own."""
_MANY = 128
"""Reads at a time where `pi2 probe` measures rates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IoChoice:
    """An engine with its settings."""

    engine: Engine
    threads: int
    depth: int
    neuron_s: float
    """Time of one of many reads of a neuron."""
    call_s: float = 0.0
    """Time of a batch beside that of its reads."""
    overlap: float | None = None
    """Part of the time that computing hides; None where it was not measured for this engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """A plan's way to read what a layer misses."""

    engine: Engine
    threads: int
    cluster: int
    """Fewest neurons of a part."""
    call_s: tuple[tuple[int, float], ...]
    """Fixed time of a batch by the number of threads that are at work, ascending."""
    neuron_s: tuple[tuple[int, float], ...]
    """Time of one of many reads by the number of threads that are at work, ascending."""
    overlap: float
    request_share: float = 0.0
    """Part of a neuron's time that a longer read takes once, for all of its neurons."""
    merge_gap: int | None = None
    """Most unwanted neurons between two that are read with them; None where the store's order puts
    no neighbours together."""

    def count_parts(self, missing: float) -> float:
        """Parts that a layer's missing neurons are read and computed in."""
        return max(1.0, min(missing / self.cluster, 2.0 * self.threads))

    def find_neuron_s(self, missing: float) -> float:
        """Time of one of ``missing`` reads.  A thread reads a part: with few parts, others rest."""
        return _interpolate(self.neuron_s, self._count_busy(missing))

    def find_call_s(self, missing: float) -> float:
        """Fixed time of ``missing`` reads: threads have to be woken, each for its part."""
        return _interpolate(self.call_s, self._count_busy(missing))

    def _count_busy(self, missing: float) -> float:
        if self.engine != "pread":
            return float(self.threads)
        return min(self.count_parts(missing), float(self.threads))

    def find_merged_s(self, missing: float, merged: MergedReads) -> float:
        """Time of one of ``missing`` neurons, of which neighbours share a read."""
        once = self.request_share
        share = merged.requests * once + (1.0 + merged.unwanted) * (1.0 - once)
        return self.find_neuron_s(missing) * share

    def time(self, missing: float, merged: MergedReads = ALONE) -> float:
        """Seconds until ``missing`` neurons are there, nothing else going on."""
        if missing <= 0:
            return 0.0
        return self.find_call_s(missing) + missing * self.find_merged_s(missing, merged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """Two reads of a neuron: its gate, then the rest of those whose gate is open."""

    gate_bytes: int
    """Of the first read, in whole blocks."""
    open_share: float
    """Part of the neurons that need the second."""


def list_io_choices(flash: Flash, stride: int, range_bytes: int) -> list[IoChoice]:
    """The settings that somebody measured, each with a neuron's time, the fastest first.

    A device whose figures state neither depth nor threads has one choice: one thread with
    io_uring's usual depth.
    """
    settings = sorted(
        {(item.depth, item.threads) for item in flash.points if item.pattern == "random"},
        key=str,
    )
    found: dict[tuple[str, int, int], IoChoice] = {}
    for depth, threads in settings:
        choice = _make_choice(flash, stride, range_bytes, depth, threads)
        key = (choice.engine, choice.threads, choice.depth)
        if key not in found or choice.neuron_s < found[key].neuron_s:
            found[key] = choice
    return sorted(found.values(), key=lambda item: (item.neuron_s, item.threads, item.depth))


def find_reads(
    flash: Flash,
    stride: int,
    range_bytes: int,
    *,
    engine: str,
    threads: int,
    depth: int,
    cluster: int,
    overlap: float,
    phases: Phases | None = None,
    merge_gap: int | None = None,
) -> Reads:
    """A plan's reads: those of the nearest settings that were measured.

    ``overlap``: of engines for which none was measured; ``phases``: where a neuron is read in two;
    ``merge_gap``: where neighbours share a read.
    """
    choices = list_io_choices(flash, stride, range_bytes)
    if phases is not None:
        choices = _divide_reads(flash, choices, stride, range_bytes, phases)
    same = [item for item in choices if item.engine == engine] or choices

    def distance(item: IoChoice) -> tuple[int, int]:
        if engine == "io_uring":
            return abs(item.depth - depth), abs(item.threads - threads)
        return abs(item.threads - threads), abs(item.depth - depth)

    chosen = min(same, key=distance)
    alike = sorted(same, key=lambda item: item.threads) if chosen.engine == "pread" else [chosen]
    return Reads(
        engine=chosen.engine,
        threads=threads,
        cluster=cluster,
        call_s=tuple((item.threads, item.call_s) for item in alike),
        neuron_s=tuple((item.threads, item.neuron_s) for item in alike),
        overlap=overlap if chosen.overlap is None else chosen.overlap,
        request_share=_find_request_share(flash, stride, range_bytes),
        merge_gap=merge_gap,
    )


def _find_request_share(flash: Flash, stride: int, range_bytes: int) -> float:
    """Part of the time of a neuron's read that does not grow with its bytes."""
    one_s, four_s = (
        count * stride / _find_rate(flash, flash.points, count * stride, range_bytes)
        for count in (1, 4)
    )
    return max(0.0, (4.0 * one_s - four_s) / (3.0 * one_s))


def _divide_reads(
    flash: Flash,
    whole: Iterable[IoChoice],
    stride: int,
    range_bytes: int,
    phases: Phases,
) -> list[IoChoice]:
    """The same settings where every neuron takes a read, and most of them a second one."""
    first, rest = phases.gate_bytes, stride - phases.gate_bytes
    found = []
    for item in whole:
        gate_s, rest_s = (
            next(
                other.neuron_s
                for other in list_io_choices(flash, size, range_bytes)
                if (other.engine, other.threads, other.depth)
                == (item.engine, item.threads, item.depth)
            )
            for size in (first, rest)
        )
        seconds = gate_s + phases.open_share * rest_s
        found.append(replace(item, neuron_s=seconds, call_s=2.0 * item.call_s))
    return found


def _make_choice(
    flash: Flash, stride: int, range_bytes: int, depth: int | None, threads: int | None
) -> IoChoice:
    """Rates of other blocks are scaled by what this setting reaches at the blocks it has."""
    queued = depth is not None or threads is None
    points = [item for item in flash.points if (item.depth, item.threads) == (depth, threads)]
    own = [item for item in points if item.pattern == "random"]
    read_bytes = float(stride)
    if not any(item.block_bytes == stride for item in flash.points):
        # Rates are of reads that begin with a page; others touch more pages than they fill.
        read_bytes = find_touched_bytes(stride)
    best = _find_rate(flash, flash.points, round(read_bytes), range_bytes)
    share = 1.0
    common = {item.block_bytes for item in own}
    ratios = [
        _find_rate(flash, own, block, range_bytes)
        / _find_rate(flash, flash.points, block, range_bytes)
        for block in common
    ]
    if ratios:
        share = min(1.0, sum(ratios) / len(ratios))
    penalty = 1.0 - flash.reader_penalty if (threads or 1) > 1 else 1.0
    many_s = read_bytes / (best * share * penalty)
    call_s = _find_call_s(flash, own, threads)
    overlaps = [item.overlap for item in own if item.overlap is not None]
    return IoChoice(
        engine="io_uring" if queued else "pread",
        threads=threads or 1,
        depth=depth or 128,
        neuron_s=many_s if call_s is None else max(many_s - call_s / _MANY, many_s / 2),
        call_s=flash.latency_s if call_s is None else call_s,
        overlap=sum(overlaps) / len(overlaps) if overlaps else None,
    )


def _find_call_s(flash: Flash, own: Iterable[FlashPoint], threads: int | None) -> float | None:
    """Fixed part of a batch, from what few and many reads at a time take; None where nobody
    measured few.  A short batch does not fill a queue, so that all depths have the same."""
    queued = any(item.depth is not None for item in own)
    many = {
        item.block_bytes: item
        for item in flash.points
        if item.pattern == "random"
        and item.range_bytes is None
        and item.threads == threads
        and (item.depth is not None) == queued
        and (not queued or item.depth == max((x.depth or 0 for x in flash.bursts), default=0))
    }
    for few in flash.bursts:
        same = many.get(few.block_bytes)
        if same is None or few.threads != threads or (few.depth is not None) != queued:
            continue
        assert few.burst is not None
        many_s = _MANY * same.block_bytes / same.rate_bytes_s
        few_s = few.burst * few.block_bytes / few.rate_bytes_s
        read_s = max(many_s - few_s, 0.0) / (_MANY - few.burst)
        return max(few_s - few.burst * read_s, 0.0)
    return None


def _interpolate(points: tuple[tuple[int, float], ...], at: float) -> float:
    """On logarithmic scales of both; constant beyond the ends."""
    x0, y0 = points[0]
    if at <= x0:
        return y0
    for x1, y1 in points[1:]:
        if at <= x1:
            share = (log(at) - log(x0)) / (log(x1) - log(x0))
            if y0 <= 0.0 or y1 <= 0.0:
                return y0 + (y1 - y0) * share
            return float(y0 * (y1 / y0) ** share)
        x0, y0 = x1, y1
    return y0


def _find_rate(flash: Flash, points: Iterable[FlashPoint], block: int, range_bytes: int) -> float:
    part = Flash(
        points=tuple(item for item in points if item.pattern == "random"),
        latency_s=flash.latency_s,
        reader_penalty=flash.reader_penalty,
        block_bytes=flash.block_bytes,
    )
    return part.find_rate_bytes_s("random", block, range_bytes=range_bytes)
