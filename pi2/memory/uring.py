"""The I/O engine ``io_uring``: reads are queued in memory that the kernel sees, many per call.

No thread and no Python per neuron: requests are rows of a pool, and one compiled call submits all
of them, notes finished ones, and waits (`HostLoops.drive_ring`)."""

import ctypes
import errno
import mmap
import os
import platform
import struct
import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pi2.arrays import I32, I64, U32
from pi2.memory.host_loops import HostLoops, RingArrays, RingControl
from pi2.memory.io_engine import PENDING, BundlePlaces, EngineName, IoEngine, PreadEngine, ReadBatch

_SETUP, _ENTER, _REGISTER = 425, 426, 427
"""System calls: the same numbers on x86-64 and aarch64."""
_SYSTEM_CALL_WORDS = 7
"""Its number, and six arguments at most."""
_REGISTER_FILES = 2
_GET_EVENTS = 1
_DEFERRED = 1 << 9 | 1 << 12 | 1 << 13
"""Setup flags: one thread submits, and completions are noted when it asks for them, not in the
middle of its computations; the ring says when there are any (Linux 6.1)."""
_PARAMETERS_BYTES = 120
_FLAGS_OFFSET = 8
_SQ_OFFSETS, _CQ_OFFSETS = 40, 80
"""Offsets of the rings' fields in ``struct io_uring_params``."""
_RINGS, _ENTRIES = 0, 0x10000000
"""Offsets for mmap: both rings, and the entries."""
_SINGLE_MAP = 1
_WORTH_A_CALL = 4
"""What waits is handed over when one part in so many of the depth is free."""
ENTRY_WORDS = 8
"""64-bit words of an entry."""
_WORD = 0xFFFFFFFF


class RingUnavailable(Exception):
    """This system has no io_uring for us; the text says why."""


