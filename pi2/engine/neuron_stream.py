"""All neurons of one layer after the other, for prompts: what is in memory, and the rest in long
reads from flash.

A layer's cold neurons are cut into pieces of stored order.  A piece that lies in one stretch of
the cold cache is computed where it is.  Any other is put together in a staging buffer: stretches
that are missing are read, others are copied out of the cache.  There are two buffers: one is
filled while the other is computed with, also across layers.  What needs no buffer is given in
between, in even parts, so that the drive is busy all the time.

Where the order of additions may not depend on what is in memory, and where somebody looks at the
neurons, all come in stored order instead, in pieces whose bounds depend on what is wanted alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

import numpy as np

from pi2.arrays import I32, U8
from pi2.memory.flash import FlashReader
from pi2.memory.granules import SingleNeurons
from pi2.memory.null_reader import NullReader
from pi2.memory.policy import ABSENT

BUFFERS = 2
"""One is filled while the other is computed with."""
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

    def follows(self, other: Piece) -> bool:
        """Whether it is needed after ``other``."""
        return (self.layer, self.first) > (other.layer, other.first)

    @property
    def place(self) -> slice | None:
        """The slots, where they are one stretch of the arena in stored order."""
        start = int(self.slots[0])
        count = len(self.slots)
        if start == ABSENT or int(self.slots[-1]) != start + count - 1:
            return None
        alike = (self.slots == np.arange(start, start + count, dtype=np.int32)).all()
        return slice(start, start + count) if alike else None

    def is_same(self, other: Piece) -> bool:
        """Whether both are the same neurons."""
        mine, theirs = ((item.layer, item.first, len(item.slots)) for item in (self, other))
        return mine == theirs

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
class Stretch:
    """Neurons of a layer next to each other in the store and in memory."""

    first: int
    """Stored index of the first."""
    bundles: U8
    """[n, stride]."""


@dataclass(frozen=True, slots=True)
class _Filling:
    """A piece on its way into a buffer."""

    piece: Piece
    buffer: U8
    reads: list[Future[None]]


class NeuronStream:
    """Gives the neurons of each layer, every one once; one caller at a time.

    Their order depends on what is in memory, and on nothing else, unless stored order is asked for.
    Of a mixture, those of some experts may be wanted: then nobody knows what the next layer will
    want, and nothing is read ahead of it.
    The cache may not change between two layers of a prompt.
    """

    def __init__(
        self,
        cache: SingleNeurons,
        reader: FlashReader | NullReader,
        staging: U8,
        layers: int,
        *,
        first: Callable[[int], int] = lambda layer: 0,
        in_order: bool = False,
    ) -> None:
        """``staging`` [2, n, stride]: two page-aligned buffers; ``first``: stored index of the
        first neuron of a layer that is wanted; ``in_order``: neurons come in stored order."""
        self._first = first
        self._in_order = in_order
        self._cache = cache
        self._reader = reader
        self._staging = staging
        self._layers = layers
        self.shortest_gap = max(1, SHORTEST_COPY_BYTES // staging.shape[2])
        """Neurons between two missing ones that are not read with them, at least."""
        self._end = layers
        """First layer of which it is not sure that all neurons will be wanted: it is not read
        ahead."""
        self._next_buffer = 0
        self._ahead: deque[_Filling] = deque()
        """What is on its way, in the order in which it will be given."""

    def begin(self, layer: int, *, reads_on: int | None = None) -> None:
        """Make sure that the layer's first pieces from flash are on their way; all its neurons
        will be wanted, and all of the ``reads_on`` layers after it; None stands for all layers."""
        self._set_end(layer, reads_on)
        if not self._ahead:
            self._fill_buffers(self._divide(layer)[0], layer + 1, BUFFERS)

    def give_again(self, layer: int, wanted: range) -> Iterator[Stretch]:
        """Give the ``wanted`` neurons of a layer, once more or for the first time; each stretch is
        valid until the next."""
        self.abandon()
        yield from self.give(layer, [wanted], reads_on=0)

    def give(
        self, layer: int, wanted: Sequence[range] | None = None, *, reads_on: int | None = None
    ) -> Iterator[Stretch]:
        """Give the layer's neurons from the first wanted one on, or those that are ``wanted``
        (ascending); each stretch is valid until the next.

        ``reads_on``: of how many of the next layers all neurons will be wanted; None stands for
        all layers.
        """
        self._set_end(layer, reads_on)
        pieces, parts = self._divide(layer, wanted)
        yield from parts[0]
        for number, piece in enumerate(pieces):
            following = pieces[number + 1 :]
            if self._ahead and not self._ahead[0].piece.is_same(piece):
                # All neurons were expected to be wanted, and some experts are not.
                self.abandon()
            if not self._ahead:
                self._start(piece)
            filling = self._ahead[0]
            self._finish(filling)
            self._ahead.popleft()
            # The other buffer's content has been used: fill it while this one is computed, with
            # the next layer's first at the end, so that reads go on during attention.
            self._fill_buffers(following, layer + 1, BUFFERS - 1)
            yield Stretch(piece.first, filling.buffer)
            self._fill_buffers(following, layer + 1, BUFFERS)
            yield from parts[number + 1]
        if not pieces:
            self._fill_buffers([], layer + 1, BUFFERS)

    def _set_end(self, layer: int, reads_on: int | None) -> None:
        count = self._layers if reads_on is None else reads_on
        self._end = min(self._layers, layer + 1 + count)

    def _divide(
        self, layer: int, wanted: Sequence[range] | None = None
    ) -> tuple[list[Piece], list[list[Stretch]]]:
        """The layer's pieces that need a buffer, and the stretches of the arena that have the rest:
        those that come before the first piece, between two, and after the last."""
        wanted = [range(self._first(layer), self._cache.neurons)] if wanted is None else wanted
        if self._in_order:
            return self._divide_in_order(layer, wanted)
        pieces: list[Piece] = []
        slots, hot = self._cache.hot_slots[layer], self._cache.hot_range(layer)
        # Stored index of the first, and slots.
        stretches: list[tuple[int, slice]] = []
        for run in wanted:
            begin, stop = max(hot.start, run.start), min(hot.stop, run.stop)
            if begin < stop:
                shift = slots.start - hot.start
                stretches.append((begin, slice(begin + shift, stop + shift)))
        for piece in self._cut(layer, wanted):
            place = piece.place
            if place is None:
                pieces.append(piece)
            elif stretches and _are_neighbours(*stretches[-1], piece.first, place):
                first, before = stretches[-1]
                stretches[-1] = (first, slice(before.start, place.stop))
            else:
                stretches.append((piece.first, place))
        resident = [Stretch(first, self._cache.arena[slots]) for first, slots in stretches]
        return pieces, _share_evenly(resident, len(pieces) + 1)

    def _divide_in_order(
        self, layer: int, wanted: Sequence[range]
    ) -> tuple[list[Piece], list[list[Stretch]]]:
        pieces: list[Piece] = []
        parts: list[list[Stretch]] = [[]]
        for run in wanted:
            for piece in self._cut_run(layer, run):
                place = piece.place
                if place is None:
                    pieces.append(piece)
                    parts.append([])
                else:
                    parts[-1].append(Stretch(piece.first, self._cache.arena[place]))
        return pieces, parts

    def _cut(self, layer: int, wanted: Sequence[range]) -> Iterator[Piece]:
        """The layer's ``wanted`` cold neurons in pieces of a buffer's size."""
        hot = self._cache.hot_range(layer)
        for run in wanted:
            # Below the hot ones lie those of a dense unit that is lost.
            yield from self._cut_run(layer, range(run.start, min(hot.start, run.stop)))
            yield from self._cut_run(layer, range(max(run.start, hot.stop), run.stop))

    def _cut_run(self, layer: int, run: range) -> Iterator[Piece]:
        size = self._staging.shape[1]
        for first in range(run.start, run.stop, size):
            slots = self._cache.find_slots(layer, first, min(size, run.stop - first))
            yield Piece(layer=layer, first=first, slots=slots)

    def _fill_buffers(self, pieces: list[Piece], layer: int, most: int) -> None:
        """Let ``most`` buffers be on their way: with ``pieces``, then with those of ``layer`` and
        the layers after it."""
        while len(self._ahead) < most:
            last = self._ahead[-1].piece if self._ahead else None
            rest = [piece for piece in pieces if last is None or piece.follows(last)]
            while not rest and layer < self._end:
                # A layer that is all in memory is passed over.
                rest = [p for p in self._divide(layer)[0] if last is None or p.follows(last)]
                layer += 1
            if not rest:
                return
            self._start(rest[0])

    def _start(self, piece: Piece) -> None:
        buffer = self._staging[self._next_buffer, : len(piece.slots)]
        self._next_buffer = 1 - self._next_buffer
        reads: list[Future[None]] = []
        # Noted before reads begin: after an interrupt they are waited for.
        self._ahead.append(_Filling(piece, buffer, reads))
        for missing in piece.find_missing(self.shortest_gap):
            first = piece.first + missing.start
            reads.append(self._reader.start_run(piece.layer, first, buffer[missing]))

    def _finish(self, filling: _Filling) -> None:
        """Copy what is in memory, and wait for what is read."""
        slots, end = filling.piece.slots, 0
        for missing in [*filling.piece.find_missing(self.shortest_gap), slice(len(slots), None)]:
            here = slice(end, missing.start)
            if here.start < here.stop:
                np.take(
                    self._cache.arena, slots[here], axis=0, out=filling.buffer[here], mode="clip"
                )
            end = missing.stop
        for read in filling.reads:
            read.result()

    def abandon(self) -> None:
        """Forget pieces on their way, after an error or an interrupt.

        Their buffers are free again only when reads are over: a late one would spoil the next run.
        """
        reads = [read for filling in self._ahead for read in filling.reads]
        self._ahead.clear()
        wait([read for read in reads if not read.cancel()])


def _are_neighbours(first: int, slots: slice, next_first: int, next_slots: slice) -> bool:
    """Whether neurons follow each other in the arena and in the store."""
    size = int(slots.stop) - int(slots.start)
    return bool(slots.stop == next_slots.start) and first + size == next_first


def _share_evenly(stretches: list[Stretch], count: int) -> list[list[Stretch]]:
    """Cut ``stretches`` into ``count`` parts with as many neurons each, in their order."""
    total = sum(len(stretch.bundles) for stretch in stretches)
    parts: list[list[Stretch]] = [[] for _ in range(count)]
    bounds = [total * (number + 1) // count for number in range(count)]
    done = number = 0
    for stretch in stretches:
        begin = 0
        while begin < len(stretch.bundles):
            while done >= bounds[number]:
                number += 1
            size = min(len(stretch.bundles) - begin, bounds[number] - done)
            bundles = stretch.bundles[begin : begin + size]
            parts[number].append(Stretch(stretch.first + begin, bundles))
            begin, done = begin + size, done + size
    return parts
