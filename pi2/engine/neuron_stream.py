"""All neurons of one layer after the other, for prompts: what is in memory, and the rest in long
reads from flash.

A layer's cold neurons are cut into pieces of stored order.  A piece that lies in one stretch of
the cold cache is computed where it is.  Any other is put together in a staging buffer: stretches
that are missing are read, others are copied out of the cache.  There are two buffers: one is
filled while the other is computed with, also across layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pi2.memory.cache import NeuronCache
from pi2.memory.flash import FlashReader, NullReader
from pi2.memory.policy import ABSENT

I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]

SHORTEST_COPY_BYTES = 128 << 10
"""Fewer bytes in memory between two missing stretches are read once more with them: this many take
the disk as long as one request more does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Neurons of a layer next to each other in the store."""

    layer: int
    first: int
    slots: I32
    """Where each is in the arena, [n]; ABSENT: on flash only."""

    @property
    def place(self) -> slice | None:
        """The slots, where they are one stretch of the arena in stored order."""
        start = int(self.slots[0])
        count = len(self.slots)
        if start == ABSENT or int(self.slots[-1]) != start + count - 1:
            return None
        alike = (self.slots == np.arange(start, start + count, dtype=np.int32)).all()
        return slice(start, start + count) if alike else None

    def find_missing(self, shortest: int) -> list[slice]:
        """Stretches to read: the missing neurons, and ``shortest - 1`` others between two of them
        at most."""
        missing = np.flatnonzero(self.slots == ABSENT)
        if len(missing) == 0:
            return []
        cuts = np.flatnonzero(np.diff(missing) - 1 >= shortest)
        firsts = missing[np.concatenate([[0], cuts + 1])].tolist()
        lasts = missing[np.concatenate([cuts, [len(missing) - 1]])].tolist()
        return [slice(first, last + 1) for first, last in zip(firsts, lasts, strict=True)]


@dataclass(frozen=True, slots=True)
class _Filling:
    """A piece on its way into a buffer."""

    piece: Piece
    buffer: U8
    reads: list[Future[None]]


class NeuronStream:
    """Gives the neurons of each layer in stored order; one caller at a time.

    The cache may not change between two layers of a prompt.
    """

    def __init__(
        self, cache: NeuronCache, reader: FlashReader | NullReader, staging: U8, layers: int
    ) -> None:
        """``staging`` [2, n, stride]: two page-aligned buffers."""
        self._cache = cache
        self._reader = reader
        self._staging = staging
        self._layers = layers
        self._shortest = max(1, SHORTEST_COPY_BYTES // staging.shape[2])
        self._next_buffer = 0
        self._ahead: _Filling | None = None

    def begin(self, layer: int) -> None:
        """Make sure that the layer's first piece from flash is on its way."""
        if self._ahead is None:
            self._start_next(self._cut(layer), layer + 1)

    def give(self, layer: int) -> Iterator[U8]:
        """Bundles [n, stride] of the layer's neurons, hot ones first; each piece is valid until
        the next."""
        hot = self._cache.hot_bundles(layer)
        if len(hot):
            yield hot
        pieces = self._cut(layer)
        for number, piece in enumerate(pieces):
            if (place := piece.place) is not None:
                yield self._cache.arena[place]
                continue
            if self._ahead is None:
                self._start(piece)
            filling = self._ahead
            assert filling is not None and filling.piece.layer == layer
            assert filling.piece.first == piece.first
            self._finish(filling)
            self._ahead = None
            # The other buffer's content has been used: fill it while this one is computed, with
            # the next layer's first at the end, so that reads go on during attention.
            self._start_next(pieces[number + 1 :], layer + 1)
            yield filling.buffer

    def _cut(self, layer: int) -> list[Piece]:
        """The layer's cold neurons in pieces of a buffer's size."""
        size, neurons = self._staging.shape[1], self._cache.neurons
        starts = range(len(self._cache.hot_slots[layer]), neurons, size)
        return [
            Piece(
                layer=layer,
                first=first,
                slots=self._cache.find_slots(layer, first, min(size, neurons - first)),
            )
            for first in starts
        ]

    def _start_next(self, pieces: list[Piece], layer: int) -> None:
        """Begin to fill the other buffer with the first of ``pieces``, else of ``layer``'s, that
        needs it."""
        if layer < self._layers and all(piece.place is not None for piece in pieces):
            pieces = self._cut(layer)
        for piece in pieces:
            if piece.place is None:
                self._start(piece)
                return

    def _start(self, piece: Piece) -> None:
        buffer = self._staging[self._next_buffer, : len(piece.slots)]
        self._next_buffer = 1 - self._next_buffer
        reads: list[Future[None]] = []
        # Noted before reads begin: after an interrupt they are waited for.
        self._ahead = _Filling(piece, buffer, reads)
        for missing in piece.find_missing(self._shortest):
            first = piece.first + missing.start
            reads.append(self._reader.start_run(piece.layer, first, buffer[missing]))

    def _finish(self, filling: _Filling) -> None:
        """Copy what is in memory, and wait for what is read."""
        slots, end = filling.piece.slots, 0
        for missing in [*filling.piece.find_missing(self._shortest), slice(len(slots), None)]:
            here = slice(end, missing.start)
            if here.start < here.stop:
                np.take(
                    self._cache.arena, slots[here], axis=0, out=filling.buffer[here], mode="clip"
                )
            end = missing.stop
        for read in filling.reads:
            read.result()

    def abandon(self) -> None:
        """Forget a piece on its way, after an error or an interrupt.

        Its buffer is free again only when its reads are over: a late one would spoil the next run.
        """
        if self._ahead is not None:
            filling, self._ahead = self._ahead, None
            wait([read for read in filling.reads if not read.cancel()])
