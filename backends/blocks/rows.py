"""Rows of weights times tokens: kernels of a format.  Sums within a block are exact integers; their
products with scales are added in float32."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.tirx.script import builder as T

from pi2.backends.blocks.machine import Machine, Table, join, pick
from pi2.backends.blocks.unpacking import Unpacking
from pi2.backends.blocks.unpacking.block import Block, Source
from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.isa import Isa

_AHEAD = 4096
"""Bytes by which weights are asked for before they are needed."""
FEW = 4
"""Tokens that share the unpacking of weights."""


class _Token:
    """A token's activations: codes, and places of what belongs to them."""

    def __init__(
        self, table: Table, codes: v.Buffer, number: v.Expr, length: v.Expr, plane: v.Expr
    ) -> None:
        self.codes = codes
        self.number = number
        own = number * table.x_stride + plane * table.plane_stride
        self.base = v.let(own)
        self.length = length

    def load(self, place: v.Expr, size: int) -> v.Expr:
        return v.let(v.load_as(self.codes, self.base + place, "int8", size))

    def load_as(self, place: v.Expr, dtype: str, lanes: int = 1) -> v.Expr:
        """Return numbers that lie so many bytes behind the first code."""
        return v.let(v.load_as(self.codes, self.base + place, dtype, lanes))


_Tokens = Sequence[_Token]
_Columns = Sequence[_Tokens]
"""Planes that are added up as integers, the last one's scales counting."""


def emit_multiply(isa: Isa, unpacking: Unpacking, table: Table) -> None:
    """``y[y_of[p], r]`` = ((weights of row r of expert e) . x[x_of[p]] x scales[e] + bias[e, r])
    x factor x routes[p] for each pair p of a token and the expert e = ``expert_of[p]``, added to y
    if ``added``. x may have several planes, which are added. Without experts, pairs are tokens, and
    all use expert 0. ``place_of[e]`` is the place of an expert's matrix, counted in matrices."""
    rows = _Rows(isa, unpacking, table)
    with T.serial(table.first, table.end) as row, T.serial(table.tokens) as pair:
        expert = find_expert(table, pair)
        start = v.let(rows.start(row) + find_matrix(table, expert))
        x, total = find_x(table, pair), v.Cell(T.float32(0.0))

        def add(*planes: v.Expr) -> None:
            taken = [_Token(table, table.x, x, rows.length, plane) for plane in planes]
            for own in rows.sum(start, taken, joins=len(planes) > 1):
                total.set(total.get() + own)

        with T.If(table.planes == T.int64(2)):
            with T.Then():  # weights are unpacked once
                add(T.int64(0), T.int64(1))
            with T.Else(), T.serial(table.planes) as plane:
                add(plane)
        rows.results.put(pair, expert, row, total.get())


