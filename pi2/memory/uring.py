"""The I/O engine ``io_uring``: reads are queued in memory that the kernel sees, many per call.

No thread and no Python per neuron: requests are rows of a pool, and one compiled call hands all of
them over, notes what is over, and waits (`HostLoops.drive_ring`).
"""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pi2.arrays import I32, I64
from pi2.backends.host.contract import RingControl
from pi2.memory.requests import MOST_BUNDLES, PENDING, ReadBatch
from pi2.memory.ring import ENTRY_WORDS, Ring, RingUnavailable

if TYPE_CHECKING:
    from pi2.backends.host.contract import HostLoops

__all__ = ["RingUnavailable", "UringEngine"]

_READV = 1
_FIXED_FILE = 1 << 8
"""Flag of an entry, beside its operation: the file is a registered one."""
_POOL = 1 << 13
"""Requests that there is room for at first: several layers of a large model."""
_NO_NUMBERS, _NO_PLACES = np.zeros(0, np.int32), np.zeros(0, np.int64)
_NOTHING_PLANNED = (
    np.zeros((0, 2), np.int64),
    _NO_NUMBERS,
    _NO_NUMBERS,
    _NO_PLACES,
    _NO_PLACES,
    _NO_NUMBERS,
)


@dataclass(slots=True, eq=False)
class _Job:
    """A batch whose results lie in the pool."""

    batch: ReadBatch
    first: int
    """Name of its first request: those of a job follow each other, in the pool too."""
    end: int
    waited: int = 0
    """How many of its first requests somebody has waited for."""

    def keep_results(self) -> None:
        """Let the batch have its results elsewhere: their place is another's now."""
        self.batch.results = self.batch.results.copy()