class Ring:
    """A submission ring, a completion ring, and the entries, as arrays."""

    def __init__(self, depth: int, *, has_one_caller: bool = True) -> None:
        """``has_one_caller``: only the calling thread will use it."""
        if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
            raise RingUnavailable(f"io_uring is not known on {sys.platform} {platform.machine()}")
        self._system_call = ctypes.CDLL(None, use_errno=True).syscall
        self._system_call.restype = ctypes.c_long
        self._system_call.argtypes = [ctypes.c_long] * _SYSTEM_CALL_WORDS
        try:
            self._fd, parameters = self._set_up(depth, has_one_caller)
        except OSError as error:
            raise RingUnavailable(_explain_refusal(error)) from None
        try:
            self._map(depth, parameters)
        except BaseException:
            os.close(self._fd)
            raise

    def _set_up(self, depth: int, has_one_caller: bool) -> tuple[int, bytes]:
        """Return the ring's descriptor and ``struct io_uring_params``."""
        for flags in (_DEFERRED, 0) if has_one_caller else (0,):
            parameters = ctypes.create_string_buffer(_PARAMETERS_BYTES)
            struct.pack_into("I", parameters, _FLAGS_OFFSET, flags)
            try:
                fd = self._call(_SETUP, depth, ctypes.addressof(parameters))
            except OSError as error:
                if not flags or error.errno != errno.EINVAL:
                    raise
                continue  # a kernel that does not know these flags
            self._is_deferred = flags != 0
            return fd, bytes(parameters.raw)
        raise AssertionError("the last flags either work or raise")

    def _map(self, depth: int, parameters: bytes) -> None:
        entries, completions = struct.unpack_from("2I", parameters)
        features = struct.unpack_from("I", parameters, 20)[0]
        if not features & _SINGLE_MAP:
            raise RingUnavailable("the kernel's io_uring is older than Linux 5.4")
        head, tail, mask, _, flags, _, array = struct.unpack_from("7I", parameters, _SQ_OFFSETS)
        done_head, done_tail, done_mask, _, _, events = struct.unpack_from(
            "6I", parameters, _CQ_OFFSETS
        )
        size = max(array + 4 * entries, events + 16 * completions)
        rings = mmap.mmap(self._fd, size, flags=mmap.MAP_SHARED, offset=_RINGS)
        table = mmap.mmap(self._fd, 64 * entries, flags=mmap.MAP_SHARED, offset=_ENTRIES)
        # Single words are read through a memoryview, several times as quickly as through numpy.
        self._words: memoryview[int] = memoryview(rings)[: size & ~3].cast("I")
        self.words: U32 = np.frombuffer(rings, np.uint32, size // 4)
        """Memory of both rings."""
        assert self._words[mask // 4] == entries - 1
        assert self._words[done_mask // 4] == completions - 1
        np.frombuffer(rings, np.uint32, entries, array)[:] = np.arange(entries)
        self.slots: I64 = np.frombuffer(table, np.int64).reshape(entries, ENTRY_WORDS)
        """Entries that are submitted, [entries, 8]."""
        control = {
            RingControl.DESCRIPTOR: self._fd,
            RingControl.DEPTH: depth,
            RingControl.LEAST_ROOM: max(1, depth // _WORTH_A_CALL),
            RingControl.DEFERRED: int(self._is_deferred),
            RingControl.SLOT_MASK: entries - 1,
            RingControl.DONE_MASK: completions - 1,
            RingControl.EVENTS: events // 4,
            RingControl.HEAD: head // 4,
            RingControl.TAIL: tail // 4,
            RingControl.FLAGS: flags // 4,
            RingControl.DONE_HEAD: done_head // 4,
            RingControl.DONE_TAIL: done_tail // 4,
        }
        self.control: I64 = np.zeros(len(RingControl), np.int64)
        """Numbers that the ring is driven by, by `RingControl`."""
        self.control[list(control)] = list(control.values())
        self._head, self._tail, self._done_head = (own // 4 for own in (head, tail, done_head))

    def register_files(self, files: Sequence[int]) -> None:
        """Let entries name ``files`` by their numbers."""
        if not files:
            return
        table = (ctypes.c_int * len(files))(*files)
        try:
            self._call(_REGISTER, self._fd, _REGISTER_FILES, ctypes.addressof(table), len(files))
        except OSError as error:
            raise RingUnavailable(_explain_refusal(error)) from None

    @property
    def in_flight(self) -> int:
        """Entries whose completions have not been taken, handed over or not."""
        count: int = (self._words[self._tail] - self._words[self._done_head]) & _WORD
        return count

    def enter(self, least: int) -> None:
        """Hand over all entries of the ring, wait for ``least`` completions, and let the kernel
        note all that are over."""
        words = self._words
        while True:
            queued = (words[self._tail] - words[self._head]) & _WORD
            try:
                self._call(_ENTER, self._fd, queued, least, _GET_EVENTS)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.EAGAIN, errno.EBUSY):
                    continue
                raise
            return

    def _call(self, *words: int) -> int:
        # What a system call does not take is not read, but a null signal mask is.
        result: int = self._system_call(*words, *(0,) * (_SYSTEM_CALL_WORDS - len(words)))
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return result

    def close(self) -> None:
        os.close(self._fd)


def find_refusal() -> str | None:
    """Why reads use threads here instead of io_uring; None if a ring can be made."""
    try:
        Ring(1).close()
    except RingUnavailable as reason:
        return f"reads use threads: {reason}"
    return None


def _explain_refusal(error: OSError) -> str:
    match error.errno:
        case errno.ENOSYS:
            return "the kernel has no io_uring"
        case errno.EPERM | errno.EACCES:
            return "io_uring is forbidden (kernel.io_uring_disabled, or a container's seccomp)"
        case errno.ENOMEM:
            return "there is no memory for io_uring's rings (limit on locked memory)"
    return f"io_uring cannot be set up: {error.strerror}"


_READV = 1
_FIXED_FILE = 1 << 8
"""Flag of an entry, next to its operation: the file is a registered one."""
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
    batch: ReadBatch
    first: int
    """Name of its first request: requests of a job follow each other, in the pool as well."""
    end: int
    waited: int = 0
    """How many of its first requests have been waited for."""

    def keep_results(self) -> None:
        """Let the batch have its results elsewhere: their place is another's now."""
        self.batch.results = self.batch.results.copy()


class UringEngine:
    """Reads with up to ``depth`` requests in flight. One caller at a time.

    The thread that began a read has to wait for it, unless the caller may change
    (``has_one_caller``)."""

    def __init__(
        self, files: Sequence[int], depth: int, loops: HostLoops, *, has_one_caller: bool = True
    ) -> None:
        """``files``: descriptors; ``loops``: compiled code for the work per request. Raises
        `RingUnavailable`."""
        self._has_one_caller = has_one_caller
        self._loops = loops
        self._files = files
        self._depth = depth
        self._jobs: deque[_Job] = deque()
        """Jobs whose results are in the pool, by their names: some are still awaited."""
        self._make_pool(_POOL)
        self._ring = self._open_ring(0)
        self._waits = False
        """Whether something has not been handed over."""

    def _make_pool(self, count: int) -> None:
        self._entries: I64 = np.zeros((count, ENTRY_WORDS), np.int64)
        self._results: I64 = np.full(count, PENDING, np.int64)

    def _open_ring(self, name: int) -> Ring:
        """Open a ring whose first request is called ``name``; the calling thread will submit."""
        ring = Ring(self._depth, has_one_caller=self._has_one_caller)
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
        count = len(batch.firsts)
        if count == 0:
            return
        self._follow_caller()
        control = self._ring.control
        first = self._make_room(int(control[RingControl.NAMED]), count)
        place = first & (len(self._results) - 1)
        self._loops.fill_entries(
            self._entries[place : place + count],
            head=_READV | _FIXED_FILE | batch.file << 32,
            first_name=first,
            vectors=batch.vectors,
            firsts=batch.firsts,
            counts=batch.counts,
            offsets=batch.offsets,
        )
        batch.results = self._results[place : place + count]
        batch.results.fill(PENDING)
        self._jobs.append(_Job(batch, first, first + count))
        control[RingControl.NAMED] = first + count
        self._drive(0, 0)

    def submit_bundles(
        self, file: int, indices: I32, slots: I32, places: BundlePlaces
    ) -> ReadBatch:
        """Plan reads as `pi2.memory.io_engine.make_batch` does, and submit them, in one compiled
        call; there is at least one."""
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
                self._list_arrays(),
                places,
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
        """Return the name, ``name`` or a later one, of the first of ``count`` requests. They need
        neighbouring places in the pool, without results that are still needed."""
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

    def _follow_caller(self) -> None:
        if not self._has_one_caller or self._thread == threading.get_ident():
            return
        assert not self._ring.in_flight and not self._waits, "another thread's reads are under way"
        self._ring.close()
        self._ring = self._open_ring(int(self._ring.control[RingControl.NAMED]))

    def advance(self) -> None:
        if self._waits:
            self._drive(0, 0)

    def wait(self, batch: ReadBatch, part: int, count: int = 1) -> None:
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
        job = self._find_job(batch)
        if job is None:
            return
        handed = min(max(job.first, int(self._ring.control[RingControl.HANDED_OVER])), job.end)
        place = job.first & (len(self._results) - 1)
        left = slice(place + handed - job.first, place + job.end - job.first)
        self._entries[left] = 0
        self._results[left] = -errno.ECANCELED
        self._wait(batch, slice(None))

    def _list_arrays(self) -> RingArrays:
        ring = self._ring
        return RingArrays(ring.control, ring.words, ring.slots, self._entries, self._results)

    def _drive(self, begin: int, end: int) -> int:
        """Submit as many entries as have room, note finished ones, and wait for the results [begin,
        end) of the pool; return how many will never come."""
        ring = self._ring
        while True:
            failed, pending, self._waits = self._loops.drive_ring(
                self._list_arrays(), begin=begin, end=end, pending=PENDING
            )
            if not failed:
                return pending
            # Python tells why, and lets signals be handled.
            ring.enter(min(pending, ring.in_flight, 1))

    def close(self) -> None:
        # The kernel writes into our memory until the last read is over.
        for job in list(self._jobs):
            self.abandon(job.batch)
        self._ring.close()


class EngineSettings(Protocol):
    """Which engine reads, with how many requests in flight or threads."""

    @property
    def engine(self) -> EngineName: ...

    @property
    def depth(self) -> int: ...

    @property
    def threads(self) -> int: ...


def open_engine(
    settings: EngineSettings, files: Sequence[int], loops: HostLoops, *, has_one_caller: bool = True
) -> tuple[IoEngine, EngineName, str | None]:
    """Open an engine for the descriptors ``files``: ``pread`` where there is no io_uring; return it
    with its name, and why it is another than wanted."""
    fallback = None
    if settings.engine == "io_uring":
        try:
            engine = UringEngine(files, settings.depth, loops, has_one_caller=has_one_caller)
            return engine, "io_uring", None
        except RingUnavailable as reason:
            fallback = str(reason)
    return PreadEngine(files, settings.threads, loops), "pread", fallback
