"""Files that are read past the page cache: single ranges, or batches of an engine's reads."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from pi2.arrays import U8
from pi2.caches import open_regular
from pi2.diagnostics import UserError
from pi2.memory.bulk_load import PIECE_BYTES, Batch, BulkLoad, Job, cut_rows
from pi2.memory.io_engine import EngineName, IoEngine, ReadBatch
from pi2.memory.uring import EngineSettings, open_engine
from pi2.plan.weights.layout import round_up
from pi2.progress import Progress, ignore_progress
from pi2.reads import is_direct, leave_direct, read_at, refuse_cut, refuse_weights

if TYPE_CHECKING:
    from pi2.memory.bundle_files import ReadObserver
    from pi2.memory.host_loops import HostLoops

BLOCK = 4096
"""Reads past the page cache begin and end at multiples of it."""


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


Refuse = Callable[[Path, int, OSError | None], UserError]
"""Makes the error for a byte of a file that cannot be read; without a reason, the file ends
before."""


def refuse_file(path: Path, offset: int, error: OSError | None) -> UserError:
    return refuse_cut(path) if error is None else refuse_weights(path, offset, error)


class DirectFiles:
    """Files that are read past the page cache, or through it where that is refused."""

    engine: EngineName = "pread"
    engine_fallback: str | None = None
    """What reads batches, and why it is not what the plan says."""

    def __init__(
        self, paths: Sequence[Path], *, direct: bool = True, refuse: Refuse = refuse_file
    ) -> None:
        self.paths, self._refuse = paths, refuse
        self.fallback: str | None = None
        """Why the page cache is used, if it is."""
        self.descriptors: list[int] = []
        self._room = threading.local()
        try:
            for path in paths:
                self.descriptors.append(self._open(path, direct))
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path, direct: bool) -> int:
        flag = getattr(os, "O_DIRECT", 0) if direct else 0
        if flag:
            try:
                return open_regular(path, flag)
            except OSError as error:
                self.fallback = f"{path.name}: {error.strerror}"
        elif direct:
            self.fallback = "this system has no O_DIRECT"
        try:
            return open_regular(path)
        except OSError as error:
            raise self._refuse(path, 0, error) from None

    def leave_direct(self, number: int, reason: str) -> None:
        """Read file ``number`` through the page cache from now on."""
        leave_direct(self.descriptors[number])
        self.fallback = reason

    def open_engine(
        self, settings: EngineSettings, loops: HostLoops, *, has_one_caller: bool = True
    ) -> IoEngine:
        """Open what reads batches; see `pi2.memory.uring.open_engine`."""
        engine, self.engine, self.engine_fallback = open_engine(
            settings, self.descriptors, loops, has_one_caller=has_one_caller
        )
        return engine

    def read(self, file: int, room: memoryview, offset: int, least: int) -> None:
        """Read from byte ``offset`` of a file until ``room`` has ``least`` bytes.  By default
        UserError P532 where the file ends before, P546 where the disk fails."""
        descriptor, path = self.descriptors[file], self.paths[file]
        was_direct = is_direct(descriptor)
        try:
            done = read_at(descriptor, room, offset, least)
        except OSError as error:
            raise self._refuse(path, offset, error) from None
        if done < least:
            raise self._refuse(path, offset + done, None)
        if was_direct and not is_direct(descriptor):
            self.fallback = f"{path.name}: direct reads are refused"

    def load(self, piece: Piece, target: U8) -> None:
        """Read a piece of `PIECE_BYTES` at most into its ``target``, in any thread."""
        room = getattr(self._room, "bytes", None)
        if room is None:
            room = self._room.bytes = mmap.mmap(-1, count_slot_bytes(PIECE_BYTES))
        first, length = piece.aligned
        begin = piece.offset - first
        self.read(piece.file, memoryview(room)[:length], first, begin + piece.size)
        self.drop_cached(piece)
        target[:] = np.frombuffer(room, np.uint8, piece.size, begin)

    def drop_cached(self, piece: Piece) -> None:
        """Forget what the page cache has of ``piece``, where it is not passed by."""
        if self.fallback is not None and hasattr(os, "posix_fadvise"):
            first, length = piece.aligned
            os.posix_fadvise(self.descriptors[piece.file], first, length, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())


class BatchReads:
    """Batches of reads of ``files`` by an engine, which is closed with it.  One calling thread."""

    def __init__(self, files: DirectFiles, engine: IoEngine) -> None:
        self.files, self.engine = files, engine
        self.read_bytes = 0
        """Bytes of requests that were waited for."""
        self.waited_s = 0.0
        """Seconds in which `finish` has waited."""
        self.observer: ReadObserver | None = None

    def submit(self, batch: ReadBatch) -> None:
        if self.observer is not None:
            batch.submitted_s = perf_counter()
        try:
            self.engine.submit(batch)
        except BaseException:
            self.engine.abandon(batch)
            raise

    def finish(self, batch: ReadBatch, part: int = 0, count: int = 1) -> None:
        """Wait for ``count`` parts of a batch from ``part`` on, and read again what the engine has
        left; raises as `DirectFiles.read` does."""
        start = perf_counter()
        self.engine.wait(batch, part, count)
        end_s = perf_counter()
        self.waited_s += end_s - start
        begin, end = batch.parts[part].start, batch.parts[part + count - 1].stop
        sizes = batch.sizes[begin:end]
        # Methods of arrays that reduce them are Python, several times as slow as this.
        failed = (batch.results[begin:end] < sizes).tobytes()
        if 1 in failed:
            for number in range(begin, end):
                if failed[number - begin]:
                    self._read_again(batch, number)
        size = int(np.add.reduce(sizes))
        self.read_bytes += size
        if self.observer is not None:
            self.observer.note_reads(batch, size, start, end_s)

    def _read_again(self, batch: ReadBatch, number: int) -> None:
        """Read a request that was interrupted, or whose file is shorter than it was."""
        first, count = int(batch.firsts[number]), int(batch.counts[number])
        offset, left = int(batch.offsets[number]), int(batch.sizes[number])
        for address, length in batch.vectors[first : first + count].tolist():
            room = memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B")
            self.files.read(batch.file, room, offset, min(length, left))
            offset, left = offset + length, left - length

    def close(self) -> None:
        """Wait for reads under way."""
        self.engine.close()


class FileReads:
    """Counters of its reads, as `pi2.memory.flash.FlashReader` has them for neurons."""

    phases_fallback: str | None = None
    saved_bytes = 0

    def __init__(
        self, files: DirectFiles, readers: Sequence[BatchReads], count: Callable[[], int]
    ) -> None:
        """``count``: bytes that ``readers`` and others have read, loading not included."""
        self._files, self._readers, self._count = files, readers, count
        self.engine, self.engine_fallback = files.engine, files.engine_fallback

    @property
    def fallback(self) -> str | None:
        """Why the page cache is used, if it is."""
        return self._files.fallback

    @property
    def read_bytes(self) -> int:
        return self._count()

    def observe(self, observer: ReadObserver | None) -> None:
        """Tell ``observer`` of reads from now on; None ends it."""
        for reader in self._readers:
            reader.observer = observer


def load_ranges(
    files: DirectFiles, ranges: Sequence[tuple[Piece, U8]], progress: Progress = ignore_progress
) -> None:
    """Read whole ranges of files into arrays of their sizes."""
    jobs = []
    for whole, target in ranges:
        for rows in cut_rows(whole.size, 1):
            piece = Piece(whole.file, whole.offset + rows.start, rows.stop - rows.start)
            jobs.append(Job(partial(files.load, piece, target[rows]), piece.size, target[rows]))
    with closing(BulkLoad(progress)) as load:
        batch = Batch(load)
        batch.add(jobs)
        batch.finish()
