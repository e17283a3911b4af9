"""Ways to read neurons and their times: a batch takes a fixed time, and a time for every read. A
setting's time never depends on other settings, so a better figure never makes a prediction
worse."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd, inf
from typing import Literal

from pi2.costs.activity import MergedReads
from pi2.costs.constants import Flash, interpolate_logs
from pi2.plan.documents.device import ReadFigure

Engine = Literal["pread", "io_uring"]
ALONE = MergedReads()
"""Every missing neuron has a read of its own."""
STRETCH_WORTH = (0.92, 0.96)
"""Time of joint reads relative to single ones below which some, or all, layers read jointly."""
_MOST_GAP = 16
"""Most unwanted neurons between two that are read with them."""
PAGE_BYTES = 4096
"""Least number of bytes that flash reads."""
_LONG = 512 * 1024
"""Bytes of a long read in order."""
_SMALLER_POWER = 0.7
"""Rate over block size below the measured blocks, as on a virtual machine's disk at 4 and 8 KiB."""
_BUSY = 32
"""Reads under way with which a storage is as busy as it can be."""
_THREADS = (1, 2, 4, 8)
"""Numbers of threads that may read on a device without such measurements."""


def find_touched_bytes(stride: int) -> float:
    """Mean bytes of the pages that a neuron's read touches, over all neurons of a layer."""
    step = gcd(stride, PAGE_BYTES)
    count = PAGE_BYTES // step
    pages = sum(-(-(start * step + stride) // PAGE_BYTES) for start in range(count))
    return pages * PAGE_BYTES / count


@dataclass(frozen=True, slots=True, kw_only=True)
class IoChoice:
    """An engine with its settings."""

    engine: Engine
    threads: int
    depth: int
    neuron_s: float
    """Time of one of many reads of a neuron, or of neighbours such as an expert's."""
    call_s: float = 0.0
    """Time of a batch in addition to its reads."""
    few: int = 1
    """Reads of a batch from which on that is so."""
    single_s: float = 0.0
    """Time of a batch of one."""
    overlap: float | None = None
    """Part of the time that computing hides; None where it was not measured for this engine."""

    def write(self) -> dict[str, str | int]:
        """Values of a plan's table ``[io]``."""
        return {"engine": self.engine, "threads": self.threads, "depth": self.depth}

    def time(self, reads: float) -> float:
        """Seconds of a batch of ``reads``, at least one."""
        if reads >= self.few or self.few <= 1:
            return self.call_s + max(reads, 1.0) * self.neuron_s
        few_s = self.call_s + self.few * self.neuron_s
        single_s = min(self.single_s, few_s)
        return single_s + (few_s - single_s) * max(reads - 1.0, 0.0) / (self.few - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """A plan's way to read what a layer misses."""

    engine: Engine
    threads: int
    cluster: int
    """Fewest neurons of a part."""
    choices: tuple[IoChoice, ...] = ()
    """Measurements by number of threads, ascending."""
    overlap: float
    request_share: float = 0.0
    """Part of a neuron's time that a longer read takes once, for all of its neurons."""
    merge_gap: int | None = None
    """Most unwanted neurons read between two wanted ones; None if the order groups nothing."""
    phases: tuple[int, float] | None = None
    """Bytes of a first read, of a neuron's gate, in whole blocks, and the part of the neurons that
    need a second one; None for one read."""
    stride: int = 0
    run: int = 1
    """Neurons of an expert that a request reads."""
    place_s: float = 0.0
    """Seconds to find room for a neuron; joint reads are computed in place."""
    whole_byte_s: float | None = None
    """Seconds per byte of a long read, for engines that read jointly; None for others."""
    most_parts: float | None = None
    """Most parts of a layer's reads; None for two of each thread."""

    def count_parts(self, missing: float) -> float:
        most = 2.0 * self.threads if self.most_parts is None else self.most_parts
        return max(1.0, min(missing / max(self.cluster, self.run), most))

    @property
    def read_bytes(self) -> float:
        if self.phases is None:
            return self.stride
        gate_bytes, open_share = self.phases
        return gate_bytes + open_share * (self.stride - gate_bytes)

    def merge_dense(self, missing: float, absent: float) -> MergedReads | None:
        """The joint reads of an engine that has them; None if single reads are as good."""
        if self.whole_byte_s is None or missing <= 0.0 or self.run > 1:
            return None
        single_s = self._time_single(missing, ALONE) / missing
        stream_s = self.stride * self.whole_byte_s
        found = find_stretches(single_s - self.place_s, stream_s, missing / absent)
        apart_s = time_stretches(single_s - self.place_s, stream_s, found)
        return found if apart_s < STRETCH_WORTH[1] * (single_s - self.place_s) else None

    def time(
        self, missing: float, merged: MergedReads = ALONE, absent: float | None = None
    ) -> float:
        """Seconds to read ``missing`` neurons of ``absent`` ones, nothing else going on."""
        if missing <= 0:
            return 0.0
        dense = None if absent is None else self.merge_dense(missing, absent)
        if dense is None:
            return self._time_single(missing, merged)
        assert self.whole_byte_s is not None
        single_s = self._time_single(missing, ALONE) / missing - self.place_s
        apart_s = time_stretches(single_s, self.stride * self.whole_byte_s, dense)
        # Where few are read with each other, the others are kept.
        seconds = apart_s + self.place_s * dense.requests
        low, high = STRETCH_WORTH
        part = min(max((apart_s / single_s - low) / (high - low), 0.0), 1.0)
        return missing * (seconds + part * (single_s + self.place_s - seconds))

    def _time_single(self, missing: float, merged: MergedReads) -> float:
        busy = float(self.threads)
        if self.engine == "pread":
            busy = min(self.count_parts(missing), busy)
        once = self.request_share
        if self.run > 1:
            merged = ALONE
        reads = (
            missing / self.run * (merged.requests * once + (1.0 + merged.unwanted) * (1.0 - once))
        )
        return interpolate_logs([(item.threads, item.time(reads)) for item in self.choices], busy)


def find_stretches(single_s: float, stream_s: float, density: float) -> MergedReads:
    """The best gap to read across if a share ``density`` is missing: ``single_s`` is a neuron's own
    read, ``stream_s`` its part of a long one."""
    density = min(max(density, 1e-9), 1.0)
    best, best_s = MergedReads(unwanted=1.0 / density - 1.0, requests=0.0), stream_s / density
    unwanted, rest = 0.0, 1.0
    for gap in range(_MOST_GAP + 1):
        unwanted += gap * density * rest
        rest *= 1.0 - density
        found = MergedReads(requests=rest, unwanted=unwanted)
        seconds = time_stretches(single_s, stream_s, found)
        if seconds < best_s:
            best, best_s = found, seconds
    return best


def time_stretches(single_s: float, stream_s: float, merged: MergedReads) -> float:
    beyond_s = max(single_s - stream_s, 0.0)
    return merged.requests * beyond_s + (1.0 + merged.unwanted) * min(stream_s, single_s)


def list_io_choices(
    flash: Flash, stride: int, range_bytes: int, place_s: float = 0.0, *, run: int = 1
) -> list[IoChoice]:
    """Measured settings with the time of a read of ``run`` neurons, fastest first; figures without
    depth or threads are of a full queue."""
    settings = sorted(
        {(item.depth, item.threads) for item in flash.points if item.pattern == "random"}, key=str
    )
    found: dict[tuple[str, int, int], IoChoice] = {}
    for depth, threads in settings:
        choice = _make_choice(flash, stride, range_bytes, depth, threads)
        if run > 1:
            many = _make_choice(flash, run * stride, range_bytes, depth, threads)
            choice = replace(choice, neuron_s=many.neuron_s, few=1)
        choice = replace(choice, neuron_s=choice.neuron_s + place_s)
        key = (choice.engine, choice.threads, choice.depth)
        if key not in found or choice.neuron_s < found[key].neuron_s:
            found[key] = choice
    if not any(item.engine == "pread" for item in found.values()):
        queue = min(found.values(), key=lambda item: item.neuron_s)
        for threads in _THREADS:
            found["pread", threads, 1] = _make_waiting(flash, run * stride, queue, threads, place_s)
    return sorted(found.values(), key=lambda item: (item.neuron_s, item.threads, item.depth))


def find_reads(
    flash: Flash, range_bytes: int, wanted: Reads, *, depth: int, streams: bool
) -> Reads:
    """The reads that are ``wanted``, with the nearest measured settings."""
    stride, run, place_s = wanted.stride, wanted.run, wanted.place_s
    if wanted.phases is None:
        choices = list_io_choices(flash, stride, range_bytes, place_s, run=run)
    else:
        choices = list(_divide_reads(flash, stride, range_bytes, place_s, wanted.phases))
    same = [item for item in choices if item.engine == wanted.engine] or choices

    def distance(item: IoChoice) -> tuple[int, int]:
        near = abs(item.depth - depth), abs(item.threads - wanted.threads)
        return near if wanted.engine == "io_uring" else near[::-1]

    chosen = min(same, key=distance)
    one_s, four_s = (
        count * stride / flash.find_random_rate(flash.points, count * stride, range_bytes)
        for count in (1, 4)
    )
    alike = sorted(same, key=lambda item: item.threads) if chosen.engine == "pread" else [chosen]
    return replace(
        wanted,
        engine=chosen.engine,
        choices=tuple(alike),
        overlap=wanted.overlap if chosen.overlap is None else chosen.overlap,
        # What does not grow with the bytes of a read.
        request_share=max(0.0, (4.0 * one_s - four_s) / (3.0 * one_s)),
        whole_byte_s=1.0 / flash.find_rate_bytes_s("sequential", _LONG) if streams else None,
        most_parts=inf if streams else None,
    )


def _divide_reads(
    flash: Flash, stride: int, range_bytes: int, place_s: float, phases: tuple[int, float]
) -> Iterator[IoChoice]:
    gate_bytes, open_share = phases
    rests = list_io_choices(flash, stride - gate_bytes, range_bytes)
    rest_s = {(item.engine, item.threads, item.depth): item.neuron_s for item in rests}
    for item in list_io_choices(flash, gate_bytes, range_bytes, place_s):
        second_s = open_share * rest_s[(item.engine, item.threads, item.depth)]
        call_s, single_s = 2.0 * item.call_s, 2.0 * item.single_s
        neuron_s = item.neuron_s + second_s
        yield replace(item, neuron_s=neuron_s, call_s=call_s, single_s=single_s)


def _make_waiting(
    flash: Flash, size_bytes: int, queue: IoChoice, threads: int, place_s: float
) -> IoChoice:
    """Threads that wait for each read of theirs, on a device whose full ``queue`` is known."""
    alone_s = flash.latency_s + size_bytes / max(item.rate for item in flash.points)
    penalty = 1.0 - flash.reader_penalty if threads > 1 else 1.0
    read_s = max((queue.neuron_s - place_s) / penalty, alone_s / threads)
    return IoChoice(
        engine="pread", threads=threads, depth=1, neuron_s=read_s + place_s, call_s=flash.latency_s
    )


def _make_choice(
    flash: Flash, stride: int, range_bytes: int, depth: int | None, threads: int | None
) -> IoChoice:
    """What a setting takes for one of many reads of ``stride`` bytes."""
    queued = depth is not None or threads is None
    points = [item for item in flash.points if item.pattern == "random"]
    own = [item for item in points if (item.depth, item.threads) == (depth, threads)]
    read_bytes = float(stride)
    if not any(item.block == stride for item in points):
        # Rates are of reads that begin with a page; others touch more pages than they fill.
        read_bytes = find_touched_bytes(stride)
    lanes = min(threads or 1, flash.queue) if not queued else min(depth or 128, flash.queue, _BUSY)
    neuron_s = _time_read(flash, own, read_bytes, range_bytes, lanes)
    bursts = _list_bursts(flash, stride, queued, threads)
    few, few_s = max(bursts, default=(1, flash.latency_s + neuron_s))
    single, single_s = min(bursts, default=(1, 0.0))
    if single > 1:
        single_s = max(flash.latency_s, few_s / 2)
    overlaps = [item.overlap for item in own if item.overlap is not None]
    return IoChoice(
        engine="io_uring" if queued else "pread",
        threads=threads or 1,
        depth=min(depth or 128, flash.queue),
        neuron_s=neuron_s,
        call_s=max(few_s - few * neuron_s, 0.0),
        few=few,
        single_s=single_s,
        overlap=sum(overlaps) / len(overlaps) if overlaps else None,
    )


def _time_read(
    flash: Flash, own: list[ReadFigure], size_bytes: float, range_bytes: int, lanes: int
) -> float:
    """Seconds of one of many reads; bytes beyond the largest block come at the best rate."""
    blocks = [item.block for item in own]
    within = min(max(size_bytes, min(blocks)), max(blocks))
    seconds = within / flash.find_random_rate(own, round(within), range_bytes, lanes)
    if size_bytes < within:
        # Down to the smallest block that any setting has; below it, as `Flash` says.
        least = min(x.block for x in flash.points if x.pattern == "random")
        known = min(max(size_bytes, least), within)
        seconds *= (known / within) ** (1.0 - _SMALLER_POWER)
        other, usual = (
            size / flash.find_random_rate(flash.points, round(size), range_bytes, lanes)
            for size in (size_bytes, known)
        )
        seconds *= min(other / usual, 1.0) if size_bytes < known else 1.0
    best = max(item.rate for item in flash.points)
    return seconds + (size_bytes - within) / best if size_bytes > within else seconds


def _list_bursts(
    flash: Flash, stride: int, queued: bool, threads: int | None
) -> list[tuple[int, float]]:
    """Sizes of read bursts and their seconds, ascending; a single read uses one thread."""
    best = max(item.rate for item in flash.points)
    found = []
    for item in flash.bursts:
        assert item.burst is not None
        same = item.threads == threads or item.burst == 1
        if same and (item.depth is not None) == queued:
            more_s = max(stride - item.block, 0) / best
            seconds = item.burst * (item.block / item.rate + more_s)
            found.append((item.burst, seconds))
    return sorted(found)
