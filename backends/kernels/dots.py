"""Dot products of packed vectors (`pi2.plan.weights.layout`) with quantised activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.operands import (
    FLOAT_PLANES,
    Activations,
    DotPrimitive,
    Prefetch,
    Vector,
    list_runs,
)
from pi2.backends.kernels.unpacking import Block, Chunk, Unpacking, find_unpacking
from pi2.plan.weights.layout import GROUP


def emit_dots(
    isa: Isa,
    vectors: Sequence[Vector],
    activations: Activations,
    tokens: Sequence[v.Expr],
    prefetch: Prefetch | None = None,
) -> list[list[v.Expr]]:
    """vector . x for each vector and token, sharing loads; ``prefetch`` is told of reads."""
    if find_unpacking(vectors[0].precision).packing.meets_values:
        return _emit_value_dots(isa, vectors, activations, tokens, prefetch)
    emit_block = _emit_float_block if activations.planes == FLOAT_PLANES else _emit_block
    tokens = [v.let(v.wide(token)) for token in tokens]
    dots = _Dots(isa, vectors, activations, tokens, prefetch)
    runs = list_runs(activations.length)
    top = runs[0][0]
    # One buffer per vector: arrays of 1 KiB and more would not stay on the stack.
    sums = [T.alloc_buffer((len(tokens) * top,), "float32") for _ in vectors]
    for buffer in sums:
        for index in range(len(tokens)):
            v.store(buffer, index * top, v.constant(0.0, "float32", top), top)
    for lanes, first, count in runs:
        with T.serial(v.wide(count * activations.once)) as block:
            group = v.let(first + block * lanes)
            emit_block(dots, sums, top, group, lanes)
    return [
        [
            v.let(v.add_lanes(v.load(buffer, index * top, top), "float32", top))
            for index in range(len(tokens))
        ]
        for buffer in sums
    ]


@dataclass(frozen=True, slots=True)
class _Dots:
    """Vectors of one format, times tokens."""

    isa: Isa
    vectors: Sequence[Vector]
    activations: Activations
    tokens: Sequence[v.Expr]
    prefetch: Prefetch | None

    @property
    def unpacking(self) -> Unpacking:
        return find_unpacking(self.vectors[0].precision)


def _emit_block(dots: _Dots, sums: Sequence[v.Buffer], top: int, group: v.Expr, lanes: int) -> None:
    """Add the products of the block that begins with group ``group`` to ``sums``."""
    isa, vectors, activations, tokens = dots.isa, dots.vectors, dots.activations, dots.tokens
    unpacking = dots.unpacking
    groups = activations.length // GROUP
    fold = unpacking.count_folded(isa, lanes)
    width = min(isa.lanes, lanes)
    for first in range(0, lanes, width):
        piece = _Piece(
            byte=group * unpacking.group_bytes + 4 * first,
            element=group * GROUP + 4 * first,
            group=group + first,
            lanes=lanes,
            width=width,
            fold=fold,
        )
        totals = _emit_groups(dots, piece)
        for vector, buffer, row in zip(vectors, sums, totals, strict=True):
            weight_scale = unpacking.load_scales(vector, piece.group, width)
            if activations.upper:
                weight_scale = weight_scale * v.constant(256.0, "float32", width)
            weight_scale = v.let(weight_scale)
            for index, token in enumerate(tokens):
                scale = v.load(activations.scales, token * groups + piece.group, width)
                total = v.cast(row[index], "float32", width)
                place = index * top + first
                old = v.load(buffer, place, width)
                v.store(buffer, place, T.fma(total, weight_scale * scale, old), width)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Groups of a block that one register holds; ``fold`` consecutive chunks are taken as one of
    ``fold`` times as many lanes."""

    byte: v.Expr
    """Place of the first chunk's weights, in bytes from the vector's beginning."""
    element: v.Expr
    """Place of the first chunk's activations, in elements from the vector's beginning."""
    group: v.Expr
    lanes: int
    """Lanes of the block."""
    width: int
    """Groups."""
    fold: int


