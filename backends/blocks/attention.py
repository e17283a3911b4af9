"""Attention over the KV cache, of a token. Contexts are cut into at most `PARTS` parts, joined in
order: results depend on positions only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tvm.tirx import Shuffle
from tvm.tirx.script import builder as T

from pi2.backends.blocks.contract import KV_TYPES
from pi2.backends.blocks.elements import add_up, walk
from pi2.backends.blocks.machine import Table, join, pick
from pi2.backends.blocks.sizes import LIST_HEAD, PARTIAL, SCORES, SCORES_ROW
from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.isa import Isa

if TYPE_CHECKING:
    from pi2.plan.documents.plan import KvType

_LEAST = -3.0e38
"""Below every score."""
_PIECES = (4, 1)
"""Registers of a value that are mixed at once."""
_AHEAD = 32
"""Positions by which keys are asked for before they are needed."""


Bases = tuple[v.Expr, v.Expr]
"""First elements of the keys and of the values of a head."""


class Heads:
    """Arguments of attention, and a thread's scratch."""

    def __init__(self, isa: Isa, kind: KvType, table: Table) -> None:
        self.table, self._scratch, self._width = table, table.scratch, table.value_width
        self._lanes, self._level, self._is_scaled = isa.lanes, isa.prefetch_level, kind == "int8"
        self._keys, self._values = (
            table.get_array(name, KV_TYPES[kind]) for name in ("key_cache", "value_cache")
        )
        self._key_scales, self._value_scales = (
            table.get_array(name, "float16") for name in ("key_scales", "value_scales")
        )
        self._ring, self._lap = count_ring(table), T.int64(0)
        self._has_slopes = table.has_slopes != T.int64(0)
        self._scores = v.let(table.thread * (table.scratch_stride // 4))
        self.kv_heads = v.let(table.heads // table.group)

    def find_bases(self, token: v.Expr, head: v.Expr) -> Bases:
        """Return the first elements of the keys and of the values of a token's sequence."""
        own, sequence = self.table, v.let(v.wide(self.table.sequences[token]))
        first = v.let(sequence * own.key_sequence_stride + head * own.key_head_stride)
        return first, v.let(sequence * own.value_sequence_stride + head * own.value_head_stride)

    def enter_ring(self, position: v.Expr) -> None:
        """Let positions from ``position`` on be found, as many as the ring has at most."""
        self._lap = v.let(position // self._ring * self._ring)

    def find_place(self, position: v.Expr) -> v.Expr:
        """Return the place of a position in the KV cache, a ring of positions."""
        place = v.let(position - self._lap)
        return v.let(T.Select(place >= self._ring, place - self._ring, place))

    def find_list(self, token: v.Expr, head: v.Expr) -> v.Expr:
        """Return the first of the positions that are chosen for a query head, after their
        number."""
        own = v.let(token * self.table.lists + head * self.table.lists // self.table.heads)
        return v.let(own * self.table.list_stride + LIST_HEAD)

    def is_whole(self, position: v.Expr) -> v.Expr:
        """Return whether a token at a position sees every key before it."""
        return T.bitwise_or(self.table.reach == T.int64(0), position < self.table.reach)

    def take_key_scales(self, base: v.Expr, position: v.Expr, lanes: int) -> v.Expr:
        """Return the scales of keys from a position on; ``base`` is the element of position 0."""
        place = base // self.table.key_width + position
        return v.let(v.cast(v.load(self._key_scales, place, lanes), "float32", lanes))

    def take_value_scale(self, base: v.Expr, position: v.Expr) -> v.Expr:
        """Return the scale of a value; ``base`` is the element of position 0."""
        return v.cast(self._value_scales[base // self.table.value_stride + position], "float32", 1)

    def find_first(self, position: v.Expr) -> v.Expr:
        """Return the first position that a token sees, which stands at ``position``."""
        zero, window = T.int64(0), self.table.window
        sliding = v.let(T.max(position + 1 - window, zero))
        chunk = v.let(position // T.max(window, T.int64(1)) * window)
        seen = T.Select(self.table.is_chunked != zero, chunk, sliding)
        return v.let(T.Select(window > zero, seen, zero))

    def begin(
        self, head: v.Expr, least: float, part: v.Expr | None = None
    ) -> tuple[v.Cell, v.Cell]:
        """Return the largest score of a head before any key, and the sum of weights: a sink is a
        score of the first part."""
        top, total = v.Cell(T.float32(least)), v.Cell(T.float32(0.0))
        has_sink = self.table.has_sinks != T.int64(0)
        if part is not None:
            has_sink = T.bitwise_and(has_sink, part == T.int64(0))
        with T.If(has_sink), T.Then():
            top.set(self.table.sinks[head])
            total.set(T.float32(1.0))
        return top, total

    def clear(self, mixed: v.Buffer, place: v.Expr) -> None:

        def emit(element: v.Expr, lanes: int) -> None:
            v.store(mixed, place + element, v.constant(0.0, "float32", lanes), lanes)

        walk(T.int64(0), self._width, emit)

    def put(
        self, token: v.Expr, head: v.Expr, mixed: v.Buffer, place: v.Expr, total: v.Expr
    ) -> None:
        """Write the sum of a head of a token, divided by the ``total`` of its weights."""
        inverse = v.let(T.float32(1.0) / total)
        target = v.let(token * self.table.y_stride + head * self._width)

        def emit(element: v.Expr, lanes: int) -> None:
            value = v.load(mixed, place + element, lanes)
            v.store(self.table.y, target + element, value * v.splat(inverse, lanes), lanes)

        walk(T.int64(0), self._width, emit)


class _Parts(Heads):
    """A part of the context of a token, for some heads that share keys; of the positions that are
    ``chosen`` for it, places in their list stand for positions."""

    def __init__(self, isa: Isa, kind: KvType, table: Table, *, chosen: bool = False) -> None:
        super().__init__(isa, kind, table)
        self._is_chosen = chosen
        self.table = table
        self._stride = v.let(self._width + PARTIAL)

    def follow(self, token: v.Expr, head: v.Expr) -> None:
        """Ask for the first keys that the next head sees, or the next token's first head, while the
        last ones of ``head`` are multiplied."""
        is_last = head + 1 == self.kv_heads
        other = T.min(token + T.Select(is_last, T.int64(1), T.int64(0)), self.table.tokens - 1)
        base, _ = self.find_bases(v.let(other), v.let(T.Select(is_last, T.int64(0), head + 1)))
        self._following = v.let(base + self._first * self.table.key_width)

    def look_at(self, token: v.Expr, head: v.Expr) -> None:
        self._token, position = token, v.let(v.wide(self.table.positions[token]))
        self.sees_all, self._list = self.is_whole(position), self.find_list(token, head)
        end = v.Cell(position + 1)
        with T.If(T.bitwise_not(self.sees_all)), T.Then():
            end.set(v.wide(self.table.chosen[self._list - LIST_HEAD]))
        self._end = v.let(end.get())
        self._first = self.find_first(v.let(self._end - 1))
        length, least = v.let(self._end - self._first), T.int64(SCORES)
        even = (length + self.table.parts * 16 - 1) // (self.table.parts * 16) * 16
        self._size = v.let(T.max(least, even))
        self.used = v.let((length + self._size - 1) // self._size)

    def find_partial(self, head: v.Expr, part: v.Expr) -> v.Expr:
        """Return the first element of a part of a head: mix [value_width], largest score, sum.  A
        context of one part needs none that another thread reads."""
        own = v.let((self._token * self.table.heads + head) * self.table.parts + part)
        thread = v.let(self.table.thread * self.table.heads + head)
        return v.let(T.Select(self.table.parts == T.int64(1), thread, own) * self._stride)

    def emit(self, counts: Sequence[int], head: v.Expr, bases: Bases, part: v.Expr) -> None:
        """Compute a part of the heads from ``head`` on that share keys; as many as ``counts`` say
        are computed together.  Every block of positions is read from memory once for all."""
        self._base, self._value_base = bases
        with T.serial(self.table.group) as number:
            self._begin(v.let(head + number), part)
        begin = v.let(self._first + part * self._size)
        stop = v.let(T.min(begin + self._size, self._end))
        with T.serial((stop - begin + SCORES - 1) // SCORES) as block:
            place = v.let(begin + block * SCORES)
            limit = v.let(T.min(place + SCORES, stop))
            if not self._is_chosen:
                self.enter_ring(v.let(place // self._lanes * self._lanes))
            done = T.int64(0)
            for count in counts:
                first, times = done, v.let((self.table.group - done) // count)
                with T.serial(times) as number:
                    own = v.let(head + first + number * count)
                    self._add(count, own, part, place, limit)
                done = v.let(first + times * count)
        with T.If(self.used == T.int64(1)), T.Then(), T.serial(self.table.group) as number:
            mixed = self.find_partial(v.let(head + number), part)
            total = v.let(self.table.partials[mixed + self._width + 1])
            self.put(self._token, v.let(head + number), self.table.partials, mixed, total)

    def _begin(self, head: v.Expr, part: v.Expr) -> None:
        mixed, cells = self.find_partial(head, part), self.begin(head, _LEAST, part)
        self.clear(self.table.partials, mixed)
        for place, cell in enumerate(cells):
            T.buffer_store(self.table.partials, cell.get(), [mixed + self._width + place])

    def _add(self, count: int, head: v.Expr, part: v.Expr, place: v.Expr, limit: v.Expr) -> None:
        """Add positions to the parts of ``count`` heads."""
        heads, width = [v.let(head + k) for k in range(count)], self._width
        self._rows = [v.let(self._scores + 16 + k * SCORES_ROW) for k in range(count)]
        self._mixed = [self.find_partial(own, part) for own in heads]
        row = v.let(self._token * self.table.query_stride)
        self._starts = [v.let(row + own * self.table.key_width) for own in heads]
        self._score(place, limit)
        factors = []
        for own, mixed, scores in zip(heads, self._mixed, self._rows, strict=True):
            slope = v.Cell(T.float32(0.0))
            with T.If(self._has_slopes), T.Then():
                slope.set(self.table.slopes[own])
            top, total = (v.Cell(self.table.partials[mixed + width + k]) for k in range(2))
            factors.append(self._weigh(scores, place, limit, top, total, slope))
            for k, cell in enumerate((top, total)):
                T.buffer_store(self.table.partials, cell.get(), [mixed + width + k])
        self._mix(place, limit, factors)

    def _score(self, place: v.Expr, limit: v.Expr) -> None:
        """Multiply queries with keys, some positions at a time; the first may be before ``place``:
        the cache has room for whole registers of positions."""
        lanes, count = self._lanes, len(self._rows)
        several = lanes // (count if count < 3 else 4)
        low = v.let(place // several * several)
        with T.serial((limit - low + several - 1) // several) as block:
            at = v.let(low + block * several)
            found = self._multiply(several, at)
            scaled = v.let(found * v.splat(self.table.scale, lanes))
            for number, row in enumerate(self._rows):
                own = range(number * several, (number + 1) * several)
                part = pick(scaled, lanes, own) if several > 1 else v.take_lane(scaled, number)
                if self._is_scaled:
                    part = part * self._take_scales(at, several)
                v.store(self._scratch, row + at - place, part, several)

    def _find_position(self, place: v.Expr) -> v.Expr:
        """Return where the KV cache has the position at a place of the context."""
        if self._is_chosen:
            return v.let(v.wide(self.table.chosen[self._list + place]))
        return self.find_place(place)

    def _take_scales(self, at: v.Expr, several: int) -> v.Expr:
        if not self._is_chosen:
            return self.take_key_scales(self._base, self._find_position(at), several)
        places = [self._find_position(at + k) for k in range(several)]
        return v.let(join([self.take_key_scales(self._base, own, 1) for own in places], 1))

    def _find_keys(self, at: v.Expr, several: int) -> list[v.Expr]:
        """Return the first elements of ``several`` keys, and ask for later ones."""
        width = self.table.key_width
        if not self._is_chosen:
            place, behind = self._find_position(at), v.let(at + _AHEAD - self._end)
            base = v.let(self._base + place * width)
            later, following = base + _AHEAD * width, self._following + behind * width
            later = v.let(T.Select(behind < T.int64(0), later, following))
            with T.serial((several * width + 31) // 32) as line:
                v.prefetch(self._keys, later + line * 32, self._level)
            # Values are read when the scores are known.
            value = v.let(self._value_base + place * self.table.value_stride)
            with T.serial((several * self.table.value_stride + 31) // 32) as line:
                v.prefetch(self._values, value + line * 32, self._level)
            return [base + k * width for k in range(several)]
        for k in range(several):
            later = v.let(self._base + self._find_position(at + (_AHEAD + k)) * width)
            with T.serial((width + 31) // 32) as line:
                v.prefetch(self._keys, later + line * 32, self._level)
        return [v.let(self._base + self._find_position(at + k) * width) for k in range(several)]

    def _multiply(self, several: int, at: v.Expr) -> v.Expr:
        """Return products of all queries with ``several`` keys, query by query."""
        lanes, count, width = self._lanes, len(self._starts), self.table.key_width
        zeros = v.constant(0.0, "float32", lanes)
        cells = [[v.Cell(zeros) for _ in range(several)] for _ in range(count)]
        bases, whole = self._find_keys(at, several), v.let(width // lanes)
        with T.serial(whole) as piece:
            inner = v.let(piece * lanes)
            keys = [
                v.let(v.cast(v.load(self._keys, base + inner, lanes), "float32", lanes))
                for base in bases
            ]
            for start, row in zip(self._starts, cells, strict=True):
                own = v.let(v.load(self.table.queries, start + inner, lanes))
                for key, cell in zip(keys, row, strict=True):
                    cell.set(T.fma(key, own, cell.get()))
        sums = [cell.get() for row in cells for cell in row]
        total = v.Cell(add_columns(sums + [zeros] * (lanes - len(sums))))
        with T.serial(whole * lanes, width) as element:
            column = [v.let(v.cast(self._keys[base + element], "float32", 1)) for base in bases]
            own = [v.let(self.table.queries[start + element]) for start in self._starts]
            none = [T.float32(0.0)] * (lanes - count * several)
            products = [v.let(key * query) for query in own for key in column]
            total.set(total.get() + join([*products, *none], 1))
        return v.let(total.get())

    def _weigh(
        self, row: v.Expr, start: v.Expr, limit: v.Expr, top: v.Cell, total: v.Cell, slope: v.Cell
    ) -> v.Expr:
        """Turn scores of positions into weights; returns the factor of all that came before."""
        before, size = v.let(top.get()), v.let(limit - start)
        wide, largest = v.Cell(v.constant(_LEAST, "float32", 16)), v.Cell(before)

        def look(place: v.Expr, count: int) -> None:
            score = v.Cell(v.load(self._scratch, row + place, count))
            with T.If(self.table.cap != T.float32(0.0)), T.Then():
                capped = v.take_tanh(score.get() / v.splat(self.table.cap, count), count)
                score.set(capped * v.splat(self.table.cap, count))
                v.store(self._scratch, row + place, score.get(), count)
            with T.If(self._has_slopes), T.Then():
                behind = v.let(v.cast(start + place - self._end + 1, "float32", 1))
                far = v.splat(behind, count)
                if count > 1:
                    far = far + v.list_constants(range(count), "float32")
                score.set(score.get() + far * v.splat(slope.get(), count))
                v.store(self._scratch, row + place, score.get(), count)
            cell = wide if count > 1 else largest
            cell.set(T.max(cell.get(), score.get()))

        def exponentiate(place: v.Expr, count: int) -> v.Expr:
            value = v.load(self._scratch, row + place, count) - v.splat(now, count)
            weight = v.let(v.take_exponential(value, count))
            v.store(self._scratch, row + place, weight, count)
            return weight

        walk(T.int64(0), size, look)
        now = v.let(T.max(largest.get(), v.find_largest(wide.get(), 16)))
        factor = v.let(v.take_exponential(before - now, 1))
        top.set(now)
        total.set(total.get() * factor + add_up(T.int64(0), size, exponentiate))
        return factor

    def _mix(self, place: v.Expr, limit: v.Expr, factors: Sequence[v.Expr]) -> None:
        """Add weighed values to the sum so far, times ``factors``."""

        def mix(element: v.Expr, pieces: int, lanes: int) -> None:
            cells = []
            for mixed, factor in zip(self._mixed, factors, strict=True):
                for piece in range(pieces):
                    old = v.load(self.table.partials, mixed + element + piece * lanes, lanes)
                    cells.append(v.Cell(old * v.splat(factor, lanes)))
            with T.serial(place, limit) as position:
                own = self._find_position(position)
                at = v.let(self._value_base + own * self.table.value_stride + element)
                values = [
                    v.let(v.cast(v.load(self._values, at + k * lanes, lanes), "float32", lanes))
                    for k in range(pieces)
                ]
                for number, row in enumerate(self._rows):
                    share = self._scratch[row + position - place]
                    if self._is_scaled:
                        share = share * self.take_value_scale(self._value_base, own)
                    weight = v.let(v.splat(v.let(share), lanes))
                    for k, value in enumerate(values):
                        cell = cells[number * pieces + k]
                        cell.set(T.fma(value, weight, cell.get()))
            for number, cell in enumerate(cells):
                mixed, piece = self._mixed[number // pieces], number % pieces
                v.store(self.table.partials, mixed + element + piece * lanes, cell.get(), lanes)

        done = T.int64(0)
        for pieces, lanes in (*((pieces, self._lanes) for pieces in _PIECES), (1, 1)):
            size = pieces * lanes
            begin, times = done, v.let((self._width - done) // size)
            with T.serial(times) as number:
                mix(v.let(begin + number * size), pieces, lanes)
            done = v.let(begin + times * size)

    def emit_join(self, head: v.Expr) -> None:
        with T.If(self.used > T.int64(1)), T.Then():
            self._join(head)

    def _join(self, head: v.Expr) -> None:
        first, width = self.find_partial(head, T.int64(0)), self._width
        top, total = v.Cell(T.float32(_LEAST)), v.Cell(T.float32(0.0))
        with T.serial(self.used) as part:
            top.set(T.max(top.get(), self.table.partials[first + part * self._stride + width]))
        with T.serial(self.used) as part:
            at = v.let(first + part * self._stride + width)
            factor = v.let(v.take_exponential(self.table.partials[at] - top.get(), 1))
            total.set(total.get() + self.table.partials[at + 1] * factor)
            T.buffer_store(self.table.partials, factor, [at])
        inverse = v.let(T.float32(1.0) / total.get())
        target = v.let(self._token * self.table.y_stride + head * width)

        def add(element: v.Expr, lanes: int) -> None:
            cell = v.Cell(v.constant(0.0, "float32", lanes))
            with T.serial(self.used) as part:
                at = v.let(first + part * self._stride)
                factor = v.splat(v.let(self.table.partials[at + width]), lanes)
                mixed = v.load(self.table.partials, at + element, lanes)
                cell.set(T.fma(mixed, factor, cell.get()))
            v.store(self.table.y, target + element, cell.get() * v.splat(inverse, lanes), lanes)

        walk(T.int64(0), width, add)


def emit_attend(
    isa: Isa, kind: KvType, counts: Sequence[int], table: Table, *, chosen: bool = False
) -> None:
    """Mix the values before tokens, or the ``chosen`` ones; items are parts of the heads of a token
    that share keys, of which ``counts`` are computed together."""
    own = _Parts(isa, kind, table, chosen=chosen)
    with T.serial(table.first, table.end) as item:
        rest = v.let(item // table.parts)
        part = v.let(item - rest * table.parts)
        token = v.let(rest // own.kv_heads)
        head = v.let(rest - token * own.kv_heads)
        own.look_at(token, v.let(head * table.group))
        is_own = T.bitwise_not(own.sees_all) if chosen else own.sees_all
        with T.If(T.bitwise_and(is_own, part < own.used)), T.Then():
            if not chosen:
                own.follow(token, head)
            own.emit(counts, v.let(head * table.group), own.find_bases(token, head), part)


def emit_attend_chosen(isa: Isa, kind: KvType, counts: Sequence[int], table: Table) -> None:
    emit_attend(isa, kind, counts, table, chosen=True)


def emit_join(isa: Isa, kind: KvType, table: Table) -> None:
    """Join the parts of heads; items are heads of tokens."""
    own = _Parts(isa, kind, table)
    with T.serial(table.first, table.end) as item:
        token = v.let(item // table.heads)
        head = v.let(item - token * table.heads)
        own.look_at(token, head)
        own.emit_join(head)


def count_ring(table: Table) -> v.Expr:
    """Return the positions that a KV cache has of a sequence; latent vectors are of all heads."""
    each, whole = table.key_head_stride, table.key_sequence_stride
    return v.let(T.Select(each > T.int64(0), each, whole) // table.key_width)


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
