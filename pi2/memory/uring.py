"""The I/O engine ``io_uring``: reads are queued in memory that the kernel sees, many per call.

No thread and no Python per neuron: requests are rows of an array, and one system call hands all of
them over.  Rings and their offsets: include/uapi/linux/io_uring.h and the manual page io_uring(7)
of liburing.
"""

from __future__ import annotations

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
from typing import TYPE_CHECKING

import numpy as np

from pi2.arrays import I64
from pi2.memory.requests import PENDING, ReadBatch

if TYPE_CHECKING:
    from pi2.backends.host.contract import HostLoops

_SETUP, _ENTER, _REGISTER = 425, 426, 427
"""System calls: the same numbers on x86-64 and aarch64."""
_SYSTEM_CALL_WORDS = 7
"""Its number, and six arguments at most."""
_REGISTER_FILES = 2
_READV = 1
_FIXED_FILE = 1 << 8
"""Flag of an entry, beside its operation: the file is a registered one."""
_GET_EVENTS = 1
_DEFERRED = 1 << 9 | 1 << 12 | 1 << 13
"""Setup flags: one thread submits, and completions are noted when it asks for them, not in the
middle of its computations; the ring says when there are any (Linux 6.1)."""
_NOTED_A_CALL = 20
"""Completions that a system call notes at least, if there are as many (since Linux 6.13)."""
_HAS_COMPLETIONS = 1 << 2
"""Flag of the submission ring: completions wait to be asked for."""
_PARAMETERS_BYTES = 120
_FLAGS_OFFSET = 8
_SQ_OFFSETS, _CQ_OFFSETS = 40, 80
"""Where ``struct io_uring_params`` has the offsets of the rings."""
_RINGS, _ENTRIES = 0, 0x10000000
"""Offsets for mmap: both rings, and the entries."""
_SINGLE_MAP = 1
_WORTH_A_CALL = 4
"""What waits is handed over when one part in so many of the depth is free."""
_ENTRY_WORDS = 8
"""64-bit words of an entry."""


class RingUnavailable(Exception):
    """This system has no io_uring for us; the text says why."""


