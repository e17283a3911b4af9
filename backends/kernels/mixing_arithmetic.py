"""Products of queries with keys and of shares with values, for a block and a tile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.compiler.vectors import Parameters
from pi2.backends.kernels.kv import Cache, count_lanes, load_scales
from pi2.backends.kernels.matrix import LIMIT
from pi2.backends.kernels.mixing_layout import LANES, PLANES, MixingLayout, count, lay_out_mixing
from pi2.backends.kernels.operands import emit_vpdpbusd
from pi2.backends.kernels.spec import KV_BLOCK, KernelSpec


@dataclass(frozen=True, slots=True)
class Region:
    """A part of an array."""

    buffer: v.Buffer
    base: v.Expr

    def load(self, place: v.Expr | int, lanes: int) -> v.Expr:
        """Return elements from ``place`` on."""
        return v.load(self.buffer, self.base + place, lanes)

    def store(self, place: v.Expr | int, value: v.Expr, lanes: int) -> None:
        """Set elements from ``place`` on."""
        v.store(self.buffer, self.base + place, value, lanes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixingRoom:
    """A thread's room; `MixingLayout` has the sizes.

    Each of a task's queries has float32 ``totals`` [slots, 16] (of its shares, still to be added
    up), ``tops`` [slots] (largest score) and ``query_scales`` [slots], and int32 ``query_places``,
    ``result_places`` and ``query_offsets`` [slots]. The others belong to a block or a tile."""

    layout: MixingLayout
    floats: Mapping[str, Region]
    integers: Mapping[str, Region]
    codes: Mapping[str, Region]


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The rooms of all threads: float32, int32 and int8 [threads, size]."""

    layout: MixingLayout
    floats: v.Buffer
    integers: v.Buffer
    codes: v.Buffer

    def take_thread(self, thread: v.Expr) -> MixingRoom:
        layout = self.layout
        return MixingRoom(
            layout=layout,
            floats=_divide(self.floats, thread, layout.float_sizes),
            integers=_divide(self.integers, thread, layout.integer_sizes),
            codes=_divide(self.codes, thread, layout.byte_sizes),
        )


def _divide(buffer: v.Buffer, thread: v.Expr, sizes: Mapping[str, int]) -> dict[str, Region]:
    start = v.let(thread * count(sizes))
    regions, done = {}, 0
    for name, size in sizes.items():
        regions[name] = Region(buffer, start + done)
        done += size
    return regions


