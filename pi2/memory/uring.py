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
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pi2.memory.requests import I64, PENDING, ReadBatch

_SETUP, _ENTER, _REGISTER = 425, 426, 427
"""System calls: the same numbers on x86-64 and aarch64."""
_REGISTER_FILES = 2
_READV = 1
_FIXED_FILE = 1 << 8
"""Flag of an entry, beside its operation: the file is a registered one."""
_GET_EVENTS = 1
_PARAMETERS_BYTES = 120
_SQ_OFFSETS, _CQ_OFFSETS = 40, 80
"""Where ``struct io_uring_params`` has the offsets of the rings."""
_RINGS, _ENTRIES = 0, 0x10000000
"""Offsets for mmap: both rings, and the entries."""
_SINGLE_MAP = 1
_ENTRY_WORDS = 8
"""64-bit words of an entry."""

U32 = npt.NDArray[np.uint32]


class RingUnavailable(Exception):
    """This system has no io_uring for us; the text says why."""


class UringEngine:
    """Reads with up to ``depth`` requests in flight.  One caller at a time."""

    def __init__(self, files: Sequence[int], depth: int) -> None:
        """``files``: descriptors.  Raises `RingUnavailable`."""
        self._depth = depth
        self._ring = _Ring(depth)
        self._batches: dict[int, ReadBatch] = {}
        self._waiting: deque[tuple[int, int]] = deque()
        """Batch and the first of its requests that has not been handed over."""
        self._next_number = 0
        try:
            self._ring.register_files(files)
        except BaseException:
            self._ring.close()
            raise

    def submit(self, batch: ReadBatch) -> None:
        """See `pi2.memory.io_engine.IoEngine`."""
        if len(batch.firsts) == 0:
            return
        number = self._next_number
        self._next_number = (number + 1) % 2**31
        self._batches[number] = batch
        self._waiting.append((number, 0))
        self._enter(0)

    def advance(self) -> None:
        """See `pi2.memory.io_engine.IoEngine`."""
        if self._waiting:
            self._reap()
            if self._queue():
                self._ring.enter(0)

    def wait(self, batch: ReadBatch, part: int) -> None:
        """See `pi2.memory.io_engine.IoEngine`."""
        self._wait(batch, batch.parts[part])

    def _wait(self, batch: ReadBatch, part: slice) -> None:
        # What is over by now needs no system call.
        self._reap()
        # Others' requests may be among those that end: then go round again.
        while pending := batch.count_pending(part):
            if not self._waiting and not self._ring.in_flight:
                # An interrupt came while they were being queued: they never will be.
                results = batch.results[part]
                results[results == PENDING] = -errno.ECANCELED
                return
            self._enter(pending)

    def abandon(self, batch: ReadBatch) -> None:
        """See `pi2.memory.io_engine.IoEngine`."""
        for entry in list(self._waiting):
            number, first = entry
            if self._batches[number] is batch:
                self._waiting.remove(entry)
                batch.results[first:] = -errno.ECANCELED
                if not batch.count_pending():
                    del self._batches[number]
        self._wait(batch, slice(None))

    def _enter(self, least: int) -> None:
        """Hand over what has room, wait for ``least`` completions, and take note of all."""
        self._queue()
        self._ring.enter(min(least, self._ring.in_flight))
        self._reap()
        while self._waiting and self._queue():
            self._ring.enter(0)
            self._reap()

    def _queue(self) -> bool:
        """Write entries for waiting requests, as many as the depth allows; whether there are any.

        What waits is noted before entries are written: an interrupt in between loses requests, the
        other way round it would repeat them, into slots that by then are others'.
        """
        queued = False
        while self._waiting and (room := self._depth - self._ring.in_flight) > 0:
            number, first = self._waiting[0]
            batch = self._batches[number]
            count = min(len(batch.firsts) - first, room)
            chosen = slice(first, first + count)
            entries = np.zeros((count, _ENTRY_WORDS), np.int64)
            entries[:, 0] = _READV | _FIXED_FILE | batch.file << 32
            entries[:, 1] = batch.offsets[chosen]
            entries[:, 2] = batch.vectors.ctypes.data + 16 * batch.firsts[chosen].astype(np.int64)
            entries[:, 3] = batch.counts[chosen]
            entries[:, 4] = (number << 32) + np.arange(first, first + count)
            if first + count == len(batch.firsts):
                self._waiting.popleft()
            else:
                self._waiting[0] = (number, first + count)
            self._ring.push(entries)
            queued = True
        return queued

    def _reap(self) -> None:
        """Note results.  Completions are taken off the ring at the end: after an interrupt they
        are noted again."""
        names, results = self._ring.peek()
        if len(names) == 0:
            return
        numbers, requests = names >> 32, names & 0xFFFFFFFF
        for number in np.unique(numbers).tolist():
            batch = self._batches.get(number)
            if batch is None:
                continue
            mine = numbers == number
            batch.results[requests[mine]] = results[mine]
            if not batch.count_pending():
                del self._batches[number]
        self._ring.advance(len(names))

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
        parameters = ctypes.create_string_buffer(_PARAMETERS_BYTES)
        try:
            self._fd = self._call(_SETUP, depth, parameters)
        except OSError as error:
            raise RingUnavailable(_explain_refusal(error)) from None
        try:
            self._map(parameters.raw)
        except BaseException:
            os.close(self._fd)
            raise

    def _map(self, parameters: bytes) -> None:
        entries, completions = struct.unpack_from("2I", parameters)
        features = struct.unpack_from("I", parameters, 20)[0]
        if not features & _SINGLE_MAP:
            raise RingUnavailable("the kernel's io_uring is older than Linux 5.4")
        head, tail, mask, _, _, _, array = struct.unpack_from("7I", parameters, _SQ_OFFSETS)
        done_head, done_tail, done_mask, _, _, events = struct.unpack_from(
            "6I", parameters, _CQ_OFFSETS
        )
        size = max(array + 4 * entries, events + 16 * completions)
        self._rings = mmap.mmap(self._fd, size, flags=mmap.MAP_SHARED, offset=_RINGS)
        self._table = mmap.mmap(self._fd, 64 * entries, flags=mmap.MAP_SHARED, offset=_ENTRIES)
        self._head, self._tail = self._view(head, 1), self._view(tail, 1)
        self._mask = int(self._view(mask, 1)[0])
        self._done_head, self._done_tail = self._view(done_head, 1), self._view(done_tail, 1)
        self._done_mask = int(self._view(done_mask, 1)[0])
        self._view(array, entries)[:] = np.arange(entries)
        self._entries: I64 = np.frombuffer(self._table, np.int64).reshape(entries, _ENTRY_WORDS)
        raw = np.frombuffer(self._rings, np.uint8, 16 * completions, events)
        self._events: I64 = raw.view(np.int64).reshape(completions, 2)

    def _view(self, offset: int, count: int) -> U32:
        return np.frombuffer(self._rings, np.uint32, count, offset)

    def register_files(self, files: Sequence[int]) -> None:
        """Let entries name ``files`` by their numbers."""
        if not files:
            return
        table = (ctypes.c_int * len(files))(*files)
        try:
            self._call(_REGISTER, self._fd, _REGISTER_FILES, table, len(files))
        except OSError as error:
            raise RingUnavailable(_explain_refusal(error)) from None

    def push(self, entries: I64) -> None:
        """Write ``entries`` [n, 8]; there is room for as many as the depth."""
        tail = int(self._tail[0])
        places = (np.arange(tail, tail + len(entries)) & 0xFFFFFFFF) & self._mask
        self._entries[places] = entries
        # The system call that follows makes the kernel see entries before the tail.
        self._tail[0] = (tail + len(entries)) & 0xFFFFFFFF

    @property
    def in_flight(self) -> int:
        """Entries whose completions have not been taken, handed over or not."""
        return (int(self._tail[0]) - int(self._done_head[0])) & 0xFFFFFFFF

    def enter(self, least: int) -> None:
        """Hand over all entries and wait for ``least`` completions."""
        while True:
            # The ring knows what was handed over, also after an interrupt.
            queued = (int(self._tail[0]) - int(self._head[0])) & 0xFFFFFFFF
            if not queued and not least:
                return
            try:
                self._call(_ENTER, self._fd, queued, least, _GET_EVENTS, None, 0)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.EAGAIN, errno.EBUSY):
                    continue
                raise
            if int(self._tail[0]) == int(self._head[0]):
                return

    def peek(self) -> tuple[I64, I64]:
        """All completions: their names [n], and results [n]."""
        head, tail = int(self._done_head[0]), int(self._done_tail[0])
        count = (tail - head) & 0xFFFFFFFF
        places = (np.arange(head, head + count) & 0xFFFFFFFF) & self._done_mask
        events = self._events[places]
        results = events[:, 1].astype(np.int32).astype(np.int64)
        return events[:, 0], results

    def advance(self, count: int) -> None:
        """Take ``count`` completions off the ring."""
        self._done_head[0] = (int(self._done_head[0]) + count) & 0xFFFFFFFF

    def _call(self, number: int, *arguments: object) -> int:
        words = (ctypes.c_long(item) if isinstance(item, int) else item for item in arguments)
        result: int = self._system_call(ctypes.c_long(number), *words)
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return result

    def close(self) -> None:
        """Let go of the ring."""
        os.close(self._fd)


def _explain_refusal(error: OSError) -> str:
    match error.errno:
        case errno.ENOSYS:
            return "the kernel has no io_uring"
        case errno.EPERM | errno.EACCES:
            return "the system forbids io_uring (kernel.io_uring_disabled, or a container's rules)"
        case errno.ENOMEM:
            return "there is no memory for io_uring's rings (limit on locked memory)"
    return f"io_uring cannot be set up: {error.strerror}"
