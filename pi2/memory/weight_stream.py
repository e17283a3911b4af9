"""Weights that every step needs and memory has no room for: read in order, round and round, ahead
of their use, into a ring of slots.

The reads of the next step begin while this one still computes: the drive never waits for a token.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from pi2.arrays import U8
from pi2.diagnostics import UserError
from pi2.memory.bundle_files import ReadObserver
from pi2.memory.io_engine import EngineName
from pi2.plan.weights.layout import round_up

BLOCK = 4096
"""Reads past the page cache begin and end at multiples of it."""
READERS = 3
"""Threads that read: reads of 1 MiB that are under way at a time."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a file that is read at once."""

    file: int
    offset: int
    """First byte; need not be aligned."""
    size: int
    """Bytes."""

    @property
    def aligned(self) -> tuple[int, int]:
        """First byte and length of the aligned range around it."""
        first = self.offset // BLOCK * BLOCK
        return first, round_up(self.offset + self.size - first, BLOCK)


def count_slot_bytes(size: int) -> int:
    """Bytes of a slot for pieces of ``size``: the aligned range around one, wherever it begins."""
    return round_up(size, BLOCK) + BLOCK


class DirectFiles:
    """Files that are read past the page cache, or through it where that is refused."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self.fallback: str | None = None
        """Why the page cache is used, if it is."""
        self._open: list[int] = []
        for path in paths:
            self._open.append(self._open_file(path))

    @property
    def descriptors(self) -> Sequence[int]:
        """Of the open files."""
        return self._open

    def _open_file(self, path: Path) -> int:
        direct = getattr(os, "O_DIRECT", 0)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | direct)
        except OSError as error:
            self.fallback = f"{path.name}: {error.strerror}"
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return descriptor

    def read(self, piece: Piece, buffer: memoryview) -> int:
        """Read the aligned range around ``piece`` into ``buffer``, whose memory is aligned; return
        the place of its first byte there.  UserError P532 where the file ends before."""
        first, length = piece.aligned
        descriptor, done = self._open[piece.file], 0
        needed = piece.offset + piece.size - first
        while done < needed:
            count = os.preadv(descriptor, [buffer[done:length]], first + done)
            if count <= 0:
                raise UserError.of(
                    "P532",
                    f"cannot read {self.paths[piece.file]}: it was cut while it was in use",
                    help="restore the file, and load the model again",
                )
            done += count
        if self.fallback is not None and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, first, length, os.POSIX_FADV_DONTNEED)
        return piece.offset - first

    def close(self) -> None:
        while self._open:
            os.close(self._open.pop())


class Counts(Protocol):
    """What a model that reads says of it."""

    @property
    def read_bytes(self) -> int:
        """Bytes that were read so far, loading not included."""

    @property
    def waited_s(self) -> float:
        """Seconds in which computing has waited for reads."""


class ExpertCounts(Protocol):
    """What a cache of experts says of it."""

    engine: EngineName
    engine_fallback: str | None

    @property
    def counters(self) -> tuple[int, int, int]:
        """Experts that were in memory when they were needed, that were not, and that made room."""


class FileReads:
    """What a run says of its reads, as `pi2.memory.flash.FlashReader` does of those of neurons."""

    engine: EngineName = "pread"
    engine_fallback: str | None = None
    phases_fallback: str | None = None

    gate_reads = 0
    saved_bytes = 0

    def __init__(self, files: DirectFiles, counts: Counts, slots: ExpertCounts | None) -> None:
        self.fallback = files.fallback
        self._counts, self._slots = counts, slots
        if slots is not None:
            self.engine, self.engine_fallback = slots.engine, slots.engine_fallback

    @property
    def read_bytes(self) -> int:
        """Bytes that were read so far, loading not included."""
        return self._counts.read_bytes

    @property
    def waited_s(self) -> float:
        """Seconds in which computing has waited for reads."""
        return self._counts.waited_s

    @property
    def experts(self) -> tuple[int, int, int]:
        """Experts that were in memory when they were needed, that were not, and that made room."""
        return (0, 0, 0) if self._slots is None else self._slots.counters

    def observe(self, observer: ReadObserver | None) -> None:
        """Single reads are not told of."""


class WeightStream:
    """Reads ``pieces`` in their order, again and again, into slots of ``region``.

    Piece number n of all that are ever read is ``pieces[n % len(pieces)]``.  `take` and `release`
    are called with 0, 1, 2 and so on, by one thread.
    """

    def __init__(self, files: DirectFiles, pieces: Sequence[Piece], region: U8) -> None:
        assert pieces and region.ctypes.data % BLOCK == 0
        self._files, self._pieces = files, pieces
        self._slot_bytes = max(length for _, length in (piece.aligned for piece in pieces))
        self.slots = len(region) // self._slot_bytes
        assert self.slots >= 2, "a ring has two slots at least"
        self._region = region
        self._view = memoryview(region)  # type: ignore[arg-type] # numpy has buffers
        self._address = region.ctypes.data
        self._next = 0
        """Number of the piece that is read next."""
        self._released = 0
        """Pieces whose slots may be filled again."""
        self._places: dict[int, int] = {}
        """Where the first byte of each piece lies that has arrived."""
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._is_closed = False
        self.read_bytes = 0
        """Bytes of pieces that have arrived."""
        self.waited_s = 0.0
        """Seconds in which `take` has waited."""
        self._threads = [
            threading.Thread(target=self._read, name=f"pi2-stream-{number}", daemon=True)
            for number in range(min(READERS, self.slots - 1))
        ]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        while True:
            with self._changed:
                while self._next >= self._released + self.slots and not self._is_closed:
                    self._changed.wait()
                if self._is_closed or self._error is not None:
                    return
                number, self._next = self._next, self._next + 1
            piece = self._pieces[number % len(self._pieces)]
            start = number % self.slots * self._slot_bytes
            try:
                place = self._files.read(piece, self._view[start : start + self._slot_bytes])
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._places[number] = start + place
                self.read_bytes += piece.size
                self._changed.notify_all()

    def take(self, number: int) -> int:
        """Address of piece ``number``, once it has arrived; valid until it is released.

        Raises what the read raised.
        """
        with self._changed:
            if number not in self._places:
                from time import perf_counter

                start = perf_counter()
                while number not in self._places and self._error is None:
                    self._changed.wait()
                self.waited_s += perf_counter() - start
            if self._error is not None and number not in self._places:
                raise self._error
            return self._address + self._places[number]

    def release(self, number: int) -> None:
        """Let the slot of piece ``number``, and of all before it, be filled again."""
        with self._changed:
            for old in range(self._released, number + 1):
                self._places.pop(old, None)
            self._released = max(self._released, number + 1)
            self._changed.notify_all()

    def close(self) -> None:
        """End the reads."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()


def load_ranges(
    files: DirectFiles, ranges: Sequence[tuple[Piece, U8]], piece_bytes: int = 4 << 20
) -> None:
    """Read whole ranges of files into arrays of their sizes, in pieces, on several threads."""
    work = [
        (
            Piece(whole.file, whole.offset + first, min(piece_bytes, whole.size - first)),
            target,
            first,
        )
        for whole, target in ranges
        for first in range(0, whole.size, piece_bytes)
    ]
    place, lock, failed = iter(work), threading.Lock(), list[BaseException]()

    def read() -> None:
        staging = mmap.mmap(-1, count_slot_bytes(piece_bytes))
        view, array = memoryview(staging), np.frombuffer(staging, np.uint8)
        while not failed:
            with lock:
                item = next(place, None)
            if item is None:
                return
            piece, target, first = item
            try:
                begin = files.read(piece, view)
            except BaseException as error:
                failed.append(error)
                return
            target[first : first + piece.size] = array[begin : begin + piece.size]

    threads = [threading.Thread(target=read, name=f"pi2-load-{n}") for n in range(READERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
