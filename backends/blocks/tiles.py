"""Attention of the tokens of a chunk, which follow each other: lanes are queries, and keys and
values of some positions are unpacked once for a tile of queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tvm.tirx.script import builder as T

from pi2.backends.blocks.attention import Bases, Heads
from pi2.backends.blocks.machine import Machine, Table, turn_square
from pi2.backends.blocks.sizes import TILE, TILE_POSITIONS, UNPACKED
from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.isa import Isa

if TYPE_CHECKING:
    from pi2.plan.documents.plan import KvType

_HIDDEN, _LEAST = -3.0e38, -1.0e38
"""Scores of positions that a query does not see, below every other score."""
_ELEMENTS = 64
"""Elements of queries and keys that are multiplied before those behind them, in the first cache."""
_QUERIES = 6
"""Queries that values are mixed for at once."""
_WEIGHED = 4
"""Positions whose weights are computed at once."""


class _Tile(Heads):
    """`TILE` queries of tokens and of heads that share keys.  A thread's scratch has scores
    [`TILE_POSITIONS`, TILE], queries [key_width, TILE], values mixed so far [TILE, value_width],
    six numbers of each query, and unpacked keys or values [pieces, UNPACKED, lanes]."""

    def __init__(self, isa: Isa, kind: KvType, table: Table) -> None:
        super().__init__(isa, kind, table)
        has_many = isa.lanes == 16 or Machine(isa).is_arm
        # Sums fill 24 of 32 registers, or 12 of 16.
        self._rows, self._mixes = (8, (4, 1)) if has_many else (4, (2, 1))
        self._turned = v.let(self._scores + TILE * TILE_POSITIONS)
        self._mixed = v.let(self._turned + TILE * self.table.key_width)
        numbers = v.let(self._mixed + TILE * self._width)
        self._numbers = [v.let(numbers + k * TILE) for k in range(4)]
        """Largest scores, sums of weights, and the first and last positions that are seen."""
        self._factors = v.let(numbers + 4 * TILE)
        """The factor of values mixed before a block of positions."""
        self._leans = v.let(numbers + 5 * TILE)
        """Slopes of the heads of queries."""
        self._unpacked = v.let(numbers + 6 * TILE)

    def emit(
        self, first: v.Expr, end: v.Expr, head: v.Expr, bases: Bases, position: v.Expr
    ) -> None:
        """Compute tokens ``first`` to ``end``, the first of which stands at ``position``."""
        self._first, self._head, self._position = first, head, position
        queries = v.let((end - first) * self.table.group)
        with T.serial((queries + TILE - 1) // TILE) as part:
            self._begin = v.let(part * TILE)
            self._emit_part(v.let(T.min(queries - self._begin, T.int64(TILE))), bases)

    def _emit_part(self, count: v.Expr, bases: Bases) -> None:
        lanes, zero = self._lanes, T.int64(0)
        registers = v.let((count + lanes - 1) // lanes)
        self._put_queries(count, registers)
        low, high = (v.let(self._position + self._find(own)[0]) for own in (zero, v.let(count - 1)))
        start, unseen = (
            v.let(self.find_first(low) // self._rows * self._rows),
            self.find_first(high),
        )
        with T.serial((high - start + TILE_POSITIONS) // TILE_POSITIONS) as number:
            place = v.let(start + number * TILE_POSITIONS)
            whole = v.let((high - place + self._rows) // self._rows * self._rows)
            size = v.let(T.min(T.int64(TILE_POSITIONS), whole))
            self.enter_ring(place)
            self._unpack("key", bases[0], place, size)
            _repeat(zero, registers, (3, 1), lambda k, n: self._score(v.let(k * lanes), n, size))
            hides = T.bitwise_or(place + size > low + 1, place < unseen)
            with T.serial(registers) as register:
                query = v.let(register * lanes)
                with T.If(self.table.cap != T.float32(0.0)), T.Then():
                    self._cut(query, size)
                with T.If(self._has_slopes), T.Then():
                    self._lean(query, place, size)
                with T.If(hides), T.Then():
                    self._hide(query, place, size)
                self._weigh(query, size)
            with T.serial(count) as query:
                self._scale_mixed(query)
            self._unpack("value", bases[1], place, size)
            pieces = v.let(self._width // lanes)
            _repeat(zero, pieces, self._mixes, lambda k, n: self._mix(count, k, n, size))
        with T.serial(count) as query:
            token, head = self._find(query)
            total, place = (self._numbers[1] + query, v.let(self._mixed + query * self._width))
            self.put(v.let(self._first + token), head, self._scratch, place, self._scratch[total])

    def _find(self, query: v.Expr) -> tuple[v.Expr, v.Expr]:
        """Return the token of a query, counted from the tile's first, and its head."""
        number = v.let(self._begin + query)
        token = v.let(number // self.table.group)
        return token, v.let(self._head * self.table.group + (number - token * self.table.group))

    def _put_queries(self, count: v.Expr, registers: v.Expr) -> None:
        """Begin with nothing; put queries, times the scale of scores."""
        lanes, scale = self._lanes, v.let(v.splat(self.table.scale, self._lanes))
        with T.serial(count) as query:
            token, head = self._find(query)
            top, total = self.begin(head, _LEAST)
            with T.If(self._has_slopes), T.Then():
                T.buffer_store(self._scratch, self.table.slopes[head], [self._leans + query])
            now = v.let(self._position + token)
            seen = [v.cast(own, "float32", 1) for own in (self.find_first(now), now)]
            for place, value in zip(self._numbers, (top.get(), total.get(), *seen), strict=True):
                T.buffer_store(self._scratch, value, [place + query])
            self.clear(self._scratch, v.let(self._mixed + query * self._width))
        with T.serial(registers) as register:
            starts = []
            for lane in range(lanes):
                token, head = self._find(v.let(T.min(register * lanes + lane, count - 1)))
                row = (self._first + token) * self.table.query_stride
                starts.append(v.let(row + head * self.table.key_width))
            with T.serial(self.table.key_width // lanes) as square:
                rows = [
                    v.let(v.load(self.table.queries, at + square * lanes, lanes)) for at in starts
                ]
                target = v.let(self._turned + square * (lanes * TILE) + register * lanes)
                for place, column in enumerate(turn_square(rows, lanes)):
                    v.store(self._scratch, target + place * TILE, column * scale, lanes)

    def _unpack(self, name: str, base: v.Expr, place: v.Expr, size: v.Expr) -> None:
        """Put keys or values of ``size`` positions from ``place`` on."""
        lanes = self._lanes
        array, stride, width = {
            "key": (self._keys, self.table.key_width, self.table.key_width),
            "value": (self._values, self.table.value_stride, self._width),
        }[name]
        with T.serial(size) as position:
            own = self.find_place(place + position)
            source, factor = v.let(base + own * stride), None
            if self._is_scaled and name == "key":
                factor = v.let(v.splat(self.take_key_scales(base, own, 1), lanes))
            elif self._is_scaled:
                factor = v.let(v.splat(v.let(self.take_value_scale(base, own)), lanes))
            with T.serial(width // lanes) as piece:
                value = v.cast(v.load(array, source + piece * lanes, lanes), "float32", lanes)
                target = self._unpacked + (piece * UNPACKED + position) * lanes
                v.store(self._scratch, target, value if factor is None else value * factor, lanes)

    def _score(self, query: v.Expr, registers: int, size: v.Expr) -> None:
        lanes, rows, scratch = self._lanes, self._rows, self._scratch
        zero, pieces = v.constant(0.0, "float32", lanes), v.let(self.table.key_width // lanes)
        several = _ELEMENTS // lanes
        with T.serial((pieces + several - 1) // several) as part, T.serial(size // rows) as block:
            target = v.let(self._scores + block * (rows * TILE) + query)
            places = [
                [target + row * TILE + k * lanes for k in range(registers)] for row in range(rows)
            ]
            cells = [[v.Cell(zero) for _ in own] for own in places]
            begin = v.let(part * several)
            with T.serial(begin, T.min(begin + several, pieces)) as piece:
                keys = v.let(self._unpacked + (piece * UNPACKED + block * rows) * lanes)
                queries = v.let(self._turned + piece * (lanes * TILE) + query)
                with T.serial(T.int64(lanes)) as element:
                    at = v.let(queries + element * TILE)
                    taken = [
                        v.let(v.load(scratch, at + k * lanes, lanes)) for k in range(registers)
                    ]
                    for row, sums in enumerate(cells):
                        key = v.let(v.splat(scratch[keys + element + row * lanes], lanes))
                        for value, cell in zip(taken, sums, strict=True):
                            cell.set(T.fma(value, key, cell.get()))
            with T.If(part > T.int64(0)), T.Then():
                for own, sums in zip(places, cells, strict=True):
                    for at, cell in zip(own, sums, strict=True):
                        cell.set(cell.get() + v.load(scratch, at, lanes))
            for own, sums in zip(places, cells, strict=True):
                for at, cell in zip(own, sums, strict=True):
                    v.store(scratch, at, cell.get(), lanes)

    def _cut(self, query: v.Expr, size: v.Expr) -> None:
        """Cap scores of a register of queries."""
        lanes, cap = self._lanes, v.splat(self.table.cap, self._lanes)
        with T.serial(size) as position:
            at = v.let(self._scores + position * TILE + query)
            value = v.take_tanh(v.load(self._scratch, at, lanes) / cap, lanes)
            v.store(self._scratch, at, value * cap, lanes)

    def _lean(self, query: v.Expr, place: v.Expr, size: v.Expr) -> None:
        """Lower scores by the distance of their positions."""
        lanes, scratch = self._lanes, self._scratch
        last, slope = (
            v.let(v.load(scratch, own + query, lanes)) for own in (self._numbers[3], self._leans)
        )
        with T.serial(size) as position:
            now = v.let(v.splat(v.let(v.cast(place + position, "float32", 1)), lanes))
            at = v.let(self._scores + position * TILE + query)
            score = v.load(scratch, at, lanes)
            v.store(scratch, at, T.fma(now - last, slope, score), lanes)

    def _hide(self, query: v.Expr, place: v.Expr, size: v.Expr) -> None:
        """Hide scores of positions that queries do not see."""
        lanes, scratch = self._lanes, self._scratch
        first, last = (v.let(v.load(scratch, own + query, lanes)) for own in self._numbers[2:])
        with T.serial(size) as position:
            now = v.let(v.splat(v.let(v.cast(place + position, "float32", 1)), lanes))
            at = v.let(self._scores + position * TILE + query)
            is_seen = T.bitwise_and(now <= last, now >= first)
            score, hidden = v.load(scratch, at, lanes), v.constant(_HIDDEN, "float32", lanes)
            v.store(scratch, at, T.Select(is_seen, score, hidden), lanes)

    def _weigh(self, query: v.Expr, size: v.Expr) -> None:
        """Turn scores of a register of queries into weights."""
        lanes, scratch = self._lanes, self._scratch
        tops, sums = (v.let(own + query) for own in self._numbers[:2])
        before = v.let(v.load(scratch, tops, lanes))
        largest = [v.Cell(before) for _ in range(_WEIGHED)]
        totals = [v.Cell(v.constant(0.0, "float32", lanes)) for _ in range(_WEIGHED)]

        def find(block: v.Expr) -> list[v.Expr]:
            first = v.let(self._scores + block * (_WEIGHED * TILE) + query)
            return [first + k * TILE for k in range(_WEIGHED)]

        with T.serial(size // _WEIGHED) as block:
            for at, cell in zip(find(block), largest, strict=True):
                cell.set(T.max(cell.get(), v.load(scratch, at, lanes)))
        one, two, three, four = (cell.get() for cell in largest)
        top = v.let(T.max(T.max(one, two), T.max(three, four)))
        with T.serial(size // _WEIGHED) as block:
            for at, cell in zip(find(block), totals, strict=True):
                weight = v.let(v.take_exponential(v.load(scratch, at, lanes) - top, lanes))
                v.store(scratch, at, weight, lanes)
                cell.set(cell.get() + weight)
        factor = v.let(v.take_exponential(before - top, lanes))
        total = v.let(v.load(scratch, sums, lanes) * factor)
        one, two, three, four = (cell.get() for cell in totals)
        v.store(scratch, sums, total + ((one + two) + (three + four)), lanes)
        v.store(scratch, tops, top, lanes)
        v.store(scratch, v.let(self._factors + query), factor, lanes)

    def _scale_mixed(self, query: v.Expr) -> None:
        factor = v.let(self._scratch[self._factors + query])
        with (
            T.If(factor != T.float32(1.0)),
            T.Then(),
            T.serial(self._width // self._lanes) as piece,
        ):
            at = v.let(self._mixed + query * self._width + piece * self._lanes)
            value = v.load(self._scratch, at, self._lanes) * v.splat(factor, self._lanes)
            v.store(self._scratch, at, value, self._lanes)

    def _mix(self, count: v.Expr, piece: v.Expr, pieces: int, size: v.Expr) -> None:
        """Add weighed values of some pieces to what queries have mixed, `_QUERIES` at once."""
        lanes, scratch = self._lanes, self._scratch
        zero, step = v.constant(0.0, "float32", lanes), UNPACKED * lanes
        with T.serial((count + _QUERIES - 1) // _QUERIES) as several:
            query = v.let(several * _QUERIES)
            cells = [[v.Cell(zero) for _ in range(pieces)] for _ in range(_QUERIES)]
            weights, unpacked = v.let(self._scores + query), v.let(self._unpacked + piece * step)
            with T.serial(size) as position:
                at = v.let(unpacked + position * lanes)
                values = [v.let(v.load(scratch, at + k * step, lanes)) for k in range(pieces)]
                for k, sums in enumerate(cells):
                    weight = v.let(v.splat(scratch[weights + position * TILE + k], lanes))
                    for value, cell in zip(values, sums, strict=True):
                        cell.set(T.fma(value, weight, cell.get()))
            for k, sums in enumerate(cells):
                at = v.let(self._mixed + (query + k) * self._width + piece * lanes)
                for place, cell in enumerate(sums):
                    own = v.let(at + place * lanes)
                    v.store(scratch, own, v.load(scratch, own, lanes) + cell.get(), lanes)


def _repeat(
    first: v.Expr, end: v.Expr, sizes: tuple[int, ...], emit: Callable[[v.Expr, int], None]
) -> None:
    """Emit loops over as many at once as ``sizes`` say."""
    done = first
    for size in sizes:
        begin, times = done, v.let((end - done) // size)
        with T.serial(times) as number:
            emit(v.let(begin + number * size), size)
        done = v.let(begin + times * size)


def emit_attend_many(isa: Isa, kind: KvType, table: Table) -> None:
    """The same as `attention.emit_attend`; items are tiles of tokens of the heads that share keys.
    Heads fill registers, and the cache has whole registers of positions."""
    tile = _Tile(isa, kind, table)
    with T.serial(table.first, table.end) as item:
        # The last tiles, which see most, come first.
        number = v.let((table.tokens + table.tile - 1) // table.tile - 1 - item // tile.kv_heads)
        head = v.let(item - item // tile.kv_heads * tile.kv_heads)
        first = v.let(number * table.tile)
        end = v.let(T.min(first + table.tile, table.tokens))
        position = v.let(v.wide(table.positions[first]))
        seen = v.Cell(end)
        with T.If(table.reach > T.int64(0)), T.Then():
            # Tokens behind attend to keys that are chosen for each.
            seen.set(T.max(first, T.min(end, first + table.reach - position)))
        last = v.let(seen.get())
        with T.If(last > first), T.Then():
            tile.emit(first, last, head, tile.find_bases(first, head), position)
