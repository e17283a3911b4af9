"""Down vectors of a few neurons, each times its activation, added to y of one token."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.narrow_blocks import (
    WIDE,
    can_widen,
    emit_narrow_block,
    load_wide_scale,
)
from pi2.backends.kernels.operands import Prefetch, Vector
from pi2.backends.kernels.spec import KernelSpec
from pi2.backends.kernels.unpacking import (
    count_tile_bytes,
    count_tiles,
    emit_tile,
    list_tiles,
    load_block_scale,
)
from pi2.plan.weights.layout import GROUP, weight_bytes


def emit_downs(
    isa: Isa,
    spec: KernelSpec,
    vectors: Sequence[Vector],
    values: Sequence[v.Expr],
    target: v.Buffer,
    base: v.Expr,
    once: v.Expr,
    ask: Prefetch | None = None,
) -> None:
    """Add each of some down ``vectors`` times its value to ``target[base:]`` (lane order), one
    after the other; ``ask`` is told what is read, and when.  ``once``: see `Activations`."""
    per_block = count_tiles(spec.ffn)
    size = weight_bytes(GROUP, spec.ffn)

    def add_rows(
        vectors: Sequence[Sequence[tuple[v.Expr, v.Expr]]], scales: Sequence[v.Expr], lanes: int
    ) -> None:
        """Add, of each of some vectors, registers of weights by their places, times its scale."""
        for rows in zip(*vectors, strict=True):
            at = v.let(base + rows[0][0])
            total = v.load(target, at, lanes)
            for (_, weights), scale in zip(rows, scales, strict=True):
                total = T.fma(weights, scale, total)
            v.store(target, at, total, lanes)

    def emit_block(lanes: int, first: v.Expr) -> None:
        step = count_tile_bytes(spec.ffn, lanes)
        scales = [
            v.let(load_block_scale(vector, lanes, first) * v.splat(value, lanes))
            for vector, value in zip(vectors, values, strict=True)
        ]
        for chunk in range(per_block):
            tiles = []
            for index, vector in enumerate(vectors):
                if ask is not None:
                    ask(index, v.wide(first * size) + chunk * step, step)
                tiles.append(emit_tile(isa, vector, lanes, first, chunk))
            add_rows(tiles, scales, lanes)

    def emit_narrow(lanes: int, first: v.Expr) -> None:
        blocks = []
        for index, vector in enumerate(vectors):
            if ask is not None:
                ask(index, v.wide(first * size), lanes * size)
            blocks.append(emit_narrow_block(vector, lanes, first))
        scales = [
            v.let(load_wide_scale(vector, value, lanes, first))
            for vector, value in zip(vectors, values, strict=True)
        ]
        add_rows(blocks, scales, WIDE)

    for lanes, group, tiles in list_tiles(spec.hidden, spec.ffn):
        groups = 1 if spec.ffn == "fp16" else lanes
        emit_own = emit_narrow if can_widen(isa, spec.ffn, lanes) else emit_block
        with T.serial(tiles // per_block * once) as block:
            emit_own(lanes, group + block * groups)
