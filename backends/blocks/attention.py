"""Attention over an fp16 KV cache."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.tirx import Shuffle
from tvm.tirx.script import builder as T

from pi2.backends.blocks.elements import add_up, walk
from pi2.backends.blocks.machine import join
from pi2.backends.blocks.panels import turn_square
from pi2.backends.blocks.sizes import QUERIES, SCORES
from pi2.backends.blocks.tables import Table
from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.isa import Isa

_LEAST = -3.0e38
"""Below every score."""


_MIXED = ((8, 1, 16), (4, 2, 16), (1, 2, 16), (1, 2, 1))
"""How elements of values are mixed: registers at once, positions in turn, and lanes at most."""
_AHEAD = 2
"""Blocks of positions by which keys are asked for before they are needed."""


def emit_attend(isa: Isa, table: Table) -> None:
    """What heads of tokens mix of the values before them."""
    queries, query_stride = table.take_array("queries", "float32"), table.take("query_stride")
    heads, group, width = table.take("heads"), table.take("group"), table.take("head_dim")
    keys, values = (table.take_array(f"{kind}_cache", "float16") for kind in ("key", "value"))
    sequences = table.take_array("sequences", "int32")
    positions = table.take_array("positions", "int32")
    sequence_stride, head_stride = table.take("sequence_stride"), table.take("head_stride")
    window, scale, cap = table.take("window"), table.take_float("scale"), table.take_float("cap")
    sinks, has_sinks = table.take_array("sinks", "float32"), table.take("has_sinks")
    y, y_stride = table.take_array("y", "float32"), table.take("y_stride")
    scores, zero, lanes = table.take_array("scores", "float32"), T.int64(0), isa.lanes
    own = v.let(table.thread * table.take("scores_stride"))
    with T.serial(table.first, table.end) as item:
        token = v.let(item // heads)
        head = v.let(item - token * heads)
        query = v.let(token * query_stride + head * width)
        base = v.let(v.wide(sequences[token]) * sequence_stride + (head // group) * head_stride)
        end = v.let(v.wide(positions[token]) + 1)
        first = v.let(T.Select(window > zero, T.max(end - window, zero), zero))
        # Whole registers of positions: the cache has room for them.
        with T.serial(first // lanes, (end + lanes - 1) // lanes) as block:
            place = v.let(block * lanes)
            found = _multiply_keys(lanes, queries, query, keys, base + place * width, width)
            v.store(scores, own + place, found * v.splat(scale, lanes), lanes)
        largest = v.Cell(T.float32(_LEAST))
        with T.If(has_sinks != zero), T.Then():
            largest.set(sinks[head])
        wide = v.Cell(v.constant(_LEAST, "float32", 16))

        def look(place: v.Expr, count: int) -> None:
            score = v.Cell(v.load(scores, own + place, count))
            with T.If(cap != T.float32(0.0)), T.Then():
                capped = v.take_tanh(score.get() / v.splat(cap, count), count)
                score.set(capped * v.splat(cap, count))
                v.store(scores, own + place, score.get(), count)
            cell = wide if count > 1 else largest
            cell.set(T.max(cell.get(), score.get()))

        walk(first, end, look)
        top = v.let(T.max(largest.get(), v.find_largest(wide.get(), "float32", 16)))

        def exponentiate(place: v.Expr, count: int) -> v.Expr:
            value = v.load(scores, own + place, count) - v.splat(top, count)
            weight = v.let(v.take_exponential(value, count))
            v.store(scores, own + place, weight, count)
            return weight

        total = v.Cell(add_up(first, end, exponentiate))
        with T.If(has_sinks != zero), T.Then():
            total.set(total.get() + v.take_exponential(sinks[head] - top, 1))
        inverse = v.let(T.float32(1.0) / total.get())
        target = v.let(token * y_stride + head * width)

        def mix(element: v.Expr, pieces: int, turns: int, count: int) -> None:
            zeros = v.constant(0.0, "float32", count)
            cells = [[v.Cell(zeros) for _ in range(pieces)] for _ in range(turns)]

            def add(place: v.Expr, row: list[v.Cell]) -> None:
                weight = v.splat(v.let(scores[own + place]), count)
                for piece, cell in enumerate(row):
                    at = base + place * width + element + piece * count
                    value = v.cast(v.load(values, at, count), "float32", count)
                    cell.set(T.fma(value, weight, cell.get()))

            # Several sums in turn: an addition waits for the last one to the same sum.
            several = v.let((end - first) // turns)
            with T.serial(several) as step:
                for turn, row in enumerate(cells):
                    add(v.let(first + step * turns + turn), row)
            if turns > 1:
                with T.serial(first + several * turns, end) as place:
                    add(place, cells[0])
            for piece, column in enumerate(zip(*cells, strict=True)):
                mixed = column[0].get()
                for cell in column[1:]:
                    mixed = mixed + cell.get()
                at = target + element + piece * count
                v.store(y, at, mixed * v.splat(inverse, count), count)

        done = zero
        for pieces, turns, count in _MIXED:
            count = min(count, lanes)
            size = pieces * count
            begin, times = done, v.let((width - done) // size)
            with T.serial(times) as number:
                mix(v.let(begin + number * size), pieces, turns, count)
            done = v.let(begin + times * size)


def _multiply_keys(
    lanes: int,
    queries: v.Buffer,
    query: v.Expr,
    keys: v.Buffer,
    base: v.Expr,
    width: v.Expr,
) -> v.Expr:
    """Return the products of a query with as many keys as a register has lanes."""
    cells = [v.Cell(v.constant(0.0, "float32", lanes)) for _ in range(lanes)]
    whole = v.let(width // lanes)
    with T.serial(lanes * width // 32) as line:
        v.prefetch(keys, base + _AHEAD * lanes * width + line * 32)
    with T.serial(whole) as piece:
        own = v.let(v.load(queries, query + piece * lanes, lanes))
        for lane, cell in enumerate(cells):
            at = base + lane * width + piece * lanes
            key = v.cast(v.load(keys, at, lanes), "float32", lanes)
            cell.set(T.fma(key, own, cell.get()))
    total = v.Cell(add_columns([cell.get() for cell in cells]))
    with T.serial(whole * lanes, width) as element:
        column = [
            v.cast(keys[base + lane * width + element], "float32", 1) for lane in range(lanes)
        ]
        own = v.splat(queries[query + element], lanes)
        total.set(total.get() + v.let(join([v.let(key) for key in column], 1)) * own)
    return v.let(total.get())


def add_columns(rows: Sequence[v.Expr]) -> v.Expr:
    """Return the sums of the lanes of each of as many vectors as they have lanes."""
    count, now = len(rows), list(rows)
    step = 1
    while len(now) > 1:
        first = [k if not k & step else count + k - step for k in range(count)]
        second = [k + step if not k & step else count + k for k in range(count)]
        # Vectors whose numbers differ in the lowest bit first: their sums take turns.
        now = [
            v.let(Shuffle(pair, first) + Shuffle(pair, second))
            for pair in (now[place : place + 2] for place in range(0, len(now), 2))
        ]
        step *= 2
    return now[0]


class _Tile:
    """Queries of some tokens and of all heads that share keys, in a thread's scratch.

    Scores of `SCORES` positions, what was mixed so far, and of each query the largest score and
    the sum of the weights; and keys of as many positions as a register has lanes, turned.
    """

    def __init__(self, isa: Isa, table: Table) -> None:
        self._lanes = isa.lanes
        self._queries = table.take_array("queries", "float32")
        self._query_stride = table.take("query_stride")
        self._group, self._width = table.take("group"), table.take("head_dim")
        self._keys, self._values = (
            table.take_array(f"{kind}_cache", "float16") for kind in ("key", "value")
        )
        self._window, self._scale = table.take("window"), table.take_float("scale")
        self._cap = table.take_float("cap")
        self._sinks, self._has_sinks = table.take_array("sinks", "float32"), table.take("has_sinks")
        self._y, self._y_stride = table.take_array("y", "float32"), table.take("y_stride")
        self._scratch = table.take_array("scratch", "float32")
        room = v.let((table.take("tile") * self._group + QUERIES - 1) // QUERIES * QUERIES)
        self._scores = v.let(table.thread * (table.take("scratch_stride") // 4))
        self._mixed = v.let(self._scores + room * SCORES)
        self._tops = v.let(self._mixed + room * self._width)
        self._sums = v.let(self._tops + room)
        self._turned = v.let(self._sums + room)

    def emit(
        self, first: v.Expr, end: v.Expr, head: v.Expr, base: v.Expr, position: v.Expr
    ) -> None:
        """Compute tokens ``first`` to ``end``, the first of which stands at ``position``."""
        lanes, zero = self._lanes, T.int64(0)
        self._first, self._head, self._position = first, head, position
        count = v.let((end - first) * self._group)
        self._last = v.let(count - 1)
        self._begin(count)
        stop = v.let(position + (end - first))
        lowest = T.Select(self._window > zero, T.max(position - self._window + 1, zero), zero)
        start = v.let(lowest // lanes * lanes)
        with T.serial((stop - start + SCORES - 1) // SCORES) as number:
            place = v.let(start + number * SCORES)
            size = v.let(T.min(T.int64(SCORES), (stop - place + lanes - 1) // lanes * lanes))
            with T.serial(size // lanes) as block:
                own = v.let(place + block * lanes)
                self._turn_keys(base + own * self._width)
                with T.serial((count + QUERIES - 1) // QUERIES) as several:
                    self._score(v.let(several * QUERIES), v.let(block * lanes))
            with T.serial(count) as query:
                self._weigh(query, place, size)
            with T.serial((count + QUERIES - 1) // QUERIES) as several:
                self._mix(v.let(several * QUERIES), base + place * self._width, size)
        with T.serial(count) as query:
            self._finish(query)

    def _find(self, query: v.Expr) -> tuple[v.Expr, v.Expr]:
        """Return the token of a query, counted from the first, and its head."""
        token = v.let(query // self._group)
        return token, v.let(self._head * self._group + (query - token * self._group))

    def _begin(self, count: v.Expr) -> None:
        with T.serial(count) as query:
            _, head = self._find(query)
            top, total = v.Cell(T.float32(_LEAST)), v.Cell(T.float32(0.0))
            with T.If(self._has_sinks != T.int64(0)), T.Then():
                top.set(self._sinks[head])
                total.set(T.float32(1.0))
            T.buffer_store(self._scratch, top.get(), [self._tops + query])
            T.buffer_store(self._scratch, total.get(), [self._sums + query])

            def clear(element: v.Expr, lanes: int) -> None:
                place = self._mixed + query * self._width + element
                v.store(self._scratch, place, v.constant(0.0, "float32", lanes), lanes)

            walk(T.int64(0), self._width, clear)

    def _turn_keys(self, base: v.Expr) -> None:
        """Turn keys of some positions: element by element, those of all of them."""
        lanes = self._lanes
        with T.serial(self._width // lanes) as square:
            rows = [
                v.let(
                    v.cast(
                        v.load(self._keys, base + lane * self._width + square * lanes, lanes),
                        "float32",
                        lanes,
                    )
                )
                for lane in range(lanes)
            ]
            for place, column in enumerate(turn_square(rows)):
                v.store(
                    self._scratch, self._turned + (square * lanes + place) * lanes, column, lanes
                )

    def _score(self, query: v.Expr, place: v.Expr) -> None:
        """Multiply some queries with the keys that were turned."""
        lanes = self._lanes
        numbers = [v.let(T.min(query + k, self._last)) for k in range(QUERIES)]
        starts = []
        for number in numbers:
            token, head = self._find(number)
            row = (self._first + token) * self._query_stride
            starts.append(v.let(row + head * self._width))
        cells = [v.Cell(v.constant(0.0, "float32", lanes)) for _ in numbers]
        with T.serial(self._width) as element:
            keys = v.let(v.load(self._scratch, self._turned + element * lanes, lanes))
            for start, cell in zip(starts, cells, strict=True):
                own = v.splat(self._queries[start + element], lanes)
                cell.set(T.fma(keys, own, cell.get()))
        for number, cell in zip(numbers, cells, strict=True):
            target = self._scores + number * SCORES + place
            v.store(self._scratch, target, cell.get() * v.splat(self._scale, lanes), lanes)

    def _weigh(self, query: v.Expr, place: v.Expr, size: v.Expr) -> None:
        """Turn scores of a query into weights, those of other blocks included."""
        lanes = self._lanes
        token, _ = self._find(query)
        now = v.let(self._position + token)
        last = v.splat(v.let(T.cast(now - place, "int32")), lanes)
        lowest = T.Select(
            self._window > T.int64(0), now - self._window - place, T.int64(-1) - place
        )
        least = v.splat(v.let(T.cast(lowest, "int32")), lanes)
        row = v.let(self._scores + query * SCORES)
        steps = T.ramp(T.int32(0), T.int32(1), lanes)
        nothing = v.constant(_LEAST, "float32", lanes)
        with T.If(self._cap != T.float32(0.0)), T.Then(), T.serial(size // lanes) as block:
            at = v.let(row + block * lanes)
            inner = v.load(self._scratch, at, lanes) / v.splat(self._cap, lanes)
            v.store(self._scratch, at, v.take_tanh(inner, lanes) * v.splat(self._cap, lanes), lanes)

        def is_seen(block: v.Expr) -> v.Expr:
            places = v.let(v.splat(T.cast(block * lanes, "int32"), lanes) + steps)
            return T.bitwise_and(places <= last, places > least)

        before = v.let(self._scratch[self._tops + query])
        cell = v.Cell(nothing)
        with T.serial(size // lanes) as block:
            value = v.load(self._scratch, row + block * lanes, lanes)
            cell.set(T.max(cell.get(), T.Select(is_seen(block), value, nothing)))
        top = v.let(T.max(before, v.find_largest(cell.get(), "float32", lanes)))
        total = v.Cell(v.constant(0.0, "float32", lanes))
        with T.serial(size // lanes) as block:
            at = v.let(row + block * lanes)
            value = v.load(self._scratch, at, lanes) - v.splat(top, lanes)
            weight = v.take_exponential(value, lanes)
            weight = v.let(T.Select(is_seen(block), weight, v.constant(0.0, "float32", lanes)))
            v.store(self._scratch, at, weight, lanes)
            total.set(total.get() + weight)
        factor = v.let(v.take_exponential(before - top, 1))
        T.buffer_store(self._scratch, top, [self._tops + query])
        summed = self._scratch[self._sums + query] * factor
        own = v.add_lanes(total.get(), "float32", lanes)
        T.buffer_store(self._scratch, summed + own, [self._sums + query])
        with T.If(factor != T.float32(1.0)), T.Then():

            def scale(element: v.Expr, count: int) -> None:
                at = self._mixed + query * self._width + element
                value = v.load(self._scratch, at, count) * v.splat(factor, count)
                v.store(self._scratch, at, value, count)

            walk(T.int64(0), self._width, scale)

    def _mix(self, query: v.Expr, base: v.Expr, size: v.Expr) -> None:
        """Add the values of a block of positions, times the weights of some queries."""
        lanes = self._lanes
        numbers = [v.let(T.min(query + k, self._last)) for k in range(QUERIES)]
        rows = [v.let(self._scores + number * SCORES) for number in numbers]
        with T.serial(self._width // lanes) as piece:
            cells = [v.Cell(v.constant(0.0, "float32", lanes)) for _ in numbers]
            with T.serial(size) as position:
                raw = v.load(self._values, base + position * self._width + piece * lanes, lanes)
                value = v.let(v.cast(raw, "float32", lanes))
                for row, cell in zip(rows, cells, strict=True):
                    weight = v.splat(self._scratch[row + position], lanes)
                    cell.set(T.fma(value, weight, cell.get()))
            for place, (number, cell) in enumerate(zip(numbers, cells, strict=True)):
                # The last queries may be the last one again.
                with T.If(query + place <= self._last), T.Then():
                    at = v.let(self._mixed + number * self._width + piece * lanes)
                    old = v.load(self._scratch, at, lanes)
                    v.store(self._scratch, at, old + cell.get(), lanes)

    def _finish(self, query: v.Expr) -> None:
        token, head = self._find(query)
        inverse = v.let(T.float32(1.0) / self._scratch[self._sums + query])
        target = v.let((self._first + token) * self._y_stride + head * self._width)

        def emit(element: v.Expr, lanes: int) -> None:
            value = v.load(self._scratch, self._mixed + query * self._width + element, lanes)
            v.store(self._y, target + element, value * v.splat(inverse, lanes), lanes)

        walk(T.int64(0), self._width, emit)


def emit_attend_many(isa: Isa, table: Table) -> None:
    """The same for tokens of a chunk, which follow each other; items are tiles of tokens of the
    heads that share keys.  Heads fill registers, and the cache has whole registers of positions."""
    tile = _Tile(isa, table)
    tokens = table.take("tokens")
    sequences = table.take_array("sequences", "int32")
    positions = table.take_array("positions", "int32")
    sequence_stride, head_stride = table.take("sequence_stride"), table.take("head_stride")
    size = table.take("tile")
    heads = v.let(table.take("heads") // table.take("group"))
    with T.serial(table.first, table.end) as item:
        # The last tiles, which see most, come first.
        number = v.let((tokens + size - 1) // size - 1 - item // heads)
        head = v.let(item - item // heads * heads)
        first = v.let(number * size)
        end = v.let(T.min(first + size, tokens))
        base = v.let(v.wide(sequences[first]) * sequence_stride + head * head_stride)
        tile.emit(first, end, head, base, v.let(v.wide(positions[first])))
