"""Dot products of packed vectors with float32 activations: nothing is rounded to integers."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.tirx.script import builder as T

from pi2.backends.kernels import vectors as v
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.operands import Activations, Prefetch, Vector, list_runs
from pi2.backends.kernels.units import emit_unit, load_unit_scale
from pi2.plan.layout import GROUP

PARTS = 2
"""Sums that are added to in turn: an addition waits for the last one to the same sum.  As many
whatever is computed together, so that a gate has the same bits wherever it is computed."""


def emit_float_dots(
    isa: Isa,
    vectors: Sequence[Vector],
    activations: Activations,
    tokens: Sequence[v.Expr],
    prefetch: Prefetch | None,
) -> list[list[v.Expr]]:
    """Return dot products of int4 or int8 vectors with float32 values in lane order.

    Integer weights times values are added up over a block, then multiplied with the scales.
    """
    tokens = [v.let(v.wide(token)) for token in tokens]
    runs = list_runs(activations.length)
    top = runs[0][0]
    sums = [T.alloc_buffer((len(tokens) * top,), "float32") for _ in vectors]
    for buffer in sums:
        for index in range(len(tokens)):
            v.store(buffer, index * top, v.constant(0.0, "float32", top), top)
    for lanes, first, count in runs:
        with T.serial(v.wide(count * activations.once)) as block:
            group = v.let(first + block * lanes)
            cells = _emit_block(isa, vectors, activations, tokens, group, lanes, prefetch)
            for vector, buffer, row in zip(vectors, sums, cells, strict=True):
                scale = v.let(load_unit_scale(vector, lanes, group))
                for index, parts in enumerate(row):
                    total = parts[0].get()
                    for part in parts[1:]:
                        total = total + part.get()
                    old = v.load(buffer, index * top, lanes)
                    v.store(buffer, index * top, T.fma(total, scale, old), lanes)
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
    group: v.Expr,
    lanes: int,
    prefetch: Prefetch | None,
) -> list[list[list[v.Cell]]]:
    """Return sums of q * x over the block that begins with ``group``, per vector and token, each in
    parts."""
    int4 = vectors[0].precision == "int4"
    group_bytes = GROUP // 2 if int4 else GROUP
    zero = v.constant(0.0, "float32", lanes)
    cells = [[[v.Cell(zero) for _ in range(PARTS)] for _ in tokens] for _ in vectors]
    # A loop that LLVM cannot unroll: it would reorder the additions and spill.
    with T.serial(v.wide((4 if int4 else 8) * activations.once)) as chunk:
        units = []
        for index, vector in enumerate(vectors):
            if prefetch is not None:
                prefetch(index, group * group_bytes + chunk * (4 * lanes), 4 * lanes)
            units.append(emit_unit(isa, vector, lanes, group, chunk))
        for turn, rows in enumerate(zip(*units, strict=True)):
            place = v.let(rows[0][0])
            values = [
                v.let(_load_values(activations, token * activations.length + place, lanes))
                for token in tokens
            ]
            for (_, unpacked), row in zip(rows, cells, strict=True):
                weights = v.let(unpacked)
                for value, sums in zip(values, row, strict=True):
                    cell = sums[turn % PARTS]
                    cell.set(T.fma(weights, value, cell.get()))
    return cells


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
