"""Attention of several tokens of a sequence, block by block of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.attention import NEVER, find_first, find_share
from pi2.backends.kernels.kv import Cache, count_lanes
from pi2.backends.kernels.mixing_arithmetic import (
    Arithmetic,
    Block,
    FloatArithmetic,
    IntegerArithmetic,
    MixingRoom,
    Room,
    Tile,
    find_most,
)
from pi2.backends.kernels.mixing_layout import LANES
from pi2.backends.kernels.schedule import Schedule
from pi2.backends.kernels.spec import KV_BLOCK
from pi2.plan.weights.layout import round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens of a sequence, their queries and the target of their mixed values."""

    schedule: Schedule
    qkv: v.Buffer
    """float32 [tokens, qkv_rows]: queries, turned and multiplied with the scores' scale."""
    cache: Cache
    """The KV cache, the tokens' own included."""
    output: v.Buffer
    """float32 [tokens, width]."""
    codes: v.Buffer
    """int8, room for two bytes of every element of the queries."""
    tokens: v.Expr
    position: v.Expr
    """Position of the first of them."""
    sinks: v.Buffer | None
    """float32 [heads]: scores that no token has."""
    room: Room


def emit_chunk_attention(chunk: Chunk) -> None:
    """Set ``output`` to what the heads of all tokens mix."""
    spec = chunk.schedule.spec
    threads = spec.threads
    most = chunk.room.layout.tokens
    # Few tokens are divided among the threads, too.
    work = v.let(chunk.tokens * spec.attention.kv_heads)
    each = v.let(T.min(most, T.floordiv(work + threads - 1, threads)))
    tiles = v.let(T.floordiv(chunk.tokens + each - 1, each))
    tasks = v.let(tiles * spec.attention.kv_heads)
    with T.parallel(threads) as thread, T.serial(T.floordiv(tasks + threads - 1, threads)) as turn:
        # Back and forth: no thread gets the later token of every pair.
        place = T.Select(T.floormod(turn, 2) == 0, thread, threads - 1 - thread)
        task = v.let(turn * threads + place)
        with T.If(task < tasks), T.Then():
            first = v.let(T.floormod(task, tiles) * each)
            count = v.let(T.min(chunk.tokens - first, each))
            head = v.let(T.floordiv(task, tiles))
            _Task(chunk, chunk.room.take_thread(thread), first, count, head).emit()


