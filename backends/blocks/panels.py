"""Rows of weights times many tokens: rows are unpacked once for all of them.

A panel is as many rows as a register has lanes: for every four elements of a block a register of
four bytes of each row, then, a register each, scales (float32) of pieces of the block, pairs of
minima (int16) of two pieces, and scales of minima or minima themselves.  It lies in a thread's
scratch, which the second-level cache holds, behind `STAGE_BYTES` in which rows are unpacked."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.tirx.script import builder as T

from pi2.backends.blocks.machine import Machine, Table, as_bytes, join, pick, turn_square
from pi2.backends.blocks.rows import FEW, Results, ask_ahead, find_matrix, find_x
from pi2.backends.blocks.sizes import (
    PANEL_TOKENS,
    STAGE_BYTES,
    STRETCH,
    TOGETHER,
    count_panel_bytes,
)
from pi2.backends.blocks.unpacking import Unpacking
from pi2.backends.blocks.unpacking.block import Block, Source
from pi2.backends.blocks.unpacking.columns import Columns
from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.isa import Isa

_EXTRA = STAGE_BYTES // 2
"""Room in which a panel's weights are unpacked."""


def emit_multiply_many(isa: Isa, unpacking: Unpacking, table: Table) -> None:
    """The same as `rows.emit_multiply`, for pairs ``listed`` by expert; items are panels.  Rows are
    taken in stretches; the first-level cache holds unpacked groups of 32 of one."""
    machine = Machine(isa)
    lanes, width, opens = machine.lanes, machine.width, len(unpacking.opens)
    results = Results(table)
    panel = _Panel(machine, unpacking, table.scratch, table.thread * table.scratch_stride)
    sums = v.let(panel.base + count_panel_bytes(lanes))
    row_bytes = v.let(table.blocks * unpacking.size)
    most = STRETCH // unpacking.whole
    # Of whole tiles of tokens, as many as are computed together.
    apart = v.Cell(T.int64(0))

    def find_sum(plane: v.Expr, token: v.Expr) -> v.Expr:
        return v.let(sums + (plane * apart.get() + token) * width)

    def store(place: v.Expr, value: v.Expr) -> None:
        v.store(table.scratch, place, v.reinterpret(value, "uint8", width), width)

    def multiply(low: v.Expr, tokens: v.Expr, first: v.Expr, count: v.Expr, together: int) -> None:
        with T.serial((tokens + together - 1) // together) as tile:
            now = v.let(tile * together)
            taken = [
                find_x(table, v.let(v.wide(table.pairs[T.min(now + k, tokens - 1) + low])))
                for k in range(together)
            ]
            with T.serial(table.planes) as plane:
                begins = [v.let(own * table.x_stride + plane * table.plane_stride) for own in taken]
                product = _Product(panel, table.x, begins, v.let(table.blocks * unpacking.whole))
                at = find_sum(plane, now)
                places = [at + k * width for k in range(together)]
                totals = [v.Cell(v.load_as(table.scratch, own, "float32", lanes)) for own in places]
                product.emit(v.let(first * opens), v.let(count * opens), totals)
                for own, total in zip(places, totals, strict=True):
                    store(own, total.get())

    with T.serial(table.first, table.end) as item, T.serial(table.experts) as expert:
        begin, end = v.let(v.wide(table.starts[expert])), v.let(v.wide(table.starts[expert + 1]))
        row, matrix = v.let(item * lanes), v.let(find_matrix(table, expert))
        # The last rows may be the last one again.
        begins = [v.let(matrix + T.min(row + k, table.rows - 1) * row_bytes) for k in range(lanes)]
        with T.serial((end - begin + PANEL_TOKENS - 1) // PANEL_TOKENS) as some:
            low = v.let(begin + some * PANEL_TOKENS)
            tokens = v.let(T.min(end - low, T.int64(PANEL_TOKENS)))
            apart.set((tokens + TOGETHER - 1) // TOGETHER * TOGETHER)
            with T.serial(table.planes) as plane, T.serial(tokens) as token:
                store(find_sum(plane, token), v.constant(0.0, "float32", lanes))
            with T.serial((table.blocks + most - 1) // most) as stretch:
                first = v.let(stretch * most)
                count = v.let(T.min(table.blocks - first, T.int64(most)))
                with T.serial(count) as number:
                    # Rows are many streams of few bytes; asked for is the next panel, in the order
                    # of its bytes.
                    asked = begins[0] + (table.blocks + first + number) * (lanes * unpacking.size)
                    asked, place = v.let(asked), v.let((first + number) * unpacking.size)
                    if panel.takes_rows:
                        sources = [
                            Source(machine, table.weights, v.let(own + place), table.grid)
                            for own in begins
                        ]
                        columns = Columns(sources, asked, lanes * unpacking.size)
                        panel.put_rows(columns, number)
                        columns.ask_ahead()
                    else:
                        with T.serial(T.int64(lanes)) as lane:
                            ask_ahead(table.weights, asked + lane * unpacking.size, unpacking.size)
                            at = v.let(
                                matrix + T.min(row + lane, table.rows - 1) * row_bytes + place
                            )
                            panel.put(Source(machine, table.weights, at, table.grid), number, lane)
                        panel.turn(number)
                if machine.together > FEW:
                    with T.If(tokens > T.int64(FEW)):
                        with T.Then():
                            multiply(low, tokens, first, count, machine.together)
                        with T.Else():
                            multiply(low, tokens, first, count, FEW)
                else:
                    multiply(low, tokens, first, count, FEW)
            with T.serial(tokens) as token:
                place = find_sum(T.int64(0), token)
                with T.serial(T.int64(1), table.planes) as plane:
                    more = v.load_as(table.scratch, find_sum(plane, token), "float32", lanes)
                    store(place, v.let(more + v.load_as(table.scratch, place, "float32", lanes)))
                pair = v.let(v.wide(table.pairs[low + token]))
                results.put_lanes(pair, expert, row, table.scratch, place, lanes)


class _Panel:
    def __init__(
        self, machine: Machine, unpacking: Unpacking, scratch: v.Buffer, base: v.Expr
    ) -> None:
        self.machine = machine
        self._unpacking = unpacking
        self.scratch = scratch
        self._stage = base
        self.base = v.let(base + STAGE_BYTES)
        self.elements = unpacking.elements
        self._chunks: list[tuple[int, ...]] = []
        self.pieces = 0
        """Scales of a block."""
        self.pairs = 0
        """Registers of pairs of minima."""
        self.has_min = False
        self.offset = 0
        self.shifts = self.flips = False
        """Whether weights are signed and made unsigned, or codes take their signs."""
        self._shift = machine.find_shift(unpacking.most)

    @property
    def fitting(self) -> int:
        """Registers whose products are added up in 16 bits."""
        most = self._unpacking.most
        most += self.offset if self.shifts else 0
        return max(1, 32767 // (2 * 127 * most))

    @property
    def weights(self) -> int:
        return self.elements // 4

    @property
    def extra(self) -> int:
        """Registers behind them: of blocks of 256 whole squares."""
        count = self.pieces + self.pairs + int(self.has_min)
        lanes = self.machine.lanes
        return count if self.elements == 32 else -(-count // lanes) * lanes

    @property
    def size(self) -> int:
        return (self.weights + self.extra) * self.machine.width

    @property
    def takes_rows(self) -> bool:
        """Whether blocks of all rows are unpacked at once."""
        own = self._unpacking
        return (own.groups is not None or own.turned is not None) and self.machine.width >= 32

    def put_rows(self, columns: Columns, number: v.Expr) -> None:
        """Unpack a block of each of ``lanes`` rows, whose words of 4 bytes are turned before."""
        width, own = self.machine.width, self._unpacking.groups or self._unpacking.turned
        assert own is not None
        shift = self._shift if own.is_signed else 0
        self.shifts, self.flips = shift > 0, own.is_signed and not shift
        self.offset, self.pieces, self.has_min = shift or own.offset, own.pieces, own.has_mins
        self.pairs = own.pieces // 2 if own.has_mins else 0
        block = v.let(self.base + number * self.size)

        def put(register: int, value: v.Expr) -> None:
            value = as_bytes(value, "uint8", width)
            if shift:
                value = value + v.constant(shift, "uint8", width)
            v.store(self.scratch, block + register * width, value, width)

        for register, value in enumerate(own.unpack(columns, put), self.weights):
            value = v.reinterpret(value, "uint8", width)
            v.store(self.scratch, block + register * width, value, width)

    def put(self, source: Source, number: v.Expr, lane: v.Expr) -> None:
        machine, pieces = self.machine, len(self._unpacking.opens)
        for piece, open_block in enumerate(self._unpacking.opens):
            block = open_block(source)
            # Where scales are of 16 weights, nobody has sums of as many codes.
            shift = self._shift if block.is_signed and block.part_scales is None else 0
            self.shifts, self.flips = (
                shift > 0,
                block.is_signed and not machine.is_arm and not shift,
            )
            self._chunks, offset = [part.chunks for part in block.parts], shift or block.offset
            for place, part in enumerate(block.parts):
                size = 16 * len(part.chunks)
                own = part.weights
                if shift:
                    own = as_bytes(own, "uint8", size) + v.constant(shift, "uint8", size)
                own = v.let(as_bytes(own, "uint8", size))
                if self.elements == 256:
                    self._stage_chunks(own, part.chunks, lane)
                    continue
                part_number = piece * len(block.parts) + place
                at = self._stage + (part_number * machine.lanes + lane) * size
                v.store(self.scratch, at, own, size)
            is_wide = self.elements == 256
            columns = (self._list_wide if is_wide else self._list_narrow)(block, offset)
            start, step = self._stage + _EXTRA + lane * 128, 4
            if not is_wide:
                # Single numbers need no square to be turned in.
                start, step = self.base + (number * pieces + piece) * self.size, machine.width
                start += self.weights * step + lane * 4
            for value, lanes in columns:
                v.store(self.scratch, start, v.reinterpret(value, "uint8", 4 * lanes), 4 * lanes)
                start += step * lanes

    def _stage_chunks(self, value: v.Expr, chunks: Sequence[int], lane: v.Expr) -> None:
        """Put 16 bytes each in their places in the block: as many side by side as a square has."""
        together = self.machine.width // 16
        for place, chunk in enumerate(chunks):
            row = (chunk // together) * self.machine.lanes + lane
            at = self._stage + row * self.machine.width + chunk % together * 16
            own = pick(value, 16 * len(chunks), range(16 * place, 16 * place + 16))
            v.store(self.scratch, at, own, 16)

    def _list_wide(self, block: Block, offset: int) -> list[tuple[v.Expr, int]]:
        """What belongs to the weights of a block of 256, as vectors of 32 bits."""
        count = self.pieces = block.scale_count
        scales = v.constant(1, "int16", count) if block.scales is None else block.scales
        columns = [(v.cast(scales, "float32", count) * v.splat(block.scale, count), count)]
        mins, least = block.mins, block.min_scale
        self.offset = offset
        self.pairs, self.has_min = (0, False) if mins is None else (count // 2, True)
        if mins is not None:
            columns += [(v.reinterpret(mins, "int32", count // 2), count // 2), (least, 1)]
        return columns

    def _list_narrow(self, block: Block, offset: int) -> list[tuple[v.Expr, int]]:
        """The same of a group of 32."""
        self.offset = offset
        scales = [block.scale] if block.part_scales is None else list(block.part_scales)
        self.pieces, self.has_min = len(scales), block.min_scale is not None
        columns = [(scale, 1) for scale in scales]
        return columns + ([] if block.min_scale is None else [(block.min_scale, 1)])

    def turn(self, number: v.Expr) -> None:
        lanes, width = self.machine.lanes, self.machine.width
        if self.elements == 256:
            block = v.let(self.base + number * self.size)
            for start, stride, first, count in (
                (self._stage, width, 0, self.weights // lanes),
                (self._stage + _EXTRA, 128, self.weights, self.extra // lanes),
            ):
                with T.serial(T.int64(count)) as square:
                    step = lanes * width if stride == width else width
                    target = v.let(block + (square * lanes + first) * width)
                    targets = [target + k * width for k in range(lanes)]
                    self._turn_square(v.let(start + square * step), stride, targets)
            return
        pieces = len(self._unpacking.opens)
        for piece in range(pieces):
            target = v.let(self.base + (number * pieces + piece) * self.size)
            for place, chunks in enumerate(self._chunks):
                size = 16 * len(chunks)
                start = self._stage + (piece * len(self._chunks) + place) * lanes * size
                # Groups are narrower than the widest registers.
                for group in range(0, size // 4, min(lanes, size // 4)):
                    targets = [
                        target + (chunks[(group + k) // 4] * 4 + (group + k) % 4) * width
                        for k in range(min(lanes, size // 4))
                    ]
                    self._turn_square(start + 4 * group, size, targets)

    def _turn_square(self, start: v.Expr, stride: int, targets: Sequence[v.Expr]) -> None:
        """Store the columns, ``lanes`` words of 32 bits each, of as many rows."""
        lanes, count = self.machine.lanes, len(targets)
        rows = [
            v.let(v.load_as(self.scratch, start + lane * stride, "int32", count))
            for lane in range(lanes)
        ]
        # Two narrower rows share a register: one, and the row ``count`` rows behind it.
        rows = [v.let(join(rows[first::count], count)) for first in range(count)]
        for target, value in zip(targets, turn_square(rows, lanes), strict=True):
            v.store(self.scratch, target, v.reinterpret(value, "uint8", 4 * lanes), 4 * lanes)

    def load(self, block: v.Expr, register: v.Expr | int, dtype: str) -> v.Expr:
        """Return a register of a block as 32-bit numbers, or as bytes."""
        place = block + register * self.machine.width
        lanes = self.machine.width if dtype in ("uint8", "int8") else self.machine.lanes
        if dtype == "int16":
            lanes *= 2
        return v.let(v.load_as(self.scratch, place, dtype, lanes))


class _Product:
    def __init__(
        self, panel: _Panel, codes: v.Buffer, starts: Sequence[v.Expr], length: v.Expr
    ) -> None:
        """``starts``: first bytes of tokens of ``length`` elements."""
        self._machine, self._lanes = panel.machine, panel.machine.lanes
        self._panel = panel
        self._codes = codes
        self._starts = starts
        self._length = length

    def emit(self, first: v.Expr, count: v.Expr, totals: Sequence[v.Cell]) -> None:
        """Add to float32 [lanes] of each token the products of a panel's ``count`` blocks, of which
        ``first`` are before it."""
        emit = self._emit_wide if self._panel.elements == 256 else self._emit_groups
        with T.serial(count) as number:
            emit(v.let(self._panel.base + number * self._panel.size), v.let(first + number), totals)

    def _spread(self, place: v.Expr, dtype: str) -> v.Expr:
        return v.splat(v.load_as(self._codes, place, dtype, 1), self._lanes)

    def _zeros(self) -> list[v.Cell]:
        return [v.Cell(v.constant(0.0, "float32", self._lanes)) for _ in self._starts]

    def _add_weights(
        self, block: v.Expr, first: v.Expr | int, count: int, place: v.Expr, sums: list[v.Cell]
    ) -> None:
        machine, panel, width = self._machine, self._panel, self._machine.width
        kind = "int8" if panel.flips or machine.is_arm else "uint8"
        several = panel.fitting if machine.adds_pairs else 1
        for begin in range(0, count, several):
            pairs: list[v.Expr | None] = [None] * len(sums)
            for register in range(begin, min(begin + several, count)):
                weights = panel.load(block, first + register, kind)
                sizes = v.let(machine.measure(weights, width)) if panel.flips else None
                for token, (start, cell) in enumerate(zip(self._starts, sums, strict=True)):
                    words = self._spread(start + place + 4 * register, "int32")
                    codes = v.reinterpret(words, "int8", width)
                    own = weights
                    if sizes is not None:
                        codes, own = v.let(machine.flip(weights, codes, width)), sizes
                    if several == 1:
                        cell.set(machine.add_bytes(cell.get(), own, codes, width))
                        continue
                    products, before = machine.add_pairs(own, codes, width), pairs[token]
                    pairs[token] = v.let(products if before is None else before + products)
            ones = v.constant(1, "int16", width // 2)
            for total, cell in zip(pairs, sums, strict=True):
                if total is not None:
                    cell.set(machine.add_words(cell.get(), total, ones, width // 4))

    def _emit_wide(self, block: v.Expr, number: v.Expr, totals: Sequence[v.Cell]) -> None:
        panel, lanes, length = self._panel, self._lanes, self._length
        pieces = panel.pieces
        each = 256 // pieces
        sums_at = v.let(length + length // 64 + (length // 8 if pieces == 8 else 0))
        parts = self._zeros()
        with T.serial(T.int64(pieces)) as piece:
            sums = self._begin_piece(v.let(sums_at + number * (2 * pieces)), piece)
            place = v.let(number * 256 + piece * each)
            self._add_weights(block, v.let(piece * (each // 4)), each // 4, place, sums)
            scale = panel.load(block, panel.weights + piece, "float32")
            for cell, own in zip(parts, sums, strict=True):
                cell.set(T.fma(v.cast(own.get(), "float32", lanes), scale, cell.get()))
        if panel.pairs:
            self._take_mins(block, v.let(sums_at + number * (2 * pieces)), parts)
        for start, cell, part in zip(self._starts, totals, parts, strict=True):
            scale = self._spread(start + length + number * 4, "float32")
            cell.set(T.fma(part.get(), scale, cell.get()))

    def _begin_piece(self, place: v.Expr, piece: v.Expr) -> list[v.Cell]:
        """Return sums of a piece that take the weights' offset off; sums of the codes of its block
        begin at ``place``."""
        lanes, offset = self._lanes, self._panel.offset
        zero = v.constant(0, "int32", lanes)
        if not offset:
            return [v.Cell(zero) for _ in self._starts]
        # Sums of two pieces are in a word, of which one is multiplied.
        low, high = T.int32(-offset & 0xFFFF), T.int32(-offset << 16)
        factor = T.Select(T.bitwise_and(piece, T.int64(1)) == T.int64(0), low, high)
        factors = v.let(v.reinterpret(v.splat(v.let(factor), lanes), "int16", 2 * lanes))
        cells = []
        for start in self._starts:
            words = self._spread(start + place + piece // 2 * 4, "int32")
            both = v.reinterpret(words, "int16", 2 * lanes)
            cells.append(v.Cell(self._machine.add_words(zero, factors, both, lanes)))
        return cells

    def _take_mins(self, block: v.Expr, place: v.Expr, parts: list[v.Cell]) -> None:
        panel, machine, lanes = self._panel, self._machine, self._lanes
        first = panel.weights + panel.pieces
        least = panel.load(block, first + panel.pairs, "float32")
        sums = [v.Cell(v.constant(0, "int32", lanes)) for _ in self._starts]
        for pair in range(panel.pairs):
            mins = panel.load(block, first + pair, "int16")
            for start, cell in zip(self._starts, sums, strict=True):
                words = self._spread(start + place + 4 * pair, "int32")
                both = v.reinterpret(words, "int16", 2 * lanes)
                cell.set(v.let(machine.add_words(cell.get(), mins, both, lanes)))
        for cell, own in zip(parts, sums, strict=True):
            cell.set(cell.get() - v.cast(own.get(), "float32", lanes) * least)

    def _emit_groups(self, block: v.Expr, number: v.Expr, totals: Sequence[v.Cell]) -> None:
        panel, lanes, length = self._panel, self._lanes, self._length
        each = 32 // panel.pieces
        scales = [
            v.let(self._spread(start + length + number * 4, "float32")) for start in self._starts
        ]
        for piece in range(panel.pieces):
            sums = [v.Cell(self._begin(start, number)) for start in self._starts]
            place = v.let(number * 32 + piece * each)
            self._add_weights(block, piece * (each // 4), each // 4, place, sums)
            own_scale = panel.load(block, panel.weights + piece, "float32")
            for cell, own, scale in zip(totals, sums, scales, strict=True):
                value = v.cast(own.get(), "float32", lanes) * scale
                cell.set(T.fma(value, own_scale, cell.get()))
        if panel.has_min:
            least = panel.load(block, panel.weights + panel.pieces, "float32")
            at = v.let(length + length // 8 + number * 4)
            for start, cell in zip(self._starts, totals, strict=True):
                cell.set(T.fma(least, self._spread(start + at, "float32"), cell.get()))

    def _begin(self, start: v.Expr, number: v.Expr) -> v.Expr:
        lanes, offset, length = self._lanes, self._panel.offset, self._length
        if not offset or self._panel.pieces > 1:
            return v.constant(0, "int32", lanes)
        summed = self._spread(start + length + length // 4 + number * 4, "int32")
        return v.let(summed * v.constant(-offset, "int32", lanes))