@dataclass(slots=True, eq=False)
class _Job:
    """A batch that is not over."""

    batch: ReadBatch
    entries: I64
    """For the ring, [n, 8]."""
    first_name: int
    """Name of its first request: those of a job follow each other, and none is used again."""
    pending: int
    """Requests whose results are not known."""
    queued: int = 0
    """Requests that have been handed over."""


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
        self._ring = self._open_ring()
        self._jobs: dict[int, _Job] = {}
        """By the identity of their batches."""
        self._waiting: deque[_Job] = deque()
        """Those that have not been handed over as a whole."""
        self._next_name = 0

    def _open_ring(self) -> _Ring:
        """The calling thread will be the one that submits."""
        ring = _Ring(self._depth)
        try:
            ring.register_files(self._files)
        except BaseException:
            ring.close()
            raise
        self._thread = threading.get_ident()
        return ring

    def submit(self, batch: ReadBatch) -> None:
        """See `pi2.memory.io_engine.IoEngine`."""
        count = len(batch.firsts)
        if count == 0:
            return
        if self._thread != threading.get_ident():
            self._follow_caller()
        job = _Job(batch, self._make_entries(batch), self._next_name, count)
        self._next_name += count
        self._jobs[id(batch)] = job
        self._waiting.append(job)
        self._enter(0)

    def _make_entries(self, batch: ReadBatch) -> I64:
        """Entries of all requests, [n, 8]."""
        count, head = len(batch.firsts), _READV | _FIXED_FILE | batch.file << 32
        if self._loops is not None:
            entries = np.empty((count, _ENTRY_WORDS), np.int64)
            self._loops.fill_entries(
                entries,
                head=head,
                first_name=self._next_name,
                vectors=batch.vectors,
                firsts=batch.firsts,
                counts=batch.counts,
                offsets=batch.offsets,
            )
            return entries
        entries = np.zeros((count, _ENTRY_WORDS), np.int64)
        entries[:, 0] = head
        entries[:, 1] = batch.offsets
        np.multiply(batch.firsts, 16, out=entries[:, 2])
        entries[:, 2] += batch.vectors.ctypes.data
        entries[:, 3] = batch.counts
        entries[:, 4] = np.arange(self._next_name, self._next_name + count)
        return entries

    def _follow_caller(self) -> None:
        """Make a ring for the calling thread, since another one's refuses it."""
        assert not self._ring.in_flight, "another thread's reads are under way"
        self._ring.close()
        self._ring = self._open_ring()

    def advance(self) -> None:
        """See `pi2.memory.io_engine.IoEngine`."""
        if self._waiting:
            self._enter(0)

    def wait(self, batch: ReadBatch, part: int) -> None:
        """See `pi2.memory.io_engine.IoEngine`."""
        self._wait(batch, batch.parts[part])

    def _wait(self, batch: ReadBatch, part: slice) -> None:
        if id(batch) not in self._jobs:
            return
        # What is over by now needs no system call.
        self._reap()
        # Others' requests may be among those that end: then go round again.
        while pending := batch.count_pending(part):
            if not self._waiting and not self._ring.in_flight:
                # An interrupt came while they were being queued: they never will be.
                results = batch.results[part]
                results[results == PENDING] = -errno.ECANCELED
                self._jobs[id(batch)].pending -= pending
                self._forget_ended()
                return
            self._enter(pending)

    def abandon(self, batch: ReadBatch) -> None:
        """See `pi2.memory.io_engine.IoEngine`."""
        job = self._jobs.get(id(batch))
        if job is not None and job in self._waiting:
            self._waiting.remove(job)
            batch.results[job.queued :] = -errno.ECANCELED
            job.pending -= len(batch.results) - job.queued
            self._forget_ended()
        self._wait(batch, slice(None))

    def _enter(self, least: int) -> None:
        """Hand over what has room, wait for ``least`` completions, and take note of all."""
        ring = self._ring
        if self._waiting and not least and not self._has_room():
            # There is room only for as many as are over.
            ring.enter(0)
            self._reap()
            if not self._has_room():
                return
        self._queue()
        ring.enter(min(least, ring.in_flight))
        self._reap()
        while self._waiting and self._has_room():
            self._queue()
            ring.enter(0)
            self._reap()

    def _has_room(self) -> bool:
        """Whether so many requests can be handed over that it is worth a system call."""
        return self._depth - self._ring.in_flight >= max(1, self._depth // _WORTH_A_CALL)

    def _queue(self) -> None:
        """Write entries of waiting requests, as many as the depth allows.

        What waits is noted before entries are written: an interrupt in between loses requests, the
        other way round it would repeat them, into slots that by then are others'.
        """
        while self._waiting and (room := self._depth - self._ring.in_flight) > 0:
            job = self._waiting[0]
            entries = job.entries[job.queued : job.queued + room]
            job.queued += len(entries)
            if job.queued == len(job.entries):
                self._waiting.popleft()
            self._ring.push(entries)

    def _reap(self) -> None:
        """Note results.  Completions are taken off the ring at the end: after an interrupt they
        are noted again."""
        ring, loops = self._ring, self._loops
        head, count = ring.find_completions()
        if count == 0:
            return
        for job in self._jobs.values():
            name, results = job.first_name, job.batch.results
            if loops is not None:
                noted = loops.note_results(
                    ring.events, results, head=head, count=count, first_name=name
                )
            else:
                noted = note_results(ring.events, results, head=head, count=count, first_name=name)
            job.pending -= noted
        self._forget_ended()
        ring.advance(count)

    def _forget_ended(self) -> None:
        for job in list(self._jobs.values()):
            # Those that were noted twice count twice.
            if job.pending <= 0 and not job.batch.count_pending():
                del self._jobs[id(job.batch)]

    def close(self) -> None:
        """See `pi2.memory.io_engine.IoEngine`."""
        # The kernel writes into our memory until the last read is over.
        self._waiting.clear()
        while self._ring.in_flight:
            self._enter(1)
        self._ring.close()


class _Ring:
    """A submission ring, a completion ring, and the entries, as arrays."""

    def __init__(self, depth: int) -> None:
        if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
            raise RingUnavailable(f"io_uring is not known on {sys.platform} {platform.machine()}")
        self._system_call = ctypes.CDLL(None, use_errno=True).syscall
        self._system_call.restype = ctypes.c_long
        self._system_call.argtypes = [ctypes.c_long] * _SYSTEM_CALL_WORDS
        try:
            self._fd, parameters = self._set_up(depth)
        except OSError as error:
            raise RingUnavailable(_explain_refusal(error)) from None
        try:
            self._map(parameters)
        except BaseException:
            os.close(self._fd)
            raise

    def _set_up(self, depth: int) -> tuple[int, bytes]:
        """Return the ring's descriptor and ``struct io_uring_params``."""
        for flags in (_DEFERRED, 0):
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

    def _map(self, parameters: bytes) -> None:
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
        words: memoryview[int] = memoryview(rings)[: size & ~3].cast("I")
        self._words = words
        self._head, self._tail, self._flags = head // 4, tail // 4, flags // 4
        self._done_head, self._done_tail = done_head // 4, done_tail // 4
        assert words[mask // 4] == entries - 1 and words[done_mask // 4] == completions - 1
        np.frombuffer(rings, np.uint32, entries, array)[:] = np.arange(entries)
        self._entries: I64 = np.frombuffer(table, np.int64).reshape(entries, _ENTRY_WORDS)
        raw = np.frombuffer(rings, np.uint8, 16 * completions, events)
        self.events: I64 = raw.view(np.int64).reshape(completions, 2)
        """Ring of completions: names, and results in the lower halves of the second words."""

    def register_files(self, files: Sequence[int]) -> None:
        """Let entries name ``files`` by their numbers."""
        if not files:
            return
        table = (ctypes.c_int * len(files))(*files)
        try:
            self._call(_REGISTER, self._fd, _REGISTER_FILES, ctypes.addressof(table), len(files))
        except OSError as error:
            raise RingUnavailable(_explain_refusal(error)) from None

    def push(self, entries: I64) -> None:
        """Write ``entries`` [n, 8]; there is room for as many as the depth."""
        tail, size, count = self._words[self._tail], len(self._entries), len(entries)
        place = tail % size
        straight = min(count, size - place)
        self._entries[place : place + straight] = entries[:straight]
        self._entries[: count - straight] = entries[straight:]
        # The system call that follows makes the kernel see entries before the tail.
        self._words[self._tail] = (tail + count) & 0xFFFFFFFF

    @property
    def in_flight(self) -> int:
        """Entries whose completions have not been taken, handed over or not."""
        count: int = (self._words[self._tail] - self._words[self._done_head]) & 0xFFFFFFFF
        return count

    def enter(self, least: int) -> None:
        """Hand over all entries, wait for ``least`` completions, and let the kernel note all that
        are over."""
        words = self._words
        hidden = self._is_deferred and words[self._flags] & _HAS_COMPLETIONS
        while True:
            known = words[self._done_tail]
            # The ring knows what was handed over, also after an interrupt.
            queued = (words[self._tail] - words[self._head]) & 0xFFFFFFFF
            if not queued and not least and not hidden:
                return
            try:
                self._call(_ENTER, self._fd, queued, least, _GET_EVENTS)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.EAGAIN, errno.EBUSY):
                    continue
                raise
            least = 0
            # The flag tells nothing of what a call leaves over: how many it has noted does.
            noted = (words[self._done_tail] - known) & 0xFFFFFFFF
            hidden = self._is_deferred and noted >= _NOTED_A_CALL

    def find_completions(self) -> tuple[int, int]:
        """Number of the first completion, and how many there are."""
        head, tail = self._words[self._done_head], self._words[self._done_tail]
        return head, (tail - head) & 0xFFFFFFFF

    def advance(self, count: int) -> None:
        """Take ``count`` completions off the ring."""
        words = self._words
        words[self._done_head] = (words[self._done_head] + count) & 0xFFFFFFFF

    def _call(self, *words: int) -> int:
        # What a system call does not take is not read, but a null signal mask is.
        result: int = self._system_call(*words, *(0,) * (_SYSTEM_CALL_WORDS - len(words)))
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return result

    def close(self) -> None:
        """Let go of the ring."""
        os.close(self._fd)


def note_results(events: I64, results: I64, *, head: int, count: int, first_name: int) -> int:
    """See `pi2.backends.host.contract.HostLoops.note_results`."""
    place, size = head % len(events), len(events)
    if place + count <= size:
        taken = events[place : place + count]
    else:
        taken = np.concatenate([events[place:], events[: place + count - size]])
    places = taken[:, 0] - first_name
    mine = places.view(np.uint64) < len(results)
    places = places.compress(mine)
    results[places] = taken.view(np.int32)[:, 2].compress(mine)
    return len(places)


def _explain_refusal(error: OSError) -> str:
    match error.errno:
        case errno.ENOSYS:
            return "the kernel has no io_uring"
        case errno.EPERM | errno.EACCES:
            return "the system forbids io_uring (kernel.io_uring_disabled, or a container's rules)"
        case errno.ENOMEM:
            return "there is no memory for io_uring's rings (limit on locked memory)"
    return f"io_uring cannot be set up: {error.strerror}"
