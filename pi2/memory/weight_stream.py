"""Weights that every step needs and memory has no room for: read in order, round and round, ahead
of their use, into a ring of slots.

The reads of the next step begin while this one still computes: the drive never waits for a token.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pi2.arrays import U8
from pi2.memory.bulk_load import PIECE_BYTES, Batch, BulkLoad, Job, cut_rows
from pi2.memory.io_engine import PENDING, EngineName, IoEngine, ReadBatch, make_reads
from pi2.memory.uring import EngineSettings, open_engine
from pi2.plan.weights.layout import round_up
from pi2.progress import Progress, ignore_progress
from pi2.reads import is_direct, read_at, refuse_cut, refuse_weights

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


class DirectFiles:
    """Files that are read past the page cache, or through it where that is refused."""

    engine: EngineName = "pread"
    engine_fallback: str | None = None
    """What reads ahead, and why it is not what the plan says."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self.fallback: str | None = None
        """Why the page cache is used, if it is."""
        self._open: list[int] = []
        self._room = threading.local()
        for path in paths:
            self._open.append(self._open_file(path))

    @property
    def descriptors(self) -> Sequence[int]:
        return self._open

    def _open_file(self, path: Path) -> int:
        direct = getattr(os, "O_DIRECT", 0)
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC | direct)
        except OSError as error:
            self.fallback = f"{path.name}: {error.strerror}"
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise refuse_weights(path, 0, error) from None

    def open_engine(
        self, settings: EngineSettings, loops: HostLoops, *, has_one_caller: bool = True
    ) -> IoEngine:
        """Open what reads ahead from the files; see `pi2.memory.uring.open_engine`."""
        engine, self.engine, self.engine_fallback = open_engine(
            settings, self._open, loops, has_one_caller=has_one_caller
        )
        return engine

    def read(self, piece: Piece, buffer: memoryview) -> int:
        """Read the aligned range around ``piece`` into ``buffer``, whose memory is aligned; return
        the place of its first byte there.  UserError P532 where the file ends before, P546 where
        the disk fails."""
        first, length = piece.aligned
        descriptor, path = self._open[piece.file], self.paths[piece.file]
        needed, was_direct = piece.offset + piece.size - first, is_direct(descriptor)
        try:
            done = read_at(descriptor, buffer[:length], first, needed)
        except OSError as error:
            raise refuse_weights(path, first, error) from None
        if done < needed:
            raise refuse_cut(path)
        if was_direct and not is_direct(descriptor):
            self.fallback = f"{path.name}: direct reads are refused"
        self.drop_cached(piece)
        return piece.offset - first

    def load(self, piece: Piece, target: U8) -> None:
        """Read a piece of `PIECE_BYTES` at most into its ``target``, in any thread."""
        room = getattr(self._room, "bytes", None)
        if room is None:
            room = self._room.bytes = mmap.mmap(-1, count_slot_bytes(PIECE_BYTES))
        begin = self.read(piece, memoryview(room))
        target[:] = np.frombuffer(room, np.uint8, piece.size, begin)

    def drop_cached(self, piece: Piece) -> None:
        """Forget what the page cache has of ``piece``, where it is not passed by."""
        if self.fallback is not None and hasattr(os, "posix_fadvise"):
            first, length = piece.aligned
            os.posix_fadvise(self._open[piece.file], first, length, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        while self._open:
            os.close(self._open.pop())


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates measured while a model was loaded, bytes per second."""

    disk: float
    """Of the reads of streamed weights; computing them may have been slower."""
    computing: float
    """Of computing weights that are in memory."""

    def expect(self, streamed: int, whole: int) -> Expected:
        """The speed of tokens that read ``streamed`` of ``whole`` bytes from disk."""
        reads, computing = streamed / self.disk, whole / self.computing
        return Expected(1 / max(reads, computing), reads >= computing, self.disk)


class Expected(NamedTuple):
    """What a run whose weights stream will be like."""

    tokens_s: float
    """Tokens per second without drafts."""
    is_disk: bool
    """Whether the disk bounds them, not computing."""
    disk_bytes_s: float


class FileReads:
    """Counters of its reads, as `pi2.memory.flash.FlashReader` has them for neurons."""

    phases_fallback: str | None = None
    saved_bytes = 0

    def __init__(self, files: DirectFiles, count: Callable[[], int]) -> None:
        """``count``: bytes that were read so far, loading not included."""
        self._files, self._count = files, count
        self.engine, self.engine_fallback = files.engine, files.engine_fallback

    @property
    def fallback(self) -> str | None:
        """Why the page cache is used, if it is."""
        return self._files.fallback

    @property
    def read_bytes(self) -> int:
        return self._count()

    def observe(self, observer: ReadObserver | None) -> None:
        """Single reads are not told of."""


class WeightStream:
    """Reads ``pieces`` in their order, again and again, into slots of ``region``.

    Piece number n of all that are ever read is ``pieces[n % len(pieces)]``.  `take` and `release`
    are called with 0, 1, 2 and so on, by one caller at a time.  No thread is needed: the system
    reads into all slots that are free while the caller computes."""

    def __init__(
        self, files: DirectFiles, pieces: Sequence[Piece], region: U8, engine: IoEngine
    ) -> None:
        """``engine`` reads ``files``, and is closed with the stream."""
        assert pieces and region.ctypes.data % BLOCK == 0
        self._files, self._pieces, self._engine = files, pieces, engine
        self._slot_bytes = max(length for _, length in (piece.aligned for piece in pieces))
        self.slots = len(region) // self._slot_bytes
        assert self.slots >= 2, "a ring has two slots at least"
        self._view = memoryview(region)  # type: ignore[arg-type] # numpy has buffers
        self._address = region.ctypes.data
        self._begun = self._released = 0
        """Pieces whose reads have begun, and whose slots may be filled again."""
        self._coming: dict[int, ReadBatch] = {}
        """Reads of pieces without waiting."""
        self.read_bytes = 0
        """Bytes of pieces that have arrived."""
        self.waited_s = 0.0
        """Seconds in which `take` has waited."""

    def _read_ahead(self) -> None:
        """Begin to read into every slot that is free."""
        while self._begun < self._released + self.slots:
            number = self._begun
            piece = self._pieces[number % len(self._pieces)]
            first, length = piece.aligned
            address = self._address + number % self.slots * self._slot_bytes
            place = (np.array([own], np.int64) for own in (first, address, length))
            self._coming[number] = batch = make_reads(piece.file, *place)
            self._begun += 1
            self._engine.submit(batch)

    def take(self, number: int) -> int:
        """Address of piece ``number``, once it has arrived; valid until it is released.

        Raises `UserError` P532 where the file ends before."""
        assert self._released <= number < self._released + self.slots
        self._read_ahead()
        piece = self._pieces[number % len(self._pieces)]
        slot = number % self.slots * self._slot_bytes
        first, length = piece.aligned
        batch = self._coming.get(number)
        if batch is not None:
            start = perf_counter()
            self._engine.wait(batch, 0)
            self.waited_s += perf_counter() - start
            if batch.results[0] < piece.offset + piece.size - first:
                # It was interrupted, or the file is shorter than it was.
                self._files.read(piece, self._view[slot : slot + length])
            self._files.drop_cached(piece)
            del self._coming[number]
            self.read_bytes += piece.size
        return self._address + slot + piece.offset - first

    def is_behind(self, number: int) -> bool:
        """Whether reads, not computing, are what piece ``number`` and those after it wait for: the
        half of the slots has nothing that could be computed."""
        batch = self._coming.get(number + self.slots // 2)
        return batch is None or batch.results[0] == PENDING

    def release(self, number: int) -> None:
        """Let the slot of piece ``number``, and of all before it, be filled again."""
        self._released = number + 1
        self._read_ahead()

    def rewind(self) -> int:
        """Give up a round that was not finished; return the number that `take` is called with
        next: the first piece of another round."""
        for number, batch in list(self._coming.items()):
            self._engine.abandon(batch)
            del self._coming[number]
        self._begun = self._released = -(-self._begun // len(self._pieces)) * len(self._pieces)
        return self._begun

    def close(self) -> None:
        self.rewind()
        self._engine.close()


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
