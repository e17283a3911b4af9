"""A ring of io_uring: its memory as arrays, and the system calls that set it up and drive it.

Rings and their offsets: include/uapi/linux/io_uring.h and the manual page io_uring(7) of liburing.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import struct
import sys
from collections.abc import Sequence

import numpy as np

from pi2.arrays import I64, U32
from pi2.backends.host.contract import RingControl
from pi2.memory.requests import PENDING

_SETUP, _ENTER, _REGISTER = 425, 426, 427
"""System calls: the same numbers on x86-64 and aarch64."""
_SYSTEM_CALL_WORDS = 7
"""Its number, and six arguments at most."""
_REGISTER_FILES = 2
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
ENTRY_WORDS = 8
"""64-bit words of an entry."""
_WORD = 0xFFFFFFFF


class RingUnavailable(Exception):
    """This system has no io_uring for us; the text says why."""


class Ring:
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
            self._map(depth, parameters)
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
        raw = np.frombuffer(rings, np.uint8, 16 * completions, events)
        self._events: I64 = raw.view(np.int64).reshape(completions, 2)
        """Ring of completions: names, and results in the lower halves of the second words."""
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
        places = (head, tail, flags, done_head, done_tail)
        self._head, self._tail, self._flags, self._done_head, self._done_tail = (
            place // 4 for place in places
        )

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

    def drive(self, pool: I64, results: I64, begin: int, end: int) -> int:
        """Hand over, note and wait as `pi2.backends.host.contract.HostLoops.drive_ring` does;
        return how many are still pending."""
        words, control = self._words, self.control
        self._note(results)
        hidden = self._is_deferred and bool(words[self._flags] & _HAS_COMPLETIONS)
        while True:
            pending = int(np.count_nonzero(results[begin:end] == PENDING))
            room = int(control[RingControl.DEPTH]) - self.in_flight
            if room > 0 and (pending or room >= control[RingControl.LEAST_ROOM]):
                self._push(pool, room)
            # The ring knows what was handed over, also after an interrupt.
            queued = (words[self._tail] - words[self._head]) & _WORD
            least = min(pending, self.in_flight)
            if not queued and not least and not hidden:
                return pending
            known = words[self._done_tail]
            self.enter(least)
            # The flag tells nothing of what a call leaves over: how many it has noted does.
            noted = (words[self._done_tail] - known) & _WORD
            hidden = self._is_deferred and noted >= _NOTED_A_CALL
            self._note(results)

    def _push(self, pool: I64, room: int) -> None:
        """Write entries that wait into the ring, up to ``room`` of them, but for those that were
        given up."""
        control, tail = self.control, self._words[self._tail]
        handed, named = control[: RingControl.HANDED_OVER + 1].tolist()[::-1]
        taken = pool.take(np.arange(handed, named) & (len(pool) - 1), axis=0)
        (valid,) = taken[:, 0].nonzero()
        valid = valid[:room]
        end = handed + int(valid[-1]) + 1 if len(valid) == room else named
        self.slots[(tail + np.arange(len(valid))) % len(self.slots)] = taken[valid]
        # What is handed over is noted before the ring's tail: an interrupt in between loses
        # requests, the other way round it would repeat them, into slots that by then are others'.
        control[RingControl.HANDED_OVER] = end
        # The system call that follows makes the kernel see entries before the tail.
        self._words[self._tail] = (tail + len(valid)) & _WORD

    def _note(self, results: I64) -> None:
        """Note results.  Completions are taken off the ring at the end: after an interrupt they
        are noted again."""
        words = self._words
        head, tail = words[self._done_head], words[self._done_tail]
        count = (tail - head) & _WORD
        taken = self._events.take((head + np.arange(count)) % len(self._events), axis=0)
        results[taken[:, 0] & (len(results) - 1)] = taken.view(np.int32)[:, 2]
        words[self._done_head] = tail

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