class UringEngine:
    """Reads with up to ``depth`` requests in flight.  One caller at a time.

    What is under way has to be waited for by the thread that has begun it.
    """

    def __init__(self, files: Sequence[int], depth: int, loops: HostLoops | None = None) -> None:
        """``files``: descriptors; ``loops``: compiled code for what is done per request.  Raises
        `RingUnavailable`."""
        self._loops = loops
        self._files = files
        self._depth = depth
        self._jobs: deque[_Job] = deque()
        """Those whose results are in the pool, in the order of their names: the few that somebody
        may still wait for."""
        self._make_pool(_POOL)
        self._ring = self._open_ring(0)
        self._waits = False
        """Whether something has not been handed over."""

    def _make_pool(self, count: int) -> None:
        self._entries: I64 = np.zeros((count, ENTRY_WORDS), np.int64)
        self._results: I64 = np.full(count, PENDING, np.int64)

    def _open_ring(self, name: int) -> Ring:
        """Open a ring whose first request is called ``name``; the calling thread will be the one
        that submits."""
        ring = Ring(self._depth)
        try:
            ring.register_files(self._files)
        except BaseException:
            ring.close()
            raise
        self._thread = threading.get_ident()
        ring.control[[RingControl.NAMED, RingControl.HANDED_OVER]] = name
        ring.control[RingControl.POOL_MASK] = len(self._results) - 1
        return ring

    def submit(self, batch: ReadBatch) -> None:
        """See `pi2.memory.io_engine.IoEngine`."""
        count = len(batch.firsts)
        if count == 0:
            return
        if self._thread != threading.get_ident():
            self._follow_caller()
        control = self._ring.control
        first = self._make_room(int(control[RingControl.NAMED]), count)
        place = first & (len(self._results) - 1)
        self._fill_entries(self._entries[place : place + count], batch, first)
        batch.results = self._results[place : place + count]
        batch.results.fill(PENDING)
        self._jobs.append(_Job(batch, first, first + count))
        control[RingControl.NAMED] = first + count
        self._drive(0, 0)

    @property
    def plans(self) -> bool:
        """Whether `submit_bundles` may be called."""
        return self._loops is not None

    def submit_bundles(
        self, file: int, indices: I32, slots: I32, *, base: int, stride: int, address: int
    ) -> ReadBatch:
        """Plan reads as `pi2.memory.requests.make_batch` does, without gaps, and submit them, in
        one compiled call; there is at least one."""
        assert self._loops is not None
        if self._thread != threading.get_ident():
            self._follow_caller()
        ring, count = self._ring, len(indices)
        first = self._make_room(int(ring.control[RingControl.NAMED]), count)
        place = first & (len(self._results) - 1)
        results = self._results[place : place + count]
        batch = ReadBatch(file, *_NOTHING_PLANNED, results)
        # Known beforehand: an interrupt may come right after the call.
        job = _Job(batch, first, first + count)
        self._jobs.append(job)
        try:
            planned, failed, self._waits = self._loops.submit_reads(
                indices,
                slots,
                ring.control,
                ring.words,
                ring.slots,
                self._entries,
                self._results,
                most=MOST_BUNDLES,
                base=base,
                stride=stride,
                address=address,
                pending=PENDING,
                head=_READV | _FIXED_FILE | file << 32,
                first_name=first,
            )
            batch.vectors, batch.firsts, batch.counts = planned[:3]
            batch.offsets, batch.sizes, batch.requests = planned[3:]
            job.end = first + len(batch.firsts)
            batch.results = results[: len(batch.firsts)]
            if failed:
                # Python tells why, and lets signals be handled.
                ring.enter(0)
                self._drive(0, 0)
        except BaseException:
            self.abandon(batch)
            raise
        return batch

    def _make_room(self, name: int, count: int) -> int:
        """Return the name, ``name`` or a later one, of the first of ``count`` requests, which lie
        side by side in the pool, where nobody's results are needed any more."""
        size = len(self._results)
        if count > size // 2:
            self._wait_for_all(list(self._jobs))
            size = 1 << (2 * count - 1).bit_length()
            self._make_pool(size)
            self._ring.control[RingControl.POOL_MASK] = size - 1
        place = name & (size - 1)
        if place + count > size:
            # Names that are skipped have no entries.
            self._entries[place:] = 0
            name += size - place
        while self._jobs and self._jobs[0].first < name + count - size:
            self._wait_for_all([self._jobs[0]])
        return name

    def _wait_for_all(self, jobs: Sequence[_Job]) -> None:
        """Wait until ``jobs`` are over; their results are not in the pool any more."""
        for job in jobs:
            self._wait(job.batch, slice(None))

    def _fill_entries(self, entries: I64, batch: ReadBatch, first: int) -> None:
        """Write entries [n, 8] of a batch's requests, the first of which is called ``first``."""
        head = _READV | _FIXED_FILE | batch.file << 32
        if self._loops is not None:
            self._loops.fill_entries(
                entries,
                head=head,
                first_name=first,
                vectors=batch.vectors,
                firsts=batch.firsts,
                counts=batch.counts,
                offsets=batch.offsets,
            )
            return
        entries[:] = 0
        entries[:, 0] = head
        entries[:, 1] = batch.offsets
        np.multiply(batch.firsts, 16, out=entries[:, 2])
        entries[:, 2] += batch.vectors.ctypes.data
        entries[:, 3] = batch.counts
        entries[:, 4] = np.arange(first, first + len(entries))

    def _follow_caller(self) -> None:
        """Make a ring for the calling thread, since another one's refuses it."""
        assert not self._ring.in_flight and not self._waits, "another thread's reads are under way"
        self._ring.close()
        self._ring = self._open_ring(int(self._ring.control[RingControl.NAMED]))

    def advance(self) -> None:
        """See `pi2.memory.io_engine.IoEngine`."""
        if self._waits:
            self._drive(0, 0)

    def is_idle(self) -> bool:
        """See `pi2.memory.io_engine.IoEngine`."""
        if self._waits or self._ring.in_flight:
            self._drive(0, 0)
        return not self._waits and not self._ring.in_flight

    def wait(self, batch: ReadBatch, part: int, count: int = 1) -> None:
        """See `pi2.memory.io_engine.IoEngine`."""
        first, last = batch.parts[part], batch.parts[part + count - 1]
        self._wait(batch, slice(first.start, last.stop))

    def _wait(self, batch: ReadBatch, part: slice) -> None:
        job = self._find_job(batch)
        if job is None:
            return
        place = job.first & (len(self._results) - 1)
        begin, end, _ = part.indices(job.end - job.first)
        if self._drive(place + begin, place + end):
            # An interrupt came while they were being queued: they never will be.
            results = batch.results[part]
            results[results == PENDING] = -errno.ECANCELED
        if begin <= job.waited:
            job.waited = max(job.waited, end)
        if job.waited == job.end - job.first:
            self._jobs.remove(job)
            job.keep_results()

    def _find_job(self, batch: ReadBatch) -> _Job | None:
        """The job of a batch; None if its results are not in the pool."""
        for job in reversed(self._jobs):
            if job.batch is batch:
                return job
        return None

    def abandon(self, batch: ReadBatch) -> None:
        """See `pi2.memory.io_engine.IoEngine`."""
        job = self._find_job(batch)
        if job is None:
            return
        handed = min(max(job.first, int(self._ring.control[RingControl.HANDED_OVER])), job.end)
        place = job.first & (len(self._results) - 1)
        left = slice(place + handed - job.first, place + job.end - job.first)
        self._entries[left] = 0
        self._results[left] = -errno.ECANCELED
        self._wait(batch, slice(None))

    def _drive(self, begin: int, end: int) -> int:
        """Hand over what has room, take note of what is over, and wait for the results [begin,
        end) of the pool; return how many will never come."""
        ring, pool, results = self._ring, self._entries, self._results
        if self._loops is None:
            pending = ring.drive(pool, results, begin, end)
            handed, named = ring.control[[RingControl.HANDED_OVER, RingControl.NAMED]].tolist()
            self._waits = handed < named
            return pending
        while True:
            failed, pending, self._waits = self._loops.drive_ring(
                ring.control,
                ring.words,
                ring.slots,
                pool,
                results,
                begin=begin,
                end=end,
                pending=PENDING,
            )
            if not failed:
                return pending
            # Python tells why, and lets signals be handled.
            ring.enter(min(pending, ring.in_flight, 1))

    def close(self) -> None:
        """See `pi2.memory.io_engine.IoEngine`."""
        # The kernel writes into our memory until the last read is over.
        for job in list(self._jobs):
            self.abandon(job.batch)
        self._ring.close()
