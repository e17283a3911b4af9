"""Dot products of packed vectors with float32 activations: nothing is rounded to integers."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.operands import Activations, Prefetch, Vector, list_runs
from pi2.backends.kernels.unpacking import (
    count_tile_bytes,
    count_tiles,
    emit_tile,
    load_block_scale,
)
from pi2.plan.weights.layout import GROUP, weight_bytes


def emit_float_block(
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
    """Add quantised weights times float32 values, of the block of ``lanes`` groups that begins
    with ``group``, to ``sums`` float32 [tokens, top] of each vector.

    Integers times values are added up over the block, then multiplied with the scales.
    """
    precision = vectors[0].precision
    group_bytes = weight_bytes(GROUP, precision)
    zero = v.constant(0.0, "float32", lanes)
    # Two sums in turn, as an addition waits for the last one to the same sum; always two, so that a
    # gate has the same bits wherever it is computed.
    cells = [[(v.Cell(zero), v.Cell(zero)) for _ in tokens] for _ in vectors]
    # A loop that LLVM cannot unroll: it would reorder the additions and spill.
    size = count_tile_bytes(precision, lanes)
    with T.serial(v.wide(count_tiles(precision) * activations.once)) as tile:
        tiles = []
        for index, vector in enumerate(vectors):
            if prefetch is not None:
                prefetch(index, group * group_bytes + tile * size, size)
            tiles.append(emit_tile(isa, vector, lanes, group, tile))
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
        scale = v.let(load_block_scale(vector, lanes, group))
        for index, (first, second) in enumerate(row):
            old = v.load(buffer, index * top, lanes)
            total = T.fma(first.get() + second.get(), scale, old)
            v.store(buffer, index * top, total, lanes)


def _load_values(activations: Activations, place: v.Expr, lanes: int) -> v.Expr:
    return v.load_as(activations.codes, place * 4, "float32", lanes)


def emit_lane_order(target: Activations, token: v.Expr) -> None:
    """Copy a token's values in lane order to its codes."""
    start = v.let(v.wide(token) * target.length)
    for lanes, first, count in list_runs(target.length):
        with T.serial(count * target.once) as block, T.serial(GROUP * target.once) as element:
            base = v.let(start + (first + block * lanes) * GROUP)
            row = target.values[v.span(base + element, lanes, GROUP)]
            bytes_ = v.reinterpret(row, "int8", 4 * lanes)
            v.store(target.codes, (base + element * lanes) * 4, bytes_, 4 * lanes)


def emit_half_dots(
    vectors: Sequence[Vector],
    activations: Activations,
    tokens: Sequence[v.Expr],
    prefetch: Prefetch | None,
) -> list[list[v.Expr]]:
    """Return dot products of fp16 vectors with the float32 values."""
    length = activations.length
    sums = [T.alloc_buffer((len(tokens) * 32,), "float32") for _ in vectors]
    for buffer in sums:
        for part in range(2 * len(tokens)):
            v.store(buffer, part * 16, v.constant(0.0, "float32", 16), 16)
    with T.serial(length // GROUP * activations.once) as group:
        if prefetch is not None:
            for index in range(len(vectors)):
                prefetch(index, v.wide(group * 2 * GROUP), 2 * GROUP)
        for half in range(2):
            at = group * GROUP + half * 16
            rows = [
                v.let(v.load_halves(vector.weights, vector.weights_base + v.wide(at * 2), 16))
                for vector in vectors
            ]
            for index, token in enumerate(tokens):
                place = index * 32 + half * 16
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
