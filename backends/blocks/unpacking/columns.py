"""Blocks of 256 of as many rows as a register has lanes: their words are turned, then unpacked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from pi2.backends.blocks.machine import join, pick, turn_square
from pi2.backends.blocks.room import NIBBLES, SIXES, Order
from pi2.backends.blocks.unpacking.block import Source, join_halves
from pi2.backends.compiler import vectors as v

_LINES = 5
"""Cache lines that are asked for with every 16 bytes of the rows."""
Put = Callable[[int, v.Expr], None]
"""Takes a register of four bytes of each row, by its number in the block."""


class Columns:
    """Blocks of several rows: a register has a number of 32 bits of each row."""

    def __init__(self, rows: Sequence[Source], later: v.Expr, size: int) -> None:
        """``later``: first of ``size`` bytes that are needed later."""
        self.rows, self.lanes = rows, len(rows)
        self._later, self._lines = later, iter(range(0, size, 64))

    def ask_ahead(self, count: int | None = None) -> None:
        """Prefetch ``count`` cache lines more, or the rest; loads wait for many at once."""
        for line in islice(self._lines, count):
            v.prefetch(self.rows[0].weights, self._later + line)

    def load(self, place: int) -> list[v.Expr]:
        """Return 16 bytes from ``place`` on, as four registers."""
        self.ask_ahead(_LINES)
        words = []
        for first in range(4):
            raw = v.let(join([row.load(place, 16) for row in self.rows[first::4]], 16))
            words.append(v.let(v.reinterpret(raw, "uint32", self.lanes)))
        return [v.let(column) for column in turn_square(words, self.lanes)]

    def number(self, value: int) -> v.Expr:
        return v.constant(value, "uint32", self.lanes)

    def take(self, words: v.Expr, shift: int, bits: int) -> v.Expr:
        """Return ``bits`` of each byte of words, which are shifted to the right before; to the left
        by a negative number."""
        by = self.number(abs(shift))
        words = words >> by if shift > 0 else words << by if shift else words
        return v.let(words & self.number(0x01010101 * bits))

    def take_byte(self, words: Sequence[v.Expr], number: int) -> v.Expr:
        moved = words[number // 4] >> self.number(8 * (number % 4))
        return v.let(moved & self.number(255))

    def scale(self, values: v.Expr, factor: v.Expr, offset: int = 0) -> v.Expr:
        """Return (whole numbers - ``offset``) times float32."""
        signed = v.reinterpret(values, "int32", self.lanes) - v.constant(
            offset, "int32", self.lanes
        )
        return v.let(v.cast(signed, "float32", self.lanes) * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turned:
    """How blocks of rows are unpacked at once."""

    unpack: Callable[[Columns, Put], list[v.Expr]]
    """Puts weights, and returns scales of pieces, pairs of minima, and their scale."""
    pieces: int = 8
    has_mins: bool = False
    is_signed: bool = False
    offset: int = 0


def _put_nibbles(
    rows: Columns,
    put: Put,
    place: int,
    order: Order,
    pieces: Sequence[int],
    find_high: Callable[[int], v.Expr | None],
) -> None:
    """Put nibbles of ``pieces`` of 16 bytes from ``place`` on; ``find_high`` returns the upper bits
    of a register, if there are any."""
    for piece in pieces:
        for word, raw in enumerate(rows.load(place + 16 * piece)):
            for field in range(2):
                register = 4 * order.place(piece, field) + word
                value, more = rows.take(raw, 4 * field, 15), find_high(register)
                put(register, value if more is None else v.let(value | more))


def unpack_nibbles(rows: Columns, put: Put, place: int, fifths: int | None) -> list[v.Expr]:
    """Q4_K, and Q5_K with a fifth bit of each weight."""
    extra = [] if fifths is None else [*rows.load(fifths), *rows.load(fifths + 16)]

    def find_high(register: int) -> v.Expr | None:
        return rows.take(extra[register % 8], register // 8 - 4, 16) if extra else None

    _put_nibbles(rows, put, place, NIBBLES, range(8), find_high)
    lanes, (first, low, least, upper) = rows.lanes, rows.load(0)
    scales = [rows.take(low, 0, 63), rows.take(upper, 0, 15) | rows.take(low, 2, 48)]
    mins = [rows.take(least, 0, 63), rows.take(upper, 4, 15) | rows.take(least, 2, 48)]
    both = v.let(v.reinterpret(first, "float16", 2 * lanes))
    scale, min_scale = (
        v.let(v.cast(pick(both, 2 * lanes, range(k, 2 * lanes, 2)), "float32", lanes))
        for k in range(2)
    )
    found = [rows.scale(rows.take_byte(scales, number), scale) for number in range(8)]
    for number in range(0, 8, 2):
        high = rows.take_byte(mins, number + 1) << rows.number(16)
        found.append(v.let(rows.take_byte(mins, number) | high))
    return [*found, min_scale]


def unpack_q6_k(rows: Columns, put: Put) -> list[v.Expr]:
    for part in range(4):
        upper = rows.load(128 + 16 * part)
        own = (part // 2 * 4 + part % 2, part // 2 * 4 + part % 2 + 2)

        def find_high(register: int, upper: Sequence[v.Expr] = upper) -> v.Expr:
            return rows.take(upper[register % 4], 2 * (register // 8 % 4) - 4, 48)

        _put_nibbles(rows, put, 0, SIXES, own, find_high)
    words, scale = rows.load(192), join_halves(rows.rows, 208)
    # Signed bytes: their sign is a number that is too large by 256.
    flipped = [word ^ rows.number(0x80808080) for word in words]
    return [rows.scale(rows.take_byte(flipped, number), scale, 128) for number in range(16)]