@dataclass(frozen=True, slots=True)
class _Task:
    """``count`` tokens of a chunk from ``first`` on, with the heads of ``kv_head``."""

    chunk: Chunk
    room: MixingRoom
    first: v.Expr
    count: v.Expr
    kv_head: v.Expr

    @property
    def group(self) -> int:
        """Heads that share a key and value head."""
        spec = self.chunk.schedule.spec
        return spec.attention.heads // spec.attention.kv_heads

    def emit(self) -> None:
        chunk, room, spec = self.chunk, self.room, self.chunk.schedule.spec
        kind = IntegerArithmetic if room.layout.rounds else FloatArithmetic
        arithmetic = kind(spec, chunk.cache, room, chunk.qkv, chunk.output, chunk.codes)
        rows, length = room.layout.rows, room.layout.block
        queries = v.let(self.count * self.group)
        tiles = v.let(T.floordiv(queries + rows - 1, rows))
        with T.serial(tiles * rows) as slot:
            # Slots of the last tile that are left over repeat the last query.
            token, head = self._find_query(v.let(T.min(slot, queries - 1)))
            place = v.let(token * spec.attention.projected + head * spec.attention.head_dim)
            room.integers["query_places"].store(slot, place, 1)
            place = v.let(token * spec.attention.stored_query + head * spec.attention.head_dim)
            room.integers["result_places"].store(slot, place, 1)
            room.floats["tops"].store(slot, v.constant(NEVER, "float32"), 1)
            zeros = v.constant(0.0, "float32", LANES)
            room.floats["totals"].store(slot * LANES, zeros, LANES)
            arithmetic.emit_query(slot)
        start = v.let(chunk.position + self.first)
        begin = v.let(T.floordiv(find_first(spec, start), length))
        end = v.let(T.floordiv(start + self.count - 1, length) + 1)
        head = v.let(v.wide(self.kv_head) * v.wide(chunk.cache.context))
        with T.serial(end - begin) as step:
            token = v.let((begin + step) * length)
            seen = v.let(T.min(start + self.count - token, length))
            block = Block(
                head=head, token=token, parts=v.let(T.floordiv(seen + KV_BLOCK - 1, KV_BLOCK))
            )
            arithmetic.emit_block(block)
            with T.serial(tiles) as tile:
                lowest = v.let(start + T.floordiv(tile * rows, self.group))
                last = T.min(tile * rows + rows, queries) - 1
                highest = v.let(start + T.floordiv(last, self.group))
                sees = highest >= token
                if spec.attention.window is not None:
                    sees = T.And(sees, find_first(spec, lowest) < token + length)
                with T.If(sees), T.Then():
                    own = Tile(first=v.let(tile * rows), start=start, queries=queries)
                    arithmetic.emit_scores(own, block)
                    _emit_shares(self, arithmetic, own, block)
                    arithmetic.emit_sums(own, block)
        with T.serial(queries) as slot:
            self._emit_result(slot)

    def sees_all(self, tile: Tile, block: Block) -> v.Expr:
        spec, layout = self.chunk.schedule.spec, self.room.layout
        lowest = v.let(tile.start + T.floordiv(tile.first, self.group))
        sees = block.token + layout.block - 1 <= lowest
        if spec.attention.window is not None:
            last = T.min(tile.first + layout.rows, tile.queries) - 1
            highest = v.let(tile.start + T.floordiv(last, self.group))
            sees = T.And(sees, find_first(spec, highest) <= block.token)
        return sees

    def ask_ahead(self, block: Block, slot: v.Expr) -> None:
        """Ask for a query's part of the next block: all at once would wait for each other."""
        cache, layout = self.chunk.cache, self.room.layout
        size = self.chunk.schedule.spec.attention.head_dim
        part = round_up(ceil(layout.block * size / layout.slots), cache.line)
        first = v.let((block.head + v.wide(block.token + layout.block)) * size + slot * part)
        for line in range(0, part, cache.line):
            for buffer in (cache.keys, cache.values):
                v.prefetch(buffer, first + line)

    def _find_query(self, slot: v.Expr) -> tuple[v.Expr, v.Expr]:
        token = v.let(self.first + T.floordiv(slot, self.group))
        return token, v.let(self.kv_head * self.group + T.floormod(slot, self.group))

    def _emit_result(self, slot: v.Expr) -> None:
        chunk, room, spec = self.chunk, self.room, self.chunk.schedule.spec
        totals = room.floats["totals"].load(slot * LANES, LANES)
        total = v.let(v.add_lanes(totals, "float32", LANES))
        sink = None if chunk.sinks is None else chunk.sinks[self._find_query(slot)[1]]
        share = find_share(spec, room.floats["tops"].load(slot, 1), total, sink)
        factor = v.let(share)
        lanes = count_lanes(spec.attention.head_dim)
        result = v.let(room.integers["result_places"].load(slot, 1))
        with T.serial(spec.attention.head_dim // lanes * chunk.cache.once) as part:
            place = v.let(result + part * lanes)
            value = v.load(chunk.output, place, lanes) * v.splat(factor, lanes)
            v.store(chunk.output, place, value, lanes)


def _emit_shares(task: _Task, arithmetic: Arithmetic, tile: Tile, block: Block) -> None:
    """Turn the scores of a tile into shares, and find the factors of old and new sums.

    Step by step for all rows: what one row waits for in a step, others compute in the meantime."""
    room, once = task.room, task.chunk.cache.once
    rows = room.layout.rows
    with T.If(task.sees_all(tile, block)):
        with T.Then():
            _emit_row_shares(task, arithmetic, tile, block, is_masked=False)
        with T.Else():
            _emit_row_shares(task, arithmetic, tile, block, is_masked=True)
    own, factors = room.floats["own_factors"], room.floats["factors"]
    before = v.let(room.floats["tops"].load(tile.first, rows))
    here = v.let(room.floats["block_tops"].load(0, rows))
    top = v.let(T.max(before, here))
    factors.store(0, v.take_exponential(before - top, rows), rows)
    own.store(0, v.take_exponential(here - top, rows), rows)
    room.floats["tops"].store(tile.first, top, rows)
    with T.serial(rows * once) as row:
        place = v.let((tile.first + row) * LANES)
        total = room.floats["totals"].load(place, LANES) * v.splat(factors.load(row, 1), LANES)
        found = room.floats["block_totals"].load(row * LANES, LANES)
        total = T.fma(found, v.splat(own.load(row, 1), LANES), total)
        room.floats["totals"].store(place, total, LANES)
        task.ask_ahead(block, v.let(tile.first + row))
    arithmetic.emit_shares()


def _emit_row_shares(
    task: _Task, arithmetic: Arithmetic, tile: Tile, block: Block, *, is_masked: bool
) -> None:
    """Turn each query's scores into shares of the block's largest, and add these up."""
    room, spec, once = task.room, task.chunk.schedule.spec, task.chunk.cache.once
    length, rows = room.layout.block, room.layout.rows
    scores = room.floats["scores"]
    parts = range(0, length, LANES)
    with T.serial(rows * once) as row:
        base = v.let(row * length)
        found = []
        for part in parts:
            score = scores.load(base + part, LANES)
            if is_masked:
                slot = v.let(T.min(tile.first + row, tile.queries - 1))
                last = v.let(tile.start + T.floordiv(slot, task.group))
                where = v.let(T.ramp(block.token + part, 1, LANES))
                # Not named: TVM's analyzer cannot hold vectors of bool.
                hidden = where > v.splat(last, LANES)
                if spec.attention.window is not None:
                    hidden = T.Or(hidden, where < v.splat(find_first(spec, last), LANES))
                score = v.let(T.Select(hidden, v.constant(NEVER, "float32", LANES), score))
                scores.store(base + part, score, LANES)
            found.append(v.let(score))
        top = v.find_largest(find_most(found), LANES)
        room.floats["block_tops"].store(row, top, 1)
    with T.serial(rows * once) as row:
        base = v.let(row * length)
        top = v.let(v.splat(room.floats["block_tops"].load(row, 1), LANES))
        shares, total = [], None
        for part in parts:
            score = v.let(scores.load(base + part, LANES))
            share = v.take_exponential(score - top, LANES)
            if is_masked:
                seen = score > v.constant(NEVER / 2, "float32", LANES)
                share = T.Select(seen, share, v.constant(0.0, "float32", LANES))
            share = v.let(share)
            shares.append(share)
            total = share if total is None else total + share
        room.floats["block_totals"].store(row * LANES, total, LANES)
        arithmetic.emit_row_shares(row, shares)
