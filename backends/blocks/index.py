"""The index that chooses keys for attention: scores of all tokens before a query, and the list of
the best ones, in their order; of equal scores, the first position's counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm.tirx.script import builder as T

from pi2.backends.blocks.contract import KV_TYPES
from pi2.backends.blocks.elements import walk
from pi2.backends.blocks.machine import Table, join, turn_square
from pi2.backends.blocks.sizes import LIST_HEAD, QUERIES
from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.isa import Isa
from pi2.plan.arithmetic.units import find_index_type

if TYPE_CHECKING:
    from pi2.plan.documents.plan import KvType

_LEAST, _MOST = -3.0e38, 3.0e38
"""Below every score, and above."""
_LANES = 16


class _Index:
    """Arguments of an index.  Scores are rows of a list's positions, for each token of a step, or
    for each thread in a chunk; a list has its length first."""

    def __init__(self, isa: Isa, kind: KvType, table: Table) -> None:
        self._lanes, self._thread = isa.lanes, table.thread
        self.table = table
        self._keys = table.get_array("key_cache", KV_TYPES[find_index_type(kind)])
        self._turned = v.let(table.thread * (table.scratch_stride // 4))

    def find_end(self, token: v.Expr) -> v.Expr:
        """Return the number of tokens that a token sees."""
        return v.let(v.wide(self.table.positions[token]) + 1)

    def find_row(self, token: v.Expr) -> v.Expr:
        """Return the first score of a token."""
        own = T.Select(self.table.parts == T.int64(1), self._thread, token)
        return v.let(own * self.table.lists * self.table.scores_stride)

    def rank(self, token: v.Expr, row: v.Expr, begin: v.Expr, end: v.Expr) -> None:
        """Write the scores of positions ``begin``, a multiple of the lanes, to ``end``."""
        lanes, zeros = self._lanes, v.constant(0.0, "float32", self._lanes)
        base = v.let(v.wide(self.table.sequences[token]) * self.table.key_sequence_stride)
        has_weights = self.table.has_weights != T.int64(0)
        with T.serial((end - begin + lanes - 1) // lanes) as number:
            place = v.let(begin + number * lanes)
            self._turn(v.let(base + place * self.table.width))
            total = v.Cell(zeros)
            with T.serial((self.table.heads + QUERIES - 1) // QUERIES) as several:
                heads = [v.let(several * QUERIES + k) for k in range(QUERIES)]
                for head, found in zip(heads, self._multiply(token, heads), strict=True):
                    with T.If(head < self.table.heads), T.Then(), T.If(has_weights):
                        with T.Then():
                            weight = self.table.weights[token * self.table.weights_stride + head]
                            open_score = T.max(found, zeros)
                            total.set(T.fma(open_score, v.splat(weight, lanes), total.get()))
                        with T.Else():
                            v.store(
                                self.table.scores,
                                row + head * self.table.scores_stride + place,
                                found,
                                lanes,
                            )
            with T.If(has_weights), T.Then():
                v.store(self.table.scores, row + place, total.get(), lanes)

    def _turn(self, base: v.Expr) -> None:
        """Transpose the keys of a register's positions."""
        lanes, width = self._lanes, self.table.width
        whole = v.let(width // lanes)
        with T.serial(whole) as square:
            places = (base + lane * width + square * lanes for lane in range(lanes))
            keys = (v.load(self._keys, place, lanes) for place in places)
            rows = [v.let(v.cast(own, "float32", lanes)) for own in keys]
            for place, column in enumerate(turn_square(rows, lanes)):
                v.store(
                    self.table.scratch,
                    self._turned + (square * lanes + place) * lanes,
                    column,
                    lanes,
                )
        with T.serial(whole * lanes, width) as element:
            own = [
                v.let(v.cast(self._keys[base + lane * width + element], "float32", 1))
                for lane in range(lanes)
            ]
            v.store(self.table.scratch, self._turned + element * lanes, join(own, 1), lanes)

    def _multiply(self, token: v.Expr, heads: list[v.Expr]) -> list[v.Expr]:
        """Return the products of heads, or of the last one, with the transposed keys."""
        lanes, last = self._lanes, self.table.heads - 1
        starts = [
            v.let(token * self.table.query_stride + T.min(head, last) * self.table.width)
            for head in heads
        ]
        cells = [v.Cell(v.constant(0.0, "float32", lanes)) for _ in heads]
        with T.serial(self.table.width) as element:
            keys = v.let(v.load(self.table.scratch, self._turned + element * lanes, lanes))
            for start, cell in zip(starts, cells, strict=True):
                own = v.splat(self.table.queries[start + element], lanes)
                cell.set(T.fma(keys, own, cell.get()))
        return [v.let(cell.get()) for cell in cells]

    def choose(self, token: v.Expr, number: v.Expr, row: v.Expr, end: v.Expr) -> None:
        """Write the list ``number`` of a token, which sees ``end`` tokens."""
        many = v.Cell(end)
        with T.If(self.table.block > T.int64(1)), T.Then():
            self._take_blocks(row, end)
            many.set((end + self.table.block - 1) // self.table.block)
        count = v.let(many.get())
        least = self._find_least(row, count)
        above = v.let(self._count_from(row, count, v.let(least + 1)))
        ties = v.Cell(T.cast(self.table.count, "int32") - above)
        first = v.let((token * self.table.lists + number) * self.table.list_stride + LIST_HEAD)
        place = v.Cell(first)
        with T.serial(count) as item:
            key = v.let(_order(self.table.scores[row + item], 1))
            is_chosen = v.Cell(T.cast(key > least, "int32"))
            with T.If(T.bitwise_and(key == least, ties.get() > T.int32(0))), T.Then():
                is_chosen.set(T.int32(1))
                ties.set(ties.get() - 1)
            with T.If(is_chosen.get() != T.int32(0)), T.Then():
                begin = v.let(item * self.table.block)
                with T.serial(begin, T.min(begin + self.table.block, end)) as position:
                    T.buffer_store(self.table.chosen, T.cast(position, "int32"), [place.get()])
                    place.set(place.get() + 1)
        length = T.cast(place.get() - first, "int32")
        T.buffer_store(self.table.chosen, length, [first - LIST_HEAD])

    def _take_blocks(self, row: v.Expr, end: v.Expr) -> None:
        """Put the largest score of each block in place of the first scores; the last blocks have
        one above all."""
        blocks = v.let((end + self.table.block - 1) // self.table.block)
        with T.serial(blocks) as number:
            wide, rest = v.Cell(v.constant(_LEAST, "float32", _LANES)), v.Cell(T.float32(_LEAST))

            def look(place: v.Expr, lanes: int) -> None:
                cell = wide if lanes > 1 else rest
                cell.set(T.max(cell.get(), v.load(self.table.scores, row + place, lanes)))

            begin = v.let(number * self.table.block)
            walk(begin, v.let(T.min(begin + self.table.block, end)), look)
            rest.set(T.max(rest.get(), v.find_largest(wide.get(), _LANES)))
            with T.If(number >= blocks - self.table.local), T.Then():
                rest.set(T.float32(_MOST))
            T.buffer_store(self.table.scores, rest.get(), [row + number])

    def _find_least(self, row: v.Expr, count: v.Expr) -> v.Expr:
        """Return the order of the last score that is chosen: bit by bit, the largest number that
        enough scores reach."""
        wanted, found = v.let(T.cast(self.table.count, "int32")), v.Cell(T.int32(-(1 << 31)))
        with T.serial(32) as step:
            bit = T.shift_left(T.int32(1), T.int32(31) - T.cast(step, "int32"))
            tried = v.let(T.bitwise_xor(found.get(), bit))
            with T.If(self._count_from(row, count, tried) >= wanted), T.Then():
                found.set(tried)
        return v.let(found.get())

    def _count_from(self, row: v.Expr, count: v.Expr, least: v.Expr) -> v.Expr:
        """Return how many scores have an order of ``least`` or more."""
        wide, rest = v.Cell(v.constant(0, "int32", _LANES)), v.Cell(T.int32(0))

        def look(place: v.Expr, lanes: int) -> None:
            cell = wide if lanes > 1 else rest
            own = _order(v.load(self.table.scores, row + place, lanes), lanes)
            one, none = v.constant(1, "int32", lanes), v.constant(0, "int32", lanes)
            cell.set(cell.get() + T.Select(own >= v.splat(least, lanes), one, none))

        walk(T.int64(0), count, look)
        return v.let(v.add_lanes(wide.get(), "int32", _LANES) + rest.get())


def _order(score: v.Expr, lanes: int) -> v.Expr:
    """Return whole numbers in the order of scores."""
    bits = v.let(v.reinterpret(score, "int32", lanes))
    signs = T.shift_right(bits, v.constant(31, "int32", lanes))
    return v.let(T.bitwise_xor(bits, T.bitwise_and(signs, v.constant(0x7FFFFFFF, "int32", lanes))))


def emit_rank(isa: Isa, kind: KvType, table: Table) -> None:
    """Write scores of tokens before a token; items are parts of its context."""
    own = _Index(isa, kind, table)
    with T.serial(table.first, T.Select(table.parts > T.int64(1), table.end, table.first)) as item:
        token = v.let(item // table.parts)
        end = own.find_end(token)
        each = v.let((end + table.parts * _LANES - 1) // (table.parts * _LANES) * _LANES)
        begin = v.let((item - token * table.parts) * each)
        stop = v.let(T.min(begin + each, end))
        with T.If(T.bitwise_and(end > table.reach, begin < stop)), T.Then():
            own.rank(token, own.find_row(token), begin, stop)


def emit_choose(isa: Isa, kind: KvType, table: Table) -> None:
    """Write the lists of tokens that see more than ``reach`` tokens, with scores of their own if
    contexts have one part; items are tokens."""
    own = _Index(isa, kind, table)
    with T.serial(table.first, table.end) as token:
        end = own.find_end(token)
        with T.If(end > table.reach), T.Then():
            row = own.find_row(token)
            with T.If(table.parts == T.int64(1)), T.Then():
                own.rank(token, row, T.int64(0), end)
            with T.serial(table.lists) as number:
                own.choose(token, number, v.let(row + number * table.scores_stride), end)
