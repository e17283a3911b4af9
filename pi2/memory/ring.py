"""A ring of slots, which are filled ahead of their use: always all that are free.

Weights that every step needs and memory has no room for pass through one round and round. The reads
of the next step begin while this one still computes: the drive never waits for a token."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from pi2.arrays import U8
from pi2.memory.direct_files import BLOCK, BatchReads, Piece
from pi2.memory.io_engine import PENDING, ReadBatch, make_reads


class Filled(Protocol):
    """Contents of a slot."""

    @property
    def batch(self) -> ReadBatch | None:
        """The reads that fill it; None if none has to."""


Filling = TypeVar("Filling", bound=Filled)


class Ring(Generic[Filling]):
    """Slots in the order of their use.  No thread is needed: the system reads into all that are
    free while the caller computes."""

    def __init__(
        self, reads: BatchReads, slots: int, plan: Callable[[int], Filling | None]
    ) -> None:
        """``plan`` gives the next contents of a slot; None, if none are known to follow."""
        self._reads, self.slots, self._plan = reads, slots, plan
        self.ahead: deque[Filling] = deque()
        """Begun, in the order of their use; the first may be in use."""
        self._next = 0

    def fill(self) -> None:
        """Begin to read into every slot that is free."""
        while len(self.ahead) < self.slots:
            filling = self._plan(self._next)
            if filling is None:
                return
            # Noted before reads begin: after an interrupt they are waited for.
            self.ahead.append(filling)
            self._next = (self._next + 1) % self.slots
            if filling.batch is not None:
                self._reads.submit(filling.batch)

    def release(self) -> None:
        """Fill the slot of the oldest contents again."""
        self.ahead.popleft()
        self.fill()

    def abandon(self) -> None:
        """Forget unfinished contents once nothing is under way: late reads would spoil others."""
        while self.ahead:
            batch = self.ahead[0].batch
            if batch is not None:
                self._reads.engine.abandon(batch)
            self.ahead.popleft()


@dataclass(frozen=True, slots=True)
class _Coming:
    batch: ReadBatch
    piece: Piece
    address: int
    """Of its first byte, once it has arrived."""


class WeightStream:
    """Pieces of files in their order, again and again, by one caller at a time."""

    def __init__(self, reads: BatchReads, pieces: Sequence[Piece], region: U8) -> None:
        """``reads`` are closed with it; slots are in ``region``, which begins at a block."""
        assert pieces and region.ctypes.data % BLOCK == 0
        self.reads, self._pieces, self._at = reads, pieces, 0
        self._slot_bytes = max(length for _, length in (piece.aligned for piece in pieces))
        self._address = region.ctypes.data
        self._ring = Ring(reads, len(region) // self._slot_bytes, self._plan)
        assert self.slots >= 2, "a ring has two slots at least"

    @property
    def slots(self) -> int:
        return self._ring.slots

    def _plan(self, slot: int) -> _Coming:
        piece = self._pieces[self._at]
        self._at = (self._at + 1) % len(self._pieces)
        first, length = piece.aligned
        address, begin = self._address + slot * self._slot_bytes, piece.offset - first
        place = (np.array([own], np.int64) for own in (first, address, length, begin + piece.size))
        return _Coming(make_reads(piece.file, *place), piece, address + begin)

    def take(self) -> int:
        """Address of the next piece, once it has arrived; valid until it is released.

        Raises `UserError` P532 where the file ends before."""
        self._ring.fill()
        coming = self._ring.ahead[0]
        self.reads.finish(coming.batch)
        self.reads.files.drop_cached(coming.piece)
        return coming.address

    def is_behind(self) -> bool:
        """Whether reads, not computing, are what the next piece and those after it wait for: the
        half of the slots has nothing that could be computed."""
        ahead, half = self._ring.ahead, self.slots // 2
        return len(ahead) <= half or bool(ahead[half].batch.results[0] == PENDING)

    def release(self) -> None:
        """Let the slot of the piece that was taken be filled again."""
        self._ring.release()

    def rewind(self) -> None:
        """Give up a round that was not finished: the first piece is the next."""
        self._ring.abandon()
        self._at = 0

    def close(self) -> None:
        self.rewind()
        self.reads.close()


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