def take_room(take: Parameters, spec: KernelSpec) -> Room:
    layout = lay_out_mixing(spec)

    def take_array(name: str, dtype: str, sizes: Mapping[str, int]) -> v.Buffer:
        return take.take_array(name, dtype, "threads", count(sizes))

    return Room(
        layout=layout,
        floats=take_array("mixing_floats", "float32", layout.float_sizes),
        integers=take_array("mixing_integers", "int32", layout.integer_sizes),
        codes=take_array("mixing_codes", "int8", layout.byte_sizes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """KV cache of one head: ``parts`` times `KV_BLOCK` tokens from ``token`` on."""

    head: v.Expr
    """Number of the head times the cache's context."""
    token: v.Expr
    parts: v.Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Queries that are multiplied together, from slot ``first`` on."""

    first: v.Expr
    start: v.Expr
    """Position of the task's first token."""
    queries: v.Expr
    """Queries of the task."""


class Arithmetic(Protocol):
    """How a task multiplies."""

    def emit_query(self, slot: v.Expr) -> None:
        """Prepare the query of a slot, whose places are known, and clear its sum."""

    def emit_block(self, block: Block) -> None:
        """Prepare a block of the KV cache."""

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
    """Place of the sums."""
    codes: v.Buffer
    """Place of the queries' codes."""

    @property
    def lanes(self) -> int:
        return count_lanes(self.spec.attention.head_dim)

    def clear_sum(self, slot: v.Expr) -> None:
        """Begin a query's sum with nothing."""
        lanes = self.lanes
        result = v.let(self.room.integers["result_places"].load(slot, 1))
        with T.serial(self.spec.attention.head_dim // lanes * self.cache.once) as part:
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
        scales = (self.cache.key_scales, self.cache.value_scales)
        for source, name in zip(scales, ("key_scales", "value_scales"), strict=True):
            if source is not None:
                with T.serial(block.parts) as part:
                    first = v.let(T.floordiv(block.token, KV_BLOCK) + part)
                    value = load_scales(source, block.head, first)
                    self.room.floats[name].store(part * KV_BLOCK, value, KV_BLOCK)

    def store_scores(self, row: int, place: v.Expr, score: v.Expr) -> None:
        """Keep 16 scores of a row."""
        if self.spec.attention.options.softcap is not None:
            score = v.take_cap(score, self.spec.attention.options.softcap, LANES)
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
    """float32: the KV cache is converted as it is loaded."""

    def emit_query(self, slot: v.Expr) -> None:
        self.clear_sum(slot)

    def emit_block(self, block: Block) -> None:
        self.emit_scales(block)

    def emit_scores(self, tile: Tile, block: Block) -> None:
        room, layout, cache = self.room, self.room.layout, self.cache
        size = self.spec.attention.head_dim

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
        return block.head + v.wide(block.token + part * KV_BLOCK)

    def emit_row_shares(self, row: v.Expr, shares: list[v.Expr]) -> None:
        """Keep them, times the values' scales."""
        self.keep_shares(row, shares)

    def emit_shares(self) -> None:
        """Nothing is left to do."""

    def emit_sums(self, tile: Tile, block: Block) -> None:
        room, layout, cache = self.room, self.room.layout, self.cache
        size, lanes = self.spec.attention.head_dim, self.lanes
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
    return [[v.Cell(v.constant(0, dtype, lanes)) for _ in range(columns)] for _ in range(rows)]


SHARE_LIMIT = 65535
"""Largest code of a share."""


@dataclass(frozen=True, slots=True)
class IntegerArithmetic(BaseArithmetic):
    """Codes of an int8 KV cache; see the module."""

    def emit_query(self, slot: v.Expr) -> None:
        self.clear_sum(slot)
        qkv, place = self.qkv, v.let(self.room.integers["query_places"].load(slot, 1))
        target = self._find_codes(slot)
        room, layout, once = self.room, self.room.layout, self.cache.once
        steps, limit = layout.width // LANES, LIMIT[PLANES]
        largest = v.Cell(v.constant(0.0, "float32", LANES))
        with T.serial(steps * once) as step:
            part = T.abs(v.load(qkv, place + step * LANES, LANES))
            largest.set(T.max(largest.get(), part))
        top = v.let(v.find_largest(largest.get(), LANES))
        zero = v.constant(0.0, "float32")
        # Subnormal maxima would make the factor infinite: they count as zero.
        tiny = top < v.constant(1e-30, "float32")
        factor = v.let(T.Select(tiny, zero, v.constant(float(limit), "float32") / top))
        scale = T.Select(tiny, zero, top * v.constant(1.0 / limit, "float32"))
        room.floats["query_scales"].store(slot, scale, 1)
        total = v.Cell(v.constant(0, "int32", LANES))
        eight, half = v.constant(8, "int32", LANES), v.constant(128, "int32", LANES)
        with T.serial(steps * once) as step:
            part = v.load(qkv, place + step * LANES, LANES) * v.splat(factor, LANES)
            code = v.let(v.cast(T.nearbyint(part), "int32", LANES))
            total.set(total.get() + code)
            high = v.let((code + half) >> eight)
            for plane, value in enumerate((high, code - (high << eight))):
                at = v.let(target + plane * layout.width + step * LANES)
                v.store(self.codes, at, v.cast(value, "int8", LANES), LANES)
        # Keys enter as q + 128.
        offset = v.add_lanes(total.get(), "int32", LANES) * v.constant(-128, "int32")
        room.integers["query_offsets"].store(slot, offset, 1)

    def _find_codes(self, slot: v.Expr) -> v.Expr:
        """Return where a query's codes [planes, width] are."""
        return v.let(self.room.integers["result_places"].load(slot, 1) * PLANES)

    def emit_block(self, block: Block) -> None:
        """Bring four elements of a token's key, and four tokens' values, side by side."""
        size, cache, room, layout = (
            self.spec.attention.head_dim,
            self.cache,
            self.room,
            self.room.layout,
        )
        self.emit_scales(block)
        with T.serial(block.parts) as part:
            start = v.let((block.head + v.wide(block.token + part * KV_BLOCK)) * size)
            flip = v.constant(-2139062144, "int32", LANES)
            with T.serial(size // 4 * cache.once) as step:
                place = v.let(start + v.wide(step * (4 * KV_BLOCK)))
                word = _join_rows(cache.keys, place, KV_BLOCK) ^ flip
                at = v.let(step * (4 * layout.block) + part * (4 * LANES))
                _store_word(room.codes["keys"], at, word)
            with (
                T.serial(KV_BLOCK // 4 * cache.once) as quad,
                T.serial(size // LANES * cache.once) as step,
            ):
                place = v.let(start + v.wide(quad * (4 * size) + step * LANES))
                word = _join_rows(cache.values, place, size)
                at = v.let((part * (KV_BLOCK // 4) + quad) * (4 * size) + step * (4 * LANES))
                _store_word(room.codes["values"], at, word)

    def emit_scores(self, tile: Tile, block: Block) -> None:
        room, layout, cache = self.room, self.room.layout, self.cache
        rows, width = layout.rows, layout.width

        def emit(first: v.Expr, number: int) -> None:
            cells = make_cells(rows, number, "int32", LANES)
            places = [self._find_codes(v.let(tile.first + row)) for row in range(rows)]
            for plane in range(PLANES):
                if plane:
                    _shift_planes(cells)
                with T.serial(width // 4 * cache.once) as step:
                    keys = [
                        v.let(
                            room.codes["keys"].load(
                                step * (4 * layout.block) + (first + column) * (4 * LANES),
                                4 * LANES,
                            )
                        )
                        for column in range(number)
                    ]
                    for row, own in enumerate(cells):
                        query = _splat_word(self.codes, places[row] + plane * width + step * 4)
                        for key, cell in zip(keys, own, strict=True):
                            cell.set(emit_vpdpbusd(cell.get(), key, query, LANES))
            for row, own in enumerate(cells):
                offset = v.splat(room.integers["query_offsets"].load(tile.first + row, 1), LANES)
                scale = v.splat(room.floats["query_scales"].load(tile.first + row, 1), LANES)
                for column, cell in enumerate(own):
                    place = v.let((first + column) * LANES)
                    total = v.cast(cell.get() + offset, "float32", LANES)
                    own_scale = room.floats["key_scales"].load(place, LANES) * scale
                    self.store_scores(row, place, total * own_scale)

        self.emit_runs(layout.block // LANES, emit)

    def emit_row_shares(self, row: v.Expr, shares: list[v.Expr]) -> None:
        """Keep them, times the values' scales, and the largest of these products."""
        weighted = self.keep_shares(row, shares)
        top = v.find_largest(find_most(weighted), LANES)
        self.room.floats["units"].store(row, top, 1)

    def emit_shares(self) -> None:
        """Round shares times the values' scales."""
        room, layout = self.room, self.room.layout
        rows, limit = layout.rows, float(SHARE_LIMIT)
        units, factors = room.floats["units"], room.floats["unit_factors"]
        top = v.let(units.load(0, rows))
        zeros = v.constant(0.0, "float32", rows)
        tiny = top < v.constant(1e-30, "float32", rows)
        factors.store(0, T.Select(tiny, zeros, v.constant(limit, "float32", rows) / top), rows)
        own = room.floats["own_factors"]
        own.store(0, own.load(0, rows) * (top * v.constant(1.0 / limit, "float32", rows)), rows)
        with T.serial(rows * self.cache.once) as row:
            factor = v.let(v.splat(factors.load(row, 1), LANES))
            for part in range(0, layout.block, LANES):
                share = room.floats["scores"].load(row * layout.block + part, LANES)
                code = v.let(v.cast(T.nearbyint(share * factor), "int32", LANES))
                high = code >> v.constant(8, "int32", LANES)
                for plane, byte in enumerate((high, code)):
                    at = v.let((row * PLANES + plane) * layout.block + part)
                    room.codes["shares"].store(at, v.cast(byte, "int8", LANES), LANES)

    def emit_sums(self, tile: Tile, block: Block) -> None:
        room, layout, cache = self.room, self.room.layout, self.cache
        rows, width = layout.rows, layout.width
        shares = room.codes["shares"]

        def emit(first: v.Expr, number: int) -> None:
            cells = make_cells(rows, number, "int32", LANES)
            for plane in range(PLANES):
                if plane:
                    _shift_planes(cells)
                with T.serial(layout.block // 4 * cache.once) as step:
                    values = [
                        v.let(
                            room.codes["values"].load(
                                step * (4 * width) + (first + column) * (4 * LANES), 4 * LANES
                            )
                        )
                        for column in range(number)
                    ]
                    for row, cells_of_row in enumerate(cells):
                        place = (row * PLANES + plane) * layout.block + step * 4
                        share = _splat_word(shares.buffer, shares.base + place)
                        for value, cell in zip(values, cells_of_row, strict=True):
                            cell.set(emit_vpdpbusd(cell.get(), share, value, LANES))
            for column in range(number):
                added = [v.cast(own[column].get(), "float32", LANES) for own in cells]
                self.add_to_sums(tile, v.let((first + column) * LANES), added)

        self.emit_runs(width // LANES, emit)


def _shift_planes(cells: list[list[v.Cell]]) -> None:
    for own in cells:
        for cell in own:
            cell.set(cell.get() << v.constant(8, "int32", LANES))


def _join_rows(buffer: v.Buffer, place: v.Expr, stride: int) -> v.Expr:
    """Return int32 x 16 of four bytes each, from four rows of 16, the first lowest."""
    word = None
    for row in range(4):
        raw = v.reinterpret(v.load(buffer, place + row * stride, LANES), "uint8", LANES)
        part = v.cast(raw, "int32", LANES)
        if row:
            part = part << v.constant(8 * row, "int32", LANES)
        word = part if word is None else word | part
    return word


def _store_word(region: Region, place: v.Expr, word: v.Expr) -> None:
    region.store(place, v.reinterpret(word, "int8", 4 * LANES), 4 * LANES)


def _splat_word(buffer: v.Buffer, place: v.Expr) -> v.Expr:
    """Return four bytes, again and again, as int8 x 64, named."""
    word = v.reinterpret(v.load(buffer, place, 4), "int32", 1)
    return v.let(v.reinterpret(v.splat(word, LANES), "int8", 4 * LANES))
