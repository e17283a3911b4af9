"""Products of queries with codes of int8 keys, and of shares with codes of values: ``vpdpbusd``.

A query is rounded to two bytes an element with a scale for the vector (error relative to its
largest element 1.5e-5), shares times the values' scales likewise with a scale for each query and
block (7.6e-6).  High bytes are multiplied first, then low ones with the same sums.  These are exact
integers, whatever wraps on the way: 65535 * 127 * 64 and, for heads of 512, 32512 * 127 * 512 are
below 2^31.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.mixing_arithmetic import (
    BaseArithmetic,
    Block,
    Tile,
    find_most,
    make_cells,
)
from pi2.backends.kernels.mixing_layout import LANES, PLANES
from pi2.backends.kernels.mixing_room import Region
from pi2.backends.kernels.products import emit_vpdpbusd
from pi2.backends.kernels.quantize import LIMIT
from pi2.backends.kernels.spec import KV_BLOCK

SHARE_LIMIT = 65535
"""Largest code of a share."""


@dataclass(frozen=True, slots=True)
class IntegerArithmetic(BaseArithmetic):
    """Codes of int8 keys and values; see the module."""

    def emit_query(self, slot: v.Expr) -> None:
        """Round it."""
        self.clear_sum(slot)
        qkv, place = self.qkv, v.let(self.room.integers["query_places"].load(slot, 1))
        target = self._find_codes(slot)
        room, layout, once = self.room, self.room.layout, self.cache.once
        steps, limit = layout.width // LANES, LIMIT[PLANES]
        largest = v.Cell(v.constant(0.0, "float32", LANES))
        with T.serial(steps * once) as step:
            part = T.abs(v.load(qkv, place + step * LANES, LANES))
            largest.set(T.max(largest.get(), part))
        top = v.let(v.find_largest(largest.get(), "float32", LANES))
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
        size, cache, room, layout = self.spec.head_dim, self.cache, self.room, self.room.layout
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
        """Multiply queries with keys."""
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
        top = v.find_largest(find_most(weighted), "float32", LANES)
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
        """Multiply shares with values."""
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
    """Make room for the lower byte."""
    for own in cells:
        for cell in own:
            cell.set(cell.get() << v.constant(8, "int32", LANES))


def _join_rows(buffer: v.Buffer, place: v.Expr, stride: int) -> v.Expr:
    """Return int32 x 16 of four bytes each: those of four rows of 16, the first lowest."""
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
