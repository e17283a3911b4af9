"""I/O engines: their protocol, and the ones that need only the usual system calls."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np

from pi2.arrays import I32, I64, Bits

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from pi2.memory.host_loops import HostLoops


Content = Literal["neurons", "gates", "rest", "run"]
"""Whole neurons; gates that are read first; ups and downs of these; neighbours in long reads."""

PENDING = -(2**62)
"""Result of a read that is not over."""
PAGE_BYTES = 4096
MOST_BUNDLES = 16
"""In one read: more would keep a single queue of the drive busy while others are idle."""


@dataclass(slots=True, eq=False)
class ReadBatch:
    """Reads of one file issued together: n requests for b bundles, each into several places."""

    file: int
    """Number of the file, from 0."""
    vectors: I64
    """Address and bytes of every place, [v, 2]."""
    firsts: I32
    """First place of each request, [n]."""
    counts: I32
    """Places of each request, [n]."""
    offsets: I64
    """Byte of the file at which each begins, [n]."""
    sizes: I64
    """Bytes of each, [n]."""
    requests: I32
    """Request that reads each bundle, [b]; the first of several."""
    results: I64
    """Bytes read, below 0 after a failure, PENDING before the end, [n]."""

    parts: tuple[slice, ...] = ()
    """Requests that are issued and waited for together; empty: all of them."""
    content: Content = "neurons"
    submitted_s: float = 0.0
    """When it was issued, if its reads are observed."""


class BundlePlaces(NamedTuple):
    """Bundle i is at ``base + i stride`` of a file, slot s at ``address + s stride``."""

    base: int
    stride: int
    address: int
    gap: int = 0
    """Most bundles between two wanted ones that are read with them, and thrown away."""
    scratch: int = 0
    """Address of a bundle's room for these."""
    most: int = MOST_BUNDLES
    """Bundles of a request."""
    pending: int = PENDING
    """Result of a request that is not over."""


def make_batch(
    file: int, indices: I32, slots: I32, loops: HostLoops, places: BundlePlaces
) -> ReadBatch:
    """Plan reads of the bundles ``indices`` [b] (ascending) into ``slots`` [b]."""
    return ReadBatch(file, *loops.plan_reads(indices, slots, places))


def make_reads(
    file: int, offsets: I64, addresses: I64, lengths: I64, sizes: I64 | None = None
) -> ReadBatch:
    """Plan reads [n] of one place each: ``lengths`` bytes from ``offsets`` of a file on; as many
    as ``sizes`` are needed, by default all."""
    count = len(offsets)
    steps = np.arange(count, dtype=np.int32)
    return ReadBatch(
        file=file,
        vectors=np.array([addresses, lengths]).T.copy(),
        firsts=steps,
        counts=np.ones(count, np.int32),
        offsets=offsets,
        sizes=lengths if sizes is None else sizes,
        requests=steps,
        results=np.full(count, PENDING, np.int64),
        parts=(slice(0, count),),
    )


def find_addresses(slots: I32, address: int, stride: int) -> I64:
    """Return where ``slots`` [n] begin, of which slot 0 is at ``address``."""
    addresses: I64 = np.multiply(slots, stride, dtype=np.int64)
    addresses += address
    return addresses


def keep_gates(batch: ReadBatch, gate_bytes: int, whole: Bits) -> tuple[ReadBatch, Bits]:
    """Let single-bundle requests read only ``gate_bytes``, unless ``whole`` [b]; return which."""
    gates = (batch.counts == 1)[batch.requests] & ~whole
    requests = batch.requests[gates]
    batch.vectors[batch.firsts[requests], 1] = gate_bytes
    batch.sizes[requests] = gate_bytes
    return replace(batch, content="gates"), gates