def _emit_groups(dots: _Dots, piece: _Piece) -> list[list[v.Expr]]:
    """Return int32 x ``width`` sums of q * x over the groups of a piece, per vector and token."""
    isa, vectors, activations, tokens = dots.isa, dots.vectors, dots.activations, dots.tokens
    wide = piece.width * piece.fold
    dot = DotPrimitive(isa, wide)
    planes = activations.used_planes
    unpacking = dots.unpacking
    chunks = unpacking.chunks
    streams = 2 if unpacking.splits(dot) else 1
    # A sum may begin with what takes the weights' offset out again: it need not be added later.
    begins_with_offset = unpacking.begins_with_offset and dot.whole_bytes and piece.fold == 1
    cells = [
        [[v.Cell(dot.start()) for _ in range(planes * streams)] for _ in tokens] for _ in vectors
    ]
    if begins_with_offset:
        for index, token in enumerate(tokens):
            offset = v.let(_load_offset(activations, token, piece))
            for row in cells:
                row[index][-1].set(offset)

    is_narrow = piece.fold > chunks

    def emit_chunk(chunk: v.Expr | int) -> None:
        offset = chunk * (4 * piece.lanes)
        rows = []
        for index, vector in enumerate(vectors):
            if dots.prefetch is not None:
                dots.prefetch(index, piece.byte + offset, 4 * wide)
            load = partial(_load_chunk, vector, piece)
            part = Chunk(number=chunk, lanes=piece.lanes, load=load)
            rows.append(unpacking.take_fields(dot, part))
        for half in range(len(rows[0])):
            # Fields of a byte are as many elements apart as a chunk of all blocks has of one field.
            step = GROUP // len(rows[0])
            shift = step * piece.lanes * half if unpacking.divides_bytes else 0
            stream = half % streams
            for index, token in enumerate(tokens):
                for plane in range(planes):
                    row_of_codes = token * activations.planes + plane
                    base = row_of_codes * activations.length + piece.element
                    codes = v.let(v.load(activations.codes, base + offset + shift, 4 * wide))
                    for row, unpacked in zip(cells, rows, strict=True):
                        cell = row[index][plane * streams + stream]
                        cell.set(dot.add(cell.get(), unpacked[half], codes))

    unrolls = isa.unrolls and len(tokens) > 1
    if unrolls or len(vectors) * len(tokens) == 1 or unpacking.unrolls or is_narrow:
        for chunk in range(0, chunks, piece.fold):
            emit_chunk(chunk)
    else:
        # A loop that LLVM cannot unroll: it would reorder the additions and spill.
        with T.serial(v.wide(chunks // piece.fold * activations.once)) as step:
            emit_chunk(step * piece.fold)
    totals = [[[cell.get() for cell in column] for column in row] for row in cells]
    return [
        [
            _finish(dot, cells, activations, token, piece, unpacking, begins_with_offset)
            for cells, token in zip(total, tokens, strict=True)
        ]
        for total in totals
    ]


def _load_chunk(vector: Vector, piece: _Piece, offset: int, size: int) -> v.Expr:
    return v.load(vector.weights, vector.weights_base + piece.byte + offset, size)


def _finish(
    dot: DotPrimitive,
    cells: Sequence[v.Expr],
    activations: Activations,
    token: v.Expr,
    piece: _Piece,
    unpacking: Unpacking,
    begins_with_offset: bool,
) -> v.Expr:
    """Join streams, planes and folded lanes; take the weights' offset out again, unless the sum
    ``begins_with_offset``."""
    values = [dot.finish(cell) for cell in cells]
    if len(values) > activations.used_planes:
        places = v.constant(unpacking.stream_places, "int32", dot.width)
        values = [values[i] + (values[i + 1] << places) for i in range(0, len(values), 2)]
    total = values[0]
    if activations.used_planes == 2:
        total = (values[0] << v.constant(8, "int32", dot.width)) + values[1]
    lanes = dot.width
    while lanes > piece.width:
        total = _add_halves(v.let(total), lanes)
        lanes //= 2
    if begins_with_offset:
        return v.let(total)
    if unpacking.has_offset(dot):
        total = unpacking.finish(total, _load_offset(activations, token, piece), piece.width)
    return v.let(total)


def _load_offset(activations: Activations, token: v.Expr, piece: _Piece) -> v.Expr:
    """Return -8 times the sum of the codes of each group of a piece."""
    place = token * (activations.length // GROUP) + piece.group
    sums = activations.upper_sums if activations.upper else activations.sums
    return v.load(sums, place, piece.width)


def _add_halves(total: v.Expr, lanes: int) -> v.Expr:
    """Return the first half of int32 x ``lanes`` plus the second."""
    if lanes == 2:
        return v.take_lane(total, 0) + v.take_lane(total, 1)
    return v.low_half(total, "int32", lanes) + v.high_half(total, "int32", lanes)


def _emit_float_block(
    dots: _Dots, sums: Sequence[v.Buffer], top: int, group: v.Expr, lanes: int
) -> None:
    """Add a block's quantised weights times float32 values to ``sums`` float32 [tokens, top],
    summed over the block before scaling."""
    isa, vectors, activations, tokens = dots.isa, dots.vectors, dots.activations, dots.tokens
    unpacking = dots.unpacking
    zero = v.constant(0.0, "float32", lanes)
    # Two sums in turn, as an addition waits for the last one to the same sum; always two, so that a
    # gate has the same bits wherever it is computed.
    cells = [[(v.Cell(zero), v.Cell(zero)) for _ in tokens] for _ in vectors]
    # A loop that LLVM cannot unroll: it would reorder the additions and spill.
    size = unpacking.count_tile_bytes(lanes)
    with T.serial(v.wide(unpacking.tiles * activations.once)) as tile:
        tiles = []
        for index, vector in enumerate(vectors):
            if dots.prefetch is not None:
                dots.prefetch(index, group * unpacking.group_bytes + tile * size, size)
            tiles.append(unpacking.emit_tile(isa, Block(vector, lanes, group), tile))
        for turn, rows in enumerate(zip(*tiles, strict=True)):
            place = v.let(rows[0][0])
            values = [
                v.let(_load_values(activations, token * activations.length + place, lanes))
                for token in tokens
            ]
            for (_, unpacked), row in zip(rows, cells, strict=True):
                weights = v.let(unpacked)
                for value, parts in zip(values, row, strict=True):
                    cell = parts[turn % 2]
                    cell.set(T.fma(weights, value, cell.get()))
    for vector, buffer, row in zip(vectors, sums, cells, strict=True):
        scale = v.let(unpacking.load_block_scale(Block(vector, lanes, group)))
        for index, (first, second) in enumerate(row):
            old = v.load(buffer, index * top, lanes)
            total = T.fma(first.get() + second.get(), scale, old)
            v.store(buffer, index * top, total, lanes)


def _load_values(activations: Activations, place: v.Expr, lanes: int) -> v.Expr:
    return v.load_as(activations.codes, place * 4, "float32", lanes)


def _emit_value_dots(
    isa: Isa,
    vectors: Sequence[Vector],
    activations: Activations,
    tokens: Sequence[v.Expr],
    prefetch: Prefetch | None,
) -> list[list[v.Expr]]:
    """Return dot products with the float32 values."""
    length, unpacking = activations.length, find_unpacking(vectors[0].precision)
    piece = unpacking.piece
    size = unpacking.packing.count_weight_bytes(piece)
    sums = [T.alloc_buffer((len(tokens) * 32,), "float32") for _ in vectors]
    for buffer in sums:
        for part in range(2 * len(tokens)):
            v.store(buffer, part * 16, v.constant(0.0, "float32", 16), 16)
    with T.serial(length // piece * activations.once) as number:
        if prefetch is not None:
            for index in range(len(vectors)):
                prefetch(index, v.wide(number * size), size)
        opened = [unpacking.open_piece(isa, vector, number) for vector in vectors]
        for sixteen in range(piece // 16):
            at = number * piece + sixteen * 16
            rows = [v.let(read(sixteen)) for read in opened]
            for index, token in enumerate(tokens):
                place = index * 32 + sixteen % 2 * 16
                value = v.let(v.load(activations.values, token * length + at, 16))
                for buffer, weights in zip(sums, rows, strict=True):
                    old = v.load(buffer, place, 16)
                    v.store(buffer, place, T.fma(weights, value, old), 16)
    return [
        [
            v.let(
                v.add_lanes(
                    v.load(buffer, index * 32, 16) + v.load(buffer, index * 32 + 16, 16),
                    "float32",
                    16,
                )
            )
            for index in range(len(tokens))
        ]
        for buffer in sums
    ]
