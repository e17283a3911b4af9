"""Products of queries with keys and of shares with values, a block and a tile of queries at a time.

In float32, of keys and values of any type; as integers: `pi2.backends.kernels.mixing_integers`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.kv import Cache, count_lanes, load_scales
from pi2.backends.kernels.mixing_layout import LANES
from pi2.backends.kernels.mixing_room import MixingRoom
from pi2.backends.kernels.spec import KV_BLOCK, KernelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Keys and values of one head: ``parts`` times `KV_BLOCK` tokens from ``token`` on."""

    head: v.Expr
    """Number of the head times the cache's context."""
    token: v.Expr
    parts: v.Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Queries that are multiplied together, from slot ``first`` on."""

    first: v.Expr
    start: v.Expr
    """Where the task's first token stands."""
    queries: v.Expr
    """Queries of the task."""


class Arithmetic(Protocol):
    """How a task multiplies."""

    def emit_query(self, slot: v.Expr) -> None:
        """Prepare the query of a slot, whose places are known, and clear its sum."""

    def emit_block(self, block: Block) -> None:
        """Prepare keys and values."""

    def emit_scores(self, tile: Tile, block: Block) -> None:
        """Set ``scores`` float32 [rows, block] of the room."""

    def emit_row_shares(self, row: v.Expr, shares: list[v.Expr]) -> None:
        """Keep a row's shares of the block, float32 x 16 each."""

    def emit_shares(self) -> None:
        """Prepare the shares of all rows."""

    def emit_sums(self, tile: Tile, block: Block) -> None:
        """Multiply the sums of the tile by ``factors`` and add the shares' sums of values, times
        ``own_factors``."""


