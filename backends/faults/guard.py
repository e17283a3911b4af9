"""Keeps a process alive whose mapped files are cut, or lie on a disk that fails."""

from __future__ import annotations

import ctypes
import json
import mmap
import platform
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from pi2.backends.compiler.cache import load_or_compile
from pi2.diagnostics import UserError
from pi2.progress import Progress, ignore_progress

RANGES = 256
"""Mapped files at the same time; more are not guarded."""
_WITH_FACTS, _ON_OWN_STACK = 4, 0x08000000
"""SA_SIGINFO and SA_ONSTACK (asm-generic/signal-defs.h of Linux)."""
_COLUMNS = 4


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """The handler is the same for all processors of an architecture."""

    program: ClassVar[str] = "pi2.backends.faults.program"

    def to_json(self) -> str:
        return json.dumps({"architecture": platform.machine()})


class _Action(ctypes.Structure):
    """``struct sigaction`` of the C library."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_uint8 * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


class FaultGuard:
    """Lets threads read zeros where a mapped file has no page any more, and counts these faults."""

    def __init__(self, progress: Progress = ignore_progress) -> None:
        """Install the handler; raises `UserError` as `load_or_compile` does."""
        library = ctypes.CDLL(str(load_or_compile(FaultSpec(), progress)))
        table = (ctypes.c_int64 * (RANGES * _COLUMNS)).in_dll(library, "pi2_ranges")
        self._table = table
        ctypes.c_int64.in_dll(library, "pi2_page").value = mmap.PAGESIZE
        handler = ctypes.cast(library.pi2_note_fault, ctypes.c_void_p).value
        action = _Action(handler=handler, flags=_WITH_FACTS | _ON_OWN_STACK)
        before = (ctypes.c_uint8 * 256).in_dll(library, "pi2_before")
        ctypes.CDLL(None).sigaction(int(signal.SIGBUS), ctypes.byref(action), ctypes.byref(before))

    def watch(self, address: int, size: int) -> int | None:
        """Guard a mapped file; the number of its range, or None where all are in use."""
        for number in range(RANGES):
            place = number * _COLUMNS
            if not self._table[place + 1]:
                self._table[place : place + _COLUMNS] = [address, 0, 0, 0]
                self._table[place + 1] = address + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
                return number
        return None

    def find_fault(self, number: int) -> int | None:
        """Byte of the file at which a thread first found no page; None if none did."""
        first, _, faults, address = self._table[number * _COLUMNS : (number + 1) * _COLUMNS]
        return address - first if faults else None

    def forget(self, number: int) -> None:
        """Guard a range no longer; call it before the range is mapped no longer."""
        self._table[number * _COLUMNS + 1] = 0


@cache
def find_guard() -> FaultGuard | None:
    """The guard of this process; None without Linux, or where nothing can be compiled."""
    if sys.platform != "linux":
        return None
    with suppress(UserError):
        return FaultGuard()
    return None
