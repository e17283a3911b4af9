"""Ends work that makes no progress because memory is short: its pages go out as they come in."""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from pi2.arrays import U8
from pi2.backends.compiler.cache import load_or_compile
from pi2.backends.faults.guard import FaultSpec
from pi2.diagnostics import UserError
from pi2.progress import ignore_progress

STALL_S = 10
"""Seconds without progress that are a stall, if memory was short meanwhile."""
LEAST_FAULTS = 256
"""Pages that were read from disk meanwhile, at least, while memory grew by less than half of them:
others went out."""
MOST_REGIONS = 512
_TICKS_S = 4
_STATUS = 2
_PROGRESS, _WORKS, _STOPS, _LIMIT, _IS_SHORT, _NOTICED, _TEXT, _LENGTH, _CODE = range(9)
_WAKES, _STATM, _REGIONS = 9, 10, 12


class MemoryWatch:
    """Watches one model's work in a thread that needs no page of Python's.

    Ten seconds without progress, in which pages came in and memory did not grow, are a shortage.
    The weights' memory is then given back, which lets the work end, and `check` raises the error.
    A process that does not get there in ten more seconds ends with the error's text and exit
    status 2."""

    def __init__(self, describe: Callable[[], UserError]) -> None:
        """``describe`` makes the error, now for its text, and when it is raised."""
        self._describe = describe
        self._state = (ctypes.c_int64 * (_REGIONS + 1 + 2 * MOST_REGIONS))()
        self._text = ctypes.create_string_buffer(f"{describe()}\n".encode())
        self._state[_TEXT] = ctypes.addressof(self._text)
        self._state[_LENGTH], self._state[_CODE] = len(self._text) - 1, _STATUS
        self._state[_LIMIT] = LEAST_FAULTS
        self._thread: threading.Thread | None = None
        library = _find_library()
        if library is None:
            return
        self._state[_STATM] = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._wakes = os.eventfd(0)
        self._state[_WAKES] = self._wakes | select.POLLIN << 32
        _lock_pages(ctypes.addressof(self._state), ctypes.sizeof(self._state))
        _lock_pages(ctypes.addressof(self._text), len(self._text))
        self._thread = threading.Thread(
            target=self._run, args=(library,), name="pi2-memory", daemon=True
        )
        self._thread.start()

    def _run(self, library: ctypes.CDLL) -> None:
        room = ctypes.c_int64()
        # Of the stack, about where the compiled function will be.
        _lock_pages(ctypes.addressof(room), 1)
        watch = library.pi2_watch_memory
        watch.argtypes, watch.restype = [ctypes.c_void_p, ctypes.c_int64], None
        watch(ctypes.addressof(self._state), STALL_S * _TICKS_S)

    def protect(self, regions: Sequence[U8]) -> None:
        """Name the memory that is given back in a shortage; it is then full of zeros."""
        found = []
        for region in regions:
            first = -(-region.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (region.ctypes.data + region.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if end > first:
                found.append((first, end - first))
        self._state[_REGIONS] = 0
        for number, (first, size) in enumerate(found[:MOST_REGIONS]):
            self._state[_REGIONS + 1 + 2 * number] = first
            self._state[_REGIONS + 2 + 2 * number] = size
        self._state[_REGIONS] = min(len(found), MOST_REGIONS)

    def note(self) -> None:
        """Note that the work goes on."""
        self._state[_PROGRESS] += 1

    @property
    def error(self) -> UserError | None:
        """What `check` raises, once memory is too short."""
        return self._describe() if self._state[_IS_SHORT] else None

    def check(self) -> None:
        """Note that the work goes on; raises the error if memory was too short for it."""
        self._state[_PROGRESS] += 1
        if self._state[_IS_SHORT]:
            self._state[_NOTICED] = 1
            raise self._describe()

    @contextmanager
    def work(self) -> Iterator[None]:
        """Watch while work is under way."""
        self.note()
        before = self._state[_WORKS]
        self._state[_WORKS] = 1
        try:
            yield
        finally:
            self._state[_WORKS] = before

    def close(self) -> None:
        """End the thread; call it before the regions are given back."""
        self._state[_STOPS] = 1
        self._state[_REGIONS] = 0
        if self._thread is not None:
            os.eventfd_write(self._wakes, 1)
            self._thread.join()
            os.close(self._state[_STATM])
            os.close(self._wakes)
            self._thread = None


@cache
def _find_library() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    with suppress(UserError):
        path = load_or_compile(FaultSpec(), ignore_progress)
        library = ctypes.CDLL(str(path))
        libc = ctypes.CDLL(None)
        for first, size in _list_maps(str(path)):
            _lock_pages(first, size)
        for name in ("poll", "getrusage", "pread", "mmap", "write"):
            place = ctypes.cast(getattr(libc, name), ctypes.c_void_p).value
            _lock_pages(place or 0, 1)
        return library
    return None


def _lock_pages(address: int, size: int) -> None:
    """Keep pages in memory, if the system allows it."""
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    length = address + size - first
    ctypes.CDLL(None).mlock(ctypes.c_void_p(first), ctypes.c_size_t(length))


def _list_maps(path: str) -> list[tuple[int, int]]:
    """Address and bytes of a file's mapped parts."""
    found = []
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text("utf-8", "replace").splitlines():
            words = line.split(maxsplit=5)
            if len(words) == 6 and words[5] == path:
                first, end = (int(part, 16) for part in words[0].split("-"))
                found.append((first, end - first))
    return found
