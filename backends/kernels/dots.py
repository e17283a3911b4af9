"""Dot products of packed vectors (`pi2.plan.weights.layout`) with quantised activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.tirx import Shuffle
from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.operands import FLOAT_PLANES, Activations, Prefetch, Vector, list_runs
from pi2.backends.kernels.products import DotPrimitive, emit_float_block, emit_half_dots
from pi2.backends.kernels.unpacking import load_scales
from pi2.formats import find_packing
from pi2.plan.weights.layout import GROUP, Precision, weight_bytes


def emit_dots(
    isa: Isa,
    vectors: Sequence[Vector],
    activations: Activations,
    tokens: Sequence[v.Expr],
    prefetch: Prefetch | None = None,
) -> list[list[v.Expr]]:
    """Return vector . x for each vector and token; ``prefetch`` is told what is read, and when.

    Several vectors share the loads of activations, several tokens the unpacking of weights.
    """
    if vectors[0].precision == "fp16":
        return emit_half_dots(vectors, activations, tokens, prefetch)
    emit_block = emit_float_block if activations.planes == FLOAT_PLANES else _emit_block
    tokens = [v.let(v.wide(token)) for token in tokens]
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
            emit_block(isa, vectors, activations, tokens, sums, top, group, lanes, prefetch)
    return [
        [
            v.let(v.add_lanes(v.load(buffer, index * top, top), "float32", top))
            for index in range(len(tokens))
        ]
        for buffer in sums
    ]


def _emit_block(
    isa: Isa,
    vectors: Sequence[Vector],
    activations: Activations,
    tokens: Sequence[v.Expr],
    sums: Sequence[v.Buffer],
    top: int,
    group: v.Expr,
    lanes: int,
    prefetch: Prefetch | None,
) -> None:
    """Add the products of the block that begins with group ``group`` to ``sums``."""
    precision = vectors[0].precision
    group_bytes = weight_bytes(GROUP, precision)
    groups = activations.length // GROUP
    # A block narrower than a register: several of its chunks fill one.
    fold = min(max(isa.lanes // lanes, 1), 4, find_packing(precision).chunks)
    if precision == "int3":
        # Both chunks take bits of a third.
        fold = 1
    if precision == "ternary" and lanes == 1:
        # Both chunks fill half of a register, and two fields of them a whole one.
        fold = 4
    width = min(isa.lanes, lanes)
    for first in range(0, lanes, width):
        piece = _Piece(
            byte=group * group_bytes + 4 * first,
            element=group * GROUP + 4 * first,
            group=group + first,
            lanes=lanes,
            width=width,
            fold=fold,
        )
        totals = _emit_groups(isa, vectors, activations, tokens, piece, prefetch)
        for vector, buffer, row in zip(vectors, sums, totals, strict=True):
            weight_scale = load_scales(vector, piece.group, width)
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


def _emit_groups(
    isa: Isa,
    vectors: Sequence[Vector],
    activations: Activations,
    tokens: Sequence[v.Expr],
    piece: _Piece,
    prefetch: Prefetch | None,
) -> list[list[v.Expr]]:
    """Return int32 x ``width`` sums of q * x over the groups of a piece, per vector and token."""
    wide = piece.width * piece.fold
    dot = DotPrimitive(isa, wide)
    planes = activations.used_planes
    precision = vectors[0].precision
    chunks = find_packing(precision).chunks
    int8 = precision == "int8"
    # Weights of int8 are two nibbles: 16 high + low; vnni and sdot take whole bytes.
    split = precision in ("int8", "mxfp4") and not dot.whole_bytes
    streams = 2 if split else 1
    # A sum may begin with what takes the weights' offset out again: it need not be added later.
    begins_with_offset = precision == "int4" and dot.whole_bytes and piece.fold == 1
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
            if prefetch is not None:
                prefetch(index, piece.byte + offset, 4 * wide)
            size = 4 * chunks * piece.lanes if is_narrow else 4 * wide
            raw = v.let(_load_chunk(vector, piece, offset, size))
            if is_narrow:
                rows.append(_unpack_narrow(isa, raw))
            elif precision == "int3":
                assert isinstance(chunk, int)
                highest = v.let(_load_chunk(vector, piece, 8 * piece.lanes, 4 * wide))
                rows.append(_unpack_triples(dot, raw, highest, chunk))
            else:
                rows.append(_unpack(dot, raw, precision, split))
        for half in range(len(rows[0])):
            # Fields of a byte are as many elements apart as a chunk of all blocks has of one field.
            step = GROUP // len(rows[0])
            shift = 0 if int8 else step * piece.lanes * half
            stream = half if split else 0
            for index, token in enumerate(tokens):
                for plane in range(planes):
                    row_of_codes = token * activations.planes + plane
                    base = row_of_codes * activations.length + piece.element
                    codes = v.let(v.load(activations.codes, base + offset + shift, 4 * wide))
                    for row, unpacked in zip(cells, rows, strict=True):
                        cell = row[index][plane * streams + stream]
                        cell.set(dot.add(cell.get(), unpacked[half], codes))

    unrolls = isa.unrolls and not isa.few_tokens and len(tokens) > 1
    if unrolls or len(vectors) * len(tokens) == 1 or precision == "int3" or is_narrow:
        for chunk in range(0, chunks, piece.fold):
            emit_chunk(chunk)
    else:
        # A loop that LLVM cannot unroll: it would reorder the additions and spill.
        with T.serial(v.wide(chunks // piece.fold * activations.once)) as step:
            emit_chunk(step * piece.fold)
    totals = [[[cell.get() for cell in column] for column in row] for row in cells]
    return [
        [
            _finish(dot, cells, activations, token, piece, precision, begins_with_offset)
            for cells, token in zip(total, tokens, strict=True)
        ]
        for total in totals
    ]


def _load_chunk(vector: Vector, piece: _Piece, offset: int, size: int) -> v.Expr:
    return v.load(vector.weights, vector.weights_base + piece.byte + offset, size)


def _unpack(dot: DotPrimitive, raw: v.Expr, precision: Precision, split: bool) -> list[v.Expr]:
    if precision in ("int2", "ternary"):
        return [v.let(dot.take_pair(raw, number)) for number in range(4)]
    if precision == "int4":
        return [v.let(dot.take_low(raw)), v.let(dot.take_high(raw))]
    if precision == "mxfp4":
        return [v.let(dot.look_up(dot.take_low(raw))), v.let(dot.look_up(dot.take_high(raw)))]
    if dot.signed:
        return [v.let(v.reinterpret(raw, "int8", 4 * dot.width))]
    unsigned = v.let(raw ^ v.constant(0x80, "uint8", 4 * dot.width))
    if split:
        return [v.let(dot.take_low(unsigned)), v.let(dot.take_high(unsigned))]
    return [unsigned]


def _unpack_narrow(isa: Isa, raw: v.Expr) -> list[v.Expr]:
    """Return what the primitive takes of a whole group of ternary, named: two fields side by
    side."""
    half = DotPrimitive(isa, 2)
    fields = [v.let(half.take_pair(raw, number)) for number in range(4)]
    return [v.let(Shuffle(fields[first : first + 2], list(range(16)))) for first in (0, 2)]


def _unpack_triples(dot: DotPrimitive, raw: v.Expr, highest: v.Expr, chunk: int) -> list[v.Expr]:
    """Return what the primitive takes of a chunk of int3, named."""
    return [
        v.let(dot.take_pair(raw, field) | dot.take_highest(highest, chunk + 2 * field))
        for field in range(4)
    ]


def _finish(
    dot: DotPrimitive,
    cells: Sequence[v.Expr],
    activations: Activations,
    token: v.Expr,
    piece: _Piece,
    precision: Precision,
    begins_with_offset: bool,
) -> v.Expr:
    """Join streams, planes and folded lanes; take the weights' offset out again, unless the sum
    ``begins_with_offset``."""
    values = [dot.finish(cell) for cell in cells]
    if len(values) > activations.used_planes:
        places = v.constant(4 if precision == "int8" else 0, "int32", dot.width)
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
    if precision not in ("int8", "mxfp4") or not dot.signed:
        offset = _load_offset(activations, token, piece)
        if precision == "int2":
            third = v.let(offset >> v.constant(3, "int32", piece.width))
            total = total + total + third + third + third
        elif precision == "ternary":
            total = total + (offset >> v.constant(3, "int32", piece.width))
        elif precision == "mxfp4":
            half = v.let(offset >> v.constant(1, "int32", piece.width))
            total = total + offset + half
        elif precision == "int3":
            seventh = v.let(offset >> v.constant(3, "int32", piece.width))
            total = total + total + seventh * v.constant(7, "int32", piece.width)
        elif precision == "int8":
            total = total + (offset << v.constant(4, "int32", piece.width))
        else:
            total = total + offset
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