def emit_multiply_few(isa: Isa, unpacking: Unpacking, table: Table) -> None:
    """The same without experts; `FEW` tokens share the unpacking of a row, or the last two."""
    rows = _Rows(isa, unpacking, table)

    def multiply(first: v.Expr, together: int) -> None:
        numbers = [v.let(T.min(first + k, table.tokens - 1)) for k in range(together)]
        targets = [rows.results.find(number) for number in numbers]
        with T.serial(table.first, table.end) as row:
            totals = [v.Cell(T.float32(0.0)) for _ in numbers]
            with T.serial(table.planes) as plane:
                taken = [_Token(table, table.x, number, rows.length, plane) for number in numbers]
                for cell, own in zip(totals, rows.sum(rows.start(row), taken), strict=True):
                    cell.set(cell.get() + own)
            for place, (target, total) in enumerate(zip(targets, totals, strict=True)):
                # The last tokens of a tile may be the last one again.
                with T.If(first + place < table.tokens), T.Then():
                    rows.results.put_at(*target, T.int64(0), row, total.get())

    with T.serial((table.tokens + FEW - 1) // FEW) as tile:
        first = v.let(tile * FEW)
        with T.If(table.tokens - first > T.int64(2)):
            with T.Then():
                multiply(first, FEW)
            with T.Else():
                multiply(first, 2)


class _Rows:
    def __init__(self, isa: Isa, unpacking: Unpacking, table: Table) -> None:
        self.machine, self.unpacking, self.table = Machine(isa), unpacking, table
        self.length = v.let(table.blocks * unpacking.whole)
        self.results = Results(table)

    def start(self, row: v.Expr) -> v.Expr:
        return v.let(row * self.table.blocks * self.unpacking.size)

    def sum(self, start: v.Expr, tokens: _Tokens, *, joins: bool = False) -> list[v.Expr]:
        """Return sums of tokens, or, if groups are joined, parts of one token's sum: its codes in
        the second plane are worth a 256th."""
        if self.unpacking.floats is not None:
            return _emit_floats(self, start, tokens)
        if self.unpacking.elements == 32:
            return _emit_groups(self, start, tokens, [tokens] if joins else [[t] for t in tokens])
        return _emit_super_blocks(self, start, tokens)


def find_expert(table: Table, pair: v.Expr) -> v.Expr:
    return v.let(v.wide(table.expert_of[pair]))


def find_matrix(table: Table, expert: v.Expr) -> v.Expr:
    """Return the offset of an expert's matrix from the first one."""
    return v.let(v.wide(table.place_of[expert]) * table.expert_bytes)


def find_x(table: Table, pair: v.Expr) -> v.Expr:
    return v.let(v.wide(table.x_of[pair]))


class Results:
    """Target of the sums."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def find(self, pair: v.Expr) -> tuple[v.Expr, v.Expr]:
        """Return the place of a pair's first sum, and the factor of all."""
        factor = v.Cell(self.table.factor)
        with T.If(self.table.has_routes != T.int64(0)), T.Then():
            factor.set(self.table.factor * self.table.routes[pair])
        return v.let(v.wide(self.table.y_of[pair]) * self.table.y_stride), v.let(factor.get())

    def put(self, pair: v.Expr, expert: v.Expr, row: v.Expr, total: v.Expr) -> None:
        self.put_at(*self.find(pair), expert, row, total)

    def put_at(
        self, start: v.Expr, factor: v.Expr, expert: v.Expr, row: v.Expr, total: v.Expr
    ) -> None:
        cell = v.Cell(total * self.table.scales[expert])
        with T.If(self.table.has_bias != T.int64(0)), T.Then():
            cell.set(cell.get() + self.table.bias[expert * self.table.rows + row])
        place = v.let(start + row)
        value = v.let(cell.get() * factor)
        with T.If(self.table.added != T.int64(0)):
            with T.Then():
                T.buffer_store(self.table.y, self.table.y[place] + value, [place])
            with T.Else():
                T.buffer_store(self.table.y, value, [place])

    def put_lanes(
        self, pair: v.Expr, expert: v.Expr, first: v.Expr, sums: v.Buffer, place: v.Expr, lanes: int
    ) -> None:
        """Store the sums of existing rows among ``lanes`` from ``first`` on, at a byte of
        ``sums``."""
        with T.If(first + lanes <= self.table.rows):
            with T.Then():
                scale = v.splat(self.table.scales[expert], lanes)
                cell = v.Cell(v.load_as(sums, place, "float32", lanes) * scale)
                with T.If(self.table.has_bias != T.int64(0)), T.Then():
                    at = expert * self.table.rows + first
                    cell.set(cell.get() + v.load(self.table.bias, at, lanes))
                start, factor = self.find(pair)
                target = v.let(start + first)
                cell.set(cell.get() * v.splat(factor, lanes))
                with T.If(self.table.added != T.int64(0)), T.Then():
                    cell.set(cell.get() + v.load(self.table.y, target, lanes))
                v.store(self.table.y, target, cell.get(), lanes)
            with T.Else(), T.serial(self.table.rows - first) as lane:
                total = v.let(v.load_as(sums, place + lane * 4, "float32", 1))
                self.put(pair, expert, v.let(first + lane), total)


def _emit_floats(rows: _Rows, start: v.Expr, tokens: _Tokens) -> list[v.Expr]:
    """Floats times floats, 16 at a time, and the rest one by one."""
    unpacking, weights, lanes = rows.unpacking, rows.table.weights, 16
    assert unpacking.floats is not None
    read, length = unpacking.floats, rows.length
    cells = [(v.Cell(v.constant(0.0, "float32", lanes)), v.Cell(T.float32(0.0))) for _ in tokens]
    whole = v.let(length // lanes)
    with T.serial(whole) as block:
        row = v.let(read(weights, start + block * (lanes * unpacking.size), lanes))
        for token, (wide, _) in zip(tokens, cells, strict=True):
            wide.set(T.fma(row, token.load_as(block * (4 * lanes), "float32", lanes), wide.get()))
    with T.serial(whole * lanes, length) as element:
        row = v.let(read(weights, start + element * unpacking.size, 1))
        for token, (_, rest) in zip(tokens, cells, strict=True):
            rest.set(rest.get() + row * token.load_as(element * 4, "float32"))
    sums = v.add_all_lanes([wide.get() for wide, _ in cells], lanes)
    return [total + rest.get() for total, (_, rest) in zip(sums, cells, strict=True)]


def _add_pairs(totals: Sequence[v.Cell], lanes: int, rest: Sequence[v.Expr]) -> list[v.Expr]:
    """Return sums of the ``lanes`` of each token, and of what else it has."""
    sums = v.add_all_lanes([total.get() for total in totals], lanes)
    return [total + own for total, own in zip(sums, rest, strict=True)]


def _emit_super_blocks(rows: _Rows, start: v.Expr, tokens: _Tokens) -> list[v.Expr]:
    machine, unpacking, table = rows.machine, rows.unpacking, rows.table
    lanes, length = machine.lanes, rows.length
    totals = [v.Cell(v.constant(0.0, "float32", lanes)) for _ in tokens]
    low_sums = [v.Cell(v.constant(0.0, "float32", 4)) for _ in tokens]
    with T.serial(table.blocks) as number:
        base = v.let(start + number * unpacking.size)
        ask_ahead(table.weights, base + _AHEAD, unpacking.size)
        block = unpacking.opens[0](Source(machine, table.weights, base, table.grid))
        spread = None
        if block.scales is not None:
            spread = [
                v.let(machine.spread_scales(block.scales, block.scale_count, part.chunks))
                for part in block.parts
            ]
        sizes = None
        if block.is_signed and not machine.is_arm:
            sizes = [v.let(machine.measure(part.weights, machine.width)) for part in block.parts]
        block_scale = v.let(v.splat(block.scale, lanes))
        mins, min_scale = _find_mins(block)
        for index, token in enumerate(tokens):
            total = v.constant(0, "int32", lanes)
            for place, part in enumerate(block.parts):
                codes = token.load(number * 256 + place * machine.width, machine.width)
                own = part.weights
                if sizes is not None:
                    codes = v.let(machine.flip(own, codes, machine.width))
                    own = sizes[place]
                if spread is None:
                    total = v.let(machine.add_bytes(total, own, codes, machine.width))
                else:
                    total = v.let(machine.add_scaled(total, own, codes, spread[place]))
            scale = v.let(token.load_as(length + number * 4, "float32"))
            cell = totals[index]
            factor = block_scale * v.splat(scale, lanes)
            cell.set(T.fma(v.cast(total, "float32", lanes), factor, cell.get()))
            if mins is not None:
                summed = _sum_mins(machine, mins, block.scale_count, token, number)
                low_cell, factor = low_sums[index], min_scale * v.splat(scale, 4)
                low_cell.set(T.fma(v.cast(summed, "float32", 4), factor, low_cell.get()))
    return _add_pairs(totals, lanes, v.add_all_lanes([own.get() for own in low_sums], 4))


def ask_ahead(weights: v.Buffer, place: v.Expr, size: int) -> None:
    """Prefetch ``size`` bytes: weights are read once, faster than the processor foresees."""
    for line in range(0, size, 64):
        v.prefetch(weights, place + line)


def _find_mins(block: Block) -> tuple[v.Expr | None, v.Expr]:
    """Return the minima of a block, int16, and the factor of their sums, float32 [4]."""
    mins, scale = block.mins, block.min_scale
    if mins is None and block.offset:
        scale = block.scale * T.float32(float(block.offset))
        mins = v.constant(1, "int16", block.scale_count) if block.scales is None else block.scales
    taken = T.float32(0.0) if scale is None else T.float32(0.0) - scale
    return mins, v.let(v.splat(v.let(taken), 4))


def _sum_mins(machine: Machine, mins: v.Expr, count: int, token: _Token, number: v.Expr) -> v.Expr:
    """Return sums int32 [4] of ``count`` minima times sums of codes."""
    sums = v.let(token.length + v.let(token.length // 64))
    place = sums + number * 32 if count == 16 else sums + v.let(token.length // 8) + number * 16
    codes = token.load_as(place, "int16", count)
    if count == 8:
        return v.let(machine.multiply_words(mins, codes, 4))
    halves = [
        (v.let(pick(mins, 16, places)), v.let(pick(codes, 16, places)))
        for places in (range(8), range(8, 16))
    ]
    first = v.let(machine.multiply_words(*halves[0], 4))
    return v.let(machine.add_words(first, *halves[1], 4))


def _emit_groups(rows: _Rows, start: v.Expr, tokens: _Tokens, columns: _Columns) -> list[v.Expr]:
    machine, unpacking, table = rows.machine, rows.unpacking, rows.table
    size = min(machine.width, 32)
    lanes, length = size // 4, rows.length
    totals = [v.Cell(v.constant(0.0, "float32", lanes)) for _ in tokens]
    low_sums = [v.Cell(T.float32(0.0)) for _ in tokens]
    bundled: v.Expr = T.int64(0)
    count = unpacking.count_bundle(machine.width)
    # Two narrow registers share what scales take.
    twice = [2 * count] if machine.width == 32 and unpacking.groups is not None else []
    for groups in [*twice, count] if count > 1 else []:
        together = groups // len(unpacking.opens)
        end = v.let(table.blocks // together * together)
        found = _emit_bundles(rows, start, columns, (bundled, end), groups)
        for own, cell in zip(found, low_sums, strict=False):
            cell.set(cell.get() + own)
        bundled = end
    with T.serial(bundled, table.blocks) as number:
        base = v.let(start + number * unpacking.size)
        ask_ahead(table.weights, base + _AHEAD, unpacking.size)
        source = Source(machine, table.weights, base, table.grid)
        for piece, open_block in enumerate(unpacking.opens):
            group = v.let(number * len(unpacking.opens) + piece)
            block = open_block(source)
            taken = [
                machine.take_signed(part.weights, size) if block.is_signed else part.weights
                for part in block.parts
            ]
            for index, token in enumerate(tokens):
                scale = token.load_as(length + group * 4, "float32")
                cell = totals[index]
                for factor, total in _sum_group(machine, block, taken, token, group, size):
                    value = v.cast(total, "float32", lanes)
                    cell.set(T.fma(value, factor * v.splat(scale, lanes), cell.get()))
                if block.min_scale is not None:
                    summed = token.load_as(length + length // 8 + group * 4, "float32")
                    own_cell = low_sums[index]
                    own_cell.set(T.fma(block.min_scale, summed, own_cell.get()))
    return _add_pairs(totals, lanes, [own.get() for own in low_sums])


def _emit_bundles(
    rows: _Rows, start: v.Expr, columns: _Columns, blocks: tuple[v.Expr, v.Expr], count: int
) -> list[v.Expr]:
    """Return the sums of columns over some blocks of groups of 32, ``count`` groups at once."""
    machine, unpacking, table = rows.machine, rows.unpacking, rows.table
    assert unpacking.bundle is not None
    lanes, width, length = machine.lanes, machine.width, rows.length
    together = count // len(unpacking.opens)
    totals = [v.Cell(v.constant(0.0, "float32", lanes)) for _ in columns]
    low_sums = [v.Cell(v.constant(0.0, "float32", count)) for _ in columns]
    begin, end = blocks
    with T.serial((end - begin) // together) as number:
        base = v.let(start + (begin + number * together) * unpacking.size)
        ask_ahead(table.weights, base + _AHEAD, together * unpacking.size)
        places = [base + k * unpacking.size for k in range(together)]
        own = unpacking.bundle(
            [Source(machine, table.weights, place, table.grid, unpacking.size) for place in places]
        )
        taken = [machine.take_signed(part, width) if own.is_signed else part for part in own.parts]
        at = v.let((begin * len(unpacking.opens) + number * count) * 4)
        for index, planes in enumerate(columns):
            factors = v.let(own.scales * planes[-1].load_as(length + at, "float32", count))
            for owners in dict.fromkeys(own.owners):
                spread = [owner for owner in owners for _ in range(lanes // len(owners))]
                parts = [
                    (own.parts[part], taken[part], at * 8 + part * width)
                    for part, of in enumerate(own.owners)
                    if of == owners
                ]
                fits = len(parts) * 2 * 128 * unpacking.most < 1 << 15  # 16 bits hold sums
                add = _sum_pairs if machine.adds_pairs and fits else _sum_bytes
                total = add(machine, parts, planes, own.is_signed)
                factor = pick(factors, count, spread)
                cell = totals[index]
                cell.set(T.fma(v.cast(total, "float32", lanes), factor, cell.get()))
            mins = own.scales if own.offset else own.mins
            if mins is not None:
                least = planes[0].load_as(length + length // 8 + at, "float32", count)
                low_cell = low_sums[index]
                low_cell.set(T.fma(mins, least, low_cell.get()))
    least_factor = T.float32(float(-own.offset) if own.offset else 1.0)
    least = v.add_all_lanes([own.get() for own in low_sums], count)
    return _add_pairs(totals, lanes, [own * least_factor for own in least])


_Parts = Sequence[tuple[v.Expr, v.Expr, v.Expr]]
"""Weights, what else `Machine.take_signed` gives of them, and the place of their codes."""


def _sum_pairs(machine: Machine, parts: _Parts, planes: _Tokens, is_signed: bool) -> v.Expr:
    lanes, width = machine.lanes, machine.width
    total = v.constant(0, "int32", lanes)
    for token in planes:
        pairs = None
        for values, other, place in parts:
            codes = token.load(place, width)
            if is_signed:
                codes = v.let(machine.flip(values, codes, width))
            products = machine.add_pairs(other, codes, width)
            pairs = v.let(products if pairs is None else pairs + products)
        worth = v.constant(1 if token is planes[-1] else 256, "int16", 2 * lanes)
        total = v.let(machine.add_words(total, pairs, worth, lanes))
    return total


def _sum_bytes(machine: Machine, parts: _Parts, planes: _Tokens, is_signed: bool) -> v.Expr:
    total = v.constant(0, "int32", machine.lanes)
    for token in planes:
        if token is not planes[0]:
            total = v.let(total << v.constant(8, "int32", machine.lanes))
        for values, other, place in parts:
            codes = token.load(place, machine.width)
            if is_signed:
                total = v.let(machine.add_signed(total, values, other, codes, machine.width))
            else:
                total = v.let(machine.add_bytes(total, other, codes, machine.width))
    return total


def _sum_group(
    machine: Machine, block: Block, taken: Sequence[v.Expr], token: _Token, group: v.Expr, size: int
) -> list[tuple[v.Expr, v.Expr]]:
    """Return scales float32 and sums int32 [size / 4] of a group: one, or one of each register
    where scales are of 16 weights."""
    lanes, length = size // 4, token.length
    start = v.constant(0, "int32", lanes)
    if block.offset:
        summed = token.load_as(length + length // 4 + group * 4, "int32")
        first = [summed * T.int32(-block.offset), *[T.int32(0)] * (lanes - 1)]
        start = v.let(join(first, 1))
    sums = []
    total = start
    for place, (own, part) in enumerate(zip(taken, block.parts, strict=True)):
        codes = token.load(group * 32 + place * size, size)
        if block.is_signed:
            total = v.let(machine.add_signed(total, part.weights, own, codes, size))
        else:
            total = v.let(machine.add_bytes(total, own, codes, size))
        if block.part_scales is not None:
            scales = [block.part_scales[chunk] for chunk in part.chunks for _ in range(4)]
            sums.append((v.let(join(scales, 1)), total))
            total = start
    return sums or [(v.splat(block.scale, lanes), total)]