@dataclass(frozen=True, slots=True)
class BaseArithmetic:
    """What both have in common."""

    spec: KernelSpec
    cache: Cache
    room: MixingRoom
    qkv: v.Buffer
    output: v.Buffer
    """Where sums are."""
    codes: v.Buffer
    """Where codes of queries are kept."""

    @property
    def lanes(self) -> int:
        """Lanes of a vector of values."""
        return count_lanes(self.spec.head_dim)

    def clear_sum(self, slot: v.Expr) -> None:
        """Begin a query's sum with nothing."""
        lanes = self.lanes
        result = v.let(self.room.integers["result_places"].load(slot, 1))
        with T.serial(self.spec.head_dim // lanes * self.cache.once) as part:
            v.store(self.output, result + part * lanes, v.constant(0.0, "float32", lanes), lanes)

    def emit_runs(self, count: int, emit: Callable[[v.Expr, int], None]) -> None:
        """Call ``emit(first, number)`` for ``count`` vectors, ``columns`` at a time."""
        columns = self.room.layout.columns
        whole, rest = divmod(count, columns)
        if whole:
            with T.serial(whole * self.cache.once) as run:
                emit(v.let(run * columns), columns)
        if rest:
            emit(T.int32(whole * columns), rest)

    def emit_scales(self, block: Block) -> None:
        """Keep the scales of a block."""
        scales = (self.cache.key_scales, self.cache.value_scales)
        for source, name in zip(scales, ("key_scales", "value_scales"), strict=True):
            if source is not None:
                with T.serial(block.parts) as part:
                    first = v.let(T.floordiv(block.token, KV_BLOCK) + part)
                    value = load_scales(source, block.head, first)
                    self.room.floats[name].store(part * KV_BLOCK, value, KV_BLOCK)

    def store_scores(self, row: int, place: v.Expr, score: v.Expr) -> None:
        """Keep 16 scores of a row."""
        if self.spec.score_cap is not None:
            score = v.take_cap(score, self.spec.score_cap, LANES)
        layout = self.room.layout
        self.room.floats["scores"].store(row * layout.block + place, score, LANES)

    def keep_shares(self, row: v.Expr, shares: list[v.Expr]) -> list[v.Expr]:
        """Put shares times the values' scales where scores were."""
        room, weighted = self.room, []
        for part, share in enumerate(shares):
            if self.cache.value_scales is not None:
                scales = room.floats["value_scales"].load(part * LANES, LANES)
                share = v.let(share * scales)
            room.floats["scores"].store(row * room.layout.block + part * LANES, share, LANES)
            weighted.append(share)
        return weighted

    def add_to_sums(self, tile: Tile, place: v.Expr, added: list[v.Expr]) -> None:
        """Add to the elements from ``place`` on of each query's sum."""
        room, lanes = self.room, self.lanes
        places, totals = [], []
        for row, value in enumerate(added):
            at = v.let(room.integers["result_places"].load(tile.first + row, 1) + place)
            factor = v.splat(room.floats["factors"].load(row, 1), lanes)
            own = v.splat(room.floats["own_factors"].load(row, 1), lanes)
            places.append(at)
            totals.append(v.let(T.fma(value, own, v.load(self.output, at, lanes) * factor)))
        # All are read before any is written: those left over repeat the last query.
        for at, total in zip(places, totals, strict=True):
            v.store(self.output, at, total, lanes)


@dataclass(frozen=True, slots=True)
class FloatArithmetic(BaseArithmetic):
    """float32: keys and values are converted as they are loaded."""

    def emit_query(self, slot: v.Expr) -> None:
        """Take it as it is."""
        self.clear_sum(slot)

    def emit_block(self, block: Block) -> None:
        """Take keys and values as they are."""
        self.emit_scales(block)

    def emit_scores(self, tile: Tile, block: Block) -> None:
        """Multiply queries with keys."""
        room, layout, cache = self.room, self.room.layout, self.cache
        size = self.spec.head_dim

        def emit(first: v.Expr, number: int) -> None:
            cells = make_cells(layout.rows, number, "float32", LANES)
            places = [
                v.let(room.integers["query_places"].load(tile.first + row, 1))
                for row in range(layout.rows)
            ]
            # Parts that are not there repeat the last one, and have shares of 0.
            starts = [
                v.let(self._find_part(block, v.let(T.min(first + column, block.parts - 1))) * size)
                for column in range(number)
            ]
            with T.serial(size * cache.once) as element:
                keys = [
                    v.let(cache.load(cache.keys, start + v.wide(element * KV_BLOCK), LANES))
                    for start in starts
                ]
                for place, own in zip(places, cells, strict=True):
                    query = v.let(v.splat(self.qkv[place + element], LANES))
                    for key, cell in zip(keys, own, strict=True):
                        cell.set(T.fma(query, key, cell.get()))
            for row, own in enumerate(cells):
                for column, cell in enumerate(own):
                    at = v.let((first + column) * LANES)
                    score = cell.get()
                    if cache.key_scales is not None:
                        score = score * room.floats["key_scales"].load(at, LANES)
                    self.store_scores(row, at, score)

        self.emit_runs(layout.block // LANES, emit)

    def _find_part(self, block: Block, part: v.Expr) -> v.Expr:
        """Return the first token of a part, counted through all heads."""
        return block.head + v.wide(block.token + part * KV_BLOCK)

    def emit_row_shares(self, row: v.Expr, shares: list[v.Expr]) -> None:
        """Keep them, times the values' scales."""
        self.keep_shares(row, shares)

    def emit_shares(self) -> None:
        """Nothing is left to do."""

    def emit_sums(self, tile: Tile, block: Block) -> None:
        """Multiply shares with values."""
        room, layout, cache = self.room, self.room.layout, self.cache
        size, lanes = self.spec.head_dim, self.lanes
        start = v.let(self._find_part(block, T.int32(0)) * size)

        def emit(first: v.Expr, number: int) -> None:
            cells = make_cells(layout.rows, number, "float32", lanes)
            with T.serial(block.parts * KV_BLOCK) as token:
                values = [
                    v.let(
                        cache.load(
                            cache.values,
                            start + v.wide(token * size + (first + column) * lanes),
                            lanes,
                        )
                    )
                    for column in range(number)
                ]
                for row, own in enumerate(cells):
                    share = room.floats["scores"].load(row * layout.block + token, 1)
                    share = v.let(v.splat(share, lanes))
                    for value, cell in zip(values, own, strict=True):
                        cell.set(T.fma(share, value, cell.get()))
            for column in range(number):
                added = [own[column].get() for own in cells]
                self.add_to_sums(tile, v.let((first + column) * lanes), added)

        self.emit_runs(size // lanes, emit)


def find_most(values: list[v.Expr]) -> v.Expr:
    """Return the larger of several vectors, lane by lane."""
    while len(values) > 1:
        pairs = [T.max(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[2 * len(pairs) :]
    return values[0]


def make_cells(rows: int, columns: int, dtype: str, lanes: int) -> list[list[v.Cell]]:
    """Return sums of nothing."""
    return [[v.Cell(v.constant(0, dtype, lanes)) for _ in range(columns)] for _ in range(rows)]