def divide_clusters(count: int, size: int, most: int) -> tuple[slice, ...]:
    """Divide ``count`` neurons evenly into clusters of at least ``size``, ``most`` at most."""
    number = max(1, min(count // size, most))
    if number == 1:
        return (slice(0, count),)
    bounds = [count * step // number for step in range(number + 1)]
    return tuple(slice(start, stop) for start, stop in pairwise(bounds))


def divide_requests(
    clusters: Sequence[slice], requests: I32
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Move the ends of ``clusters`` to where requests begin; return them and their requests."""
    if len(clusters) == 1:
        return tuple(clusters), (slice(0, int(requests[-1]) + 1),)
    heads = requests.take([cluster.start for cluster in clusters])
    bounds = [*dict.fromkeys(requests.searchsorted(heads).tolist()), len(requests)]
    parts = [*dict.fromkeys(heads.tolist()), int(requests[-1]) + 1]
    return (
        tuple(slice(start, stop) for start, stop in pairwise(bounds)),
        tuple(slice(start, stop) for start, stop in pairwise(parts)),
    )


EngineName = Literal["pread", "io_uring"]

NotePart = Callable[[ReadBatch, int, float, float], None]
"""Is told of every part that a thread has read: batch, number of the part, and from when to when
(`time.perf_counter`)."""


class IoEngine(Protocol):
    """Reads batches.  One caller at a time."""

    def submit(self, batch: ReadBatch) -> None:
        """Begin to read, part by part."""

    def advance(self) -> None:
        """Submit what fits now without waiting, for engines without threads."""

    def wait(self, batch: ReadBatch, part: int, count: int = 1) -> None:
        """Wait until part number ``part``, or ``count`` of them from it on, are over."""

    def abandon(self, batch: ReadBatch) -> None:
        """Wait until nothing of ``batch`` is under way; reads that have not begun never do."""

    def close(self) -> None:
        """Wait for pending reads, and give threads and memory back."""


def make_readers(threads: int, name: str) -> ThreadPoolExecutor:
    """Threads on every core that the caller may use now, before it is bound to one."""
    from concurrent.futures import ThreadPoolExecutor as Pool

    ask, put = (getattr(os, f"sched_{verb}affinity", None) for verb in ("get", "set"))
    if ask is None or put is None:
        return Pool(threads, thread_name_prefix=name)
    try:
        free = ask(0)
    except OSError:  # a sandbox that forbids the question
        return Pool(threads, thread_name_prefix=name)

    def let_go() -> None:
        with suppress(OSError):
            put(0, free)

    return Pool(threads, thread_name_prefix=name, initializer=let_go)


class PreadEngine:
    """Threads that issue reads one after the other, in compiled code."""

    def __init__(self, files: Sequence[int], threads: int, loops: HostLoops) -> None:
        """``files``: descriptors."""
        self._files = files
        self._threads = threads
        self._read_runs = loops.read_runs
        self._pool = make_readers(threads, "pi2-read")
        self._jobs: dict[int, list[Future[None]]] = {}
        self.note_part: NotePart | None = None

    def submit(self, batch: ReadBatch) -> None:
        self._jobs[id(batch)] = [
            self._pool.submit(self._read, batch, number) for number in range(len(batch.parts))
        ]

    def _read(self, batch: ReadBatch, number: int) -> None:
        part, note = batch.parts[number], self.note_part
        start = time.perf_counter()
        self._read_runs(
            self._files[batch.file],
            batch.vectors,
            batch.firsts[part],
            batch.counts[part],
            batch.offsets[part],
            batch.results[part],
        )
        if note is not None:
            note(batch, number, start, time.perf_counter())

    def advance(self) -> None:
        """Its threads do."""

    def wait(self, batch: ReadBatch, part: int, count: int = 1) -> None:
        for job in self._jobs[id(batch)][part : part + count]:
            job.result()
        if part + count == len(batch.parts):
            del self._jobs[id(batch)]

    def abandon(self, batch: ReadBatch) -> None:
        from concurrent.futures import wait

        wait([job for job in self._jobs.pop(id(batch), []) if not job.cancel()])

    def close(self) -> None:
        self._pool.shutdown()


class NullEngine:
    """Reads nothing, at once: for runs whose reads are counted only."""

    def submit(self, batch: ReadBatch) -> None:
        batch.results[:] = batch.sizes

    def advance(self) -> None:
        """Nothing is under way."""

    def wait(self, batch: ReadBatch, part: int, count: int = 1) -> None:
        """Nothing is under way."""

    def abandon(self, batch: ReadBatch) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is under way."""
