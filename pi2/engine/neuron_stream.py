"""All neurons of one layer after the other, for prompts: from memory, and the rest in long reads
from flash.

A piece that is one range of the cold cache is computed in place; any other is put together in a
buffer of a ring, of which others are filled meanwhile.  MoE models get an
order that takes neighbours far apart (``spread``): caches are filled from the first neurons on, and
the drive would rest while those are computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pi2.arrays import I32, U8
from pi2.memory.cache import NeuronCache
from pi2.memory.flash import FlashReader, PendingRead
from pi2.memory.io_engine import ReadBatch
from pi2.memory.policy import ABSENT
from pi2.memory.ring import Ring
from pi2.plan.arithmetic.sizes import MOST_PIECE_BYTES

PieceOrder = Literal["any", "stored", "spread"]
"""Order in which pieces are given: the best for cache and drive, the store's, or one that takes
neighbours far apart."""
SHORTEST_COPY_BYTES = 128 << 10
"""Bytes in memory between two missing ranges up to which both are read at once: reading them again
takes the disk as long as a further request."""
_GOLDEN = (5**0.5 - 1) / 2
"""Fractions of its multiples are spread evenly, whichever neighbours one takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Neurons of a layer next to each other in the store."""

    layer: int
    first: int
    slots: I32
    """Place of each in the arena, [n]; ABSENT: on flash only."""
    turn: float = 0.0
    """When it is given, among the pieces of its layer, of which the first comes first otherwise."""

    def follows(self, other: Piece) -> bool:
        """Whether it is needed after ``other``."""
        return (self.layer, self.turn, self.first) > (other.layer, other.turn, other.first)

    @property
    def place(self) -> slice | None:
        """The slots, if they are one range of the arena in stored order."""
        start = int(self.slots[0])
        count = len(self.slots)
        if start == ABSENT or int(self.slots[-1]) != start + count - 1:
            return None
        alike = (self.slots == np.arange(start, start + count, dtype=np.int32)).all()
        return slice(start, start + count) if alike else None

    def is_same(self, other: Piece) -> bool:
        mine, theirs = ((item.layer, item.first, len(item.slots)) for item in (self, other))
        return mine == theirs

    def find_missing(self, shortest: int) -> list[slice]:
        """Ranges to read: missing neurons, and at most ``shortest - 1`` others between two."""
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
    pending: PendingRead | None
    """None if all of it is in memory."""

    @property
    def batch(self) -> ReadBatch | None:
        return None if self.pending is None else self.pending.batch


class NeuronStream:
    """Gives every neuron of each layer once, by one caller, in an order that depends on memory
    unless stored order is asked for; the cache may not change within a prompt."""

    def __init__(
        self,
        cache: NeuronCache,
        reader: FlashReader,
        staging: U8,
        layers: int,
        *,
        first: Callable[[int], int] = lambda layer: 0,
        order: PieceOrder = "any",
        piece: int | None = None,
    ) -> None:
        """``staging`` [2, n, stride]: page-aligned buffers; ``first``: stored index to begin at;
        ``piece``: neurons of a piece."""
        self._first = first
        self._order = order
        self._cache = cache
        self._reader = reader
        self._buffers = _divide_staging(staging, piece or staging.shape[1])
        self._ring = Ring(reader.reads, len(self._buffers), self._plan)
        self._layers = layers
        self.shortest_gap = max(1, SHORTEST_COPY_BYTES // staging.shape[2])
        """Neurons between two missing ones that are not read with them, at least."""
        self._end = layers
        """First layer whose neurons may not all be wanted: it is not read ahead."""
        self._coming: deque[Piece] = deque()
        """What follows, as far as it has been looked up."""
        self._next_layer = 0
        """The first layer that has not been."""

    def begin(self, layer: int, *, reads_on: int | None = None) -> None:
        """Make sure that the layer's first pieces from flash are on their way; all its neurons
        will be wanted, and all of the ``reads_on`` layers after it; None stands for all layers."""
        if not self._ring.ahead:
            self._expect(layer, self._divide(layer)[0], reads_on)
            self._ring.fill()

    def give_again(self, layer: int, wanted: range) -> Iterator[Stretch]:
        """Give the ``wanted`` neurons of a layer, again or for the first time; each range is valid
        until the next."""
        self.abandon()
        yield from self.give(layer, [wanted], reads_on=0)

    def give(
        self, layer: int, wanted: Sequence[range] | None = None, *, reads_on: int | None = None
    ) -> Iterator[Stretch]:
        """Give neurons from the first wanted one on, or the ``wanted`` ones; each range is valid
        until the next; ``reads_on``: following layers whose neurons are all wanted."""
        pieces, parts = self._divide(layer, wanted)
        self._expect(layer, pieces, reads_on)
        self._ring.fill()
        yield from parts[0]
        for part in parts[1:]:
            filling = self._ring.ahead[0]
            self._finish(filling)
            yield Stretch(filling.piece.first, filling.buffer)
            # The next layer's first pieces follow, so that reads go on during attention.
            self._ring.release()
            yield from part

    def _expect(self, layer: int, pieces: Sequence[Piece], reads_on: int | None) -> None:
        """Make ``pieces`` of the layer, then the pieces of the ``reads_on`` layers after it, the
        current and next reads."""
        begun = [filling.piece for filling in self._ring.ahead]
        known = sum(piece.layer == layer for piece in begun)
        is_known = all(map(Piece.is_same, begun, pieces[:known])) and known <= len(pieces)
        if not is_known or (begun and known == 0 and pieces):
            # All neurons were expected to be wanted, and some experts are not.
            self.abandon()
            known = 0
        self._coming = deque(pieces[known:])
        self._next_layer = layer + 1
        count = self._layers if reads_on is None else reads_on
        self._end = min(self._layers, layer + 1 + count)

    def _divide(
        self, layer: int, wanted: Sequence[range] | None = None
    ) -> tuple[list[Piece], list[list[Stretch]]]:
        """The layer's pieces that need a buffer, and the ranges of the arena that have the rest:
        before the first piece, between two pieces, and after the last."""
        wanted = [range(self._first(layer), self._cache.neurons)] if wanted is None else wanted
        if self._order != "any":
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
        cut = [piece for run in wanted for piece in self._cut_run(layer, run)]
        if self._order == "spread":
            cut.sort(key=lambda piece: (piece.turn, piece.first))
        for piece in cut:
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
        if not run:
            return
        size, is_spread = len(self._buffers[0]), self._order == "spread"
        slots = self._cache.find_slots(layer, run.start, len(run))
        first = run.start
        while first < run.stop:
            stop = min(first + size - first % size * is_spread, run.stop)
            own = slots[first - run.start : stop - run.start]
            turn = first // size * _GOLDEN % 1 if is_spread else 0.0
            yield Piece(layer=layer, first=first, slots=own, turn=turn)
            first = stop

    def _plan(self, number: int) -> _Filling | None:
        """Plan the next piece, into buffer ``number``; None if no piece is known to follow."""
        while not self._coming and self._next_layer < self._end:
            # A layer that is all in memory is passed over.
            pieces = self._divide(self._next_layer)[0]
            if self._ring.ahead:
                last = self._ring.ahead[-1].piece
                pieces = [piece for piece in pieces if piece.follows(last)]
            self._coming.extend(pieces)
            self._next_layer += 1
        if not self._coming:
            return None
        piece = self._coming.popleft()
        buffer = self._buffers[number][: len(piece.slots)]
        missing = piece.find_missing(self.shortest_gap)
        if not missing:
            return _Filling(piece, buffer, None)
        pending = self._reader.plan_run(piece.layer, piece.first, buffer, missing)
        return _Filling(piece, buffer, pending)

    def _finish(self, filling: _Filling) -> None:
        """Copy neurons in memory, and wait for the others."""
        slots, end = filling.piece.slots, 0
        for missing in [*filling.piece.find_missing(self.shortest_gap), slice(len(slots), None)]:
            here = slice(end, missing.start)
            if here.start < here.stop:
                np.take(
                    self._cache.arena, slots[here], axis=0, out=filling.buffer[here], mode="clip"
                )
            end = missing.stop
        if filling.pending is not None:
            self._reader.finish(filling.pending, 0)

    def abandon(self) -> None:
        """Forget pieces under way once their reads are over."""
        self._ring.abandon()
        self._coming.clear()


def choose_piece(size: int, stride: int) -> int:
    """The most neurons, up to `MOST_PIECE_BYTES`, that divide ``size``."""
    most = max(1, MOST_PIECE_BYTES // stride)
    return max(part for part in range(1, min(size, most) + 1) if size % part == 0)


def _divide_staging(staging: U8, piece: int) -> U8:
    """As many buffers [n, ``piece``, stride] as there is room for, or the two: a single one has
    nothing to be filled while it is computed with."""
    count, size, stride = staging.shape
    pieces = count * size // piece
    if pieces < count:
        return staging
    return staging.reshape(-1, stride)[: pieces * piece].reshape(pieces, piece, stride)


def _are_neighbours(first: int, slots: slice, next_first: int, next_slots: slice) -> bool:
    size = int(slots.stop) - int(slots.start)
    return bool(slots.stop == next_slots.start) and first + size == next_first


def _share_evenly(stretches: list[Stretch], count: int) -> list[list[Stretch]]:
    """Cut ``stretches`` into ``count`` parts of equally many neurons, in their order."""
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
