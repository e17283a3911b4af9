"""Unpack rows of a packed matrix: the embedding."""

from __future__ import annotations

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.operands import Vector, list_runs
from pi2.plan.weights.layout import GROUP


def emit_unpack(vector: Vector, length: int, target: v.Buffer, base: v.Expr) -> None:
    """Write the float32 values of ``vector`` to ``target[base : base + length]``."""
    if vector.precision == "fp16":
        with T.serial(length // 16) as step:
            values = v.load_halves(vector.weights, vector.weights_base + v.wide(step * 32), 16)
            v.store(target, base + step * 16, values, 16)
        return
    for lanes, first, count in list_runs(length):
        with T.serial(count) as block, T.serial(lanes) as lane:
            _emit_group(vector, target, base, v.let(first + block * lanes), lane, lanes)


def _emit_group(
    vector: Vector, target: v.Buffer, base: v.Expr, first: v.Expr, lane: v.Expr, lanes: int
) -> None:
    """Unpack group ``first + lane`` of the block of ``lanes`` that begins with ``first``."""
    int4 = vector.precision == "int4"
    scale = v.let(v.load_halves(vector.scales, vector.scales_base + v.wide((first + lane) * 2), 1))
    start = base + (first + lane) * GROUP
    for chunk in range(4 if int4 else 8):
        inner = first * (GROUP // 2 if int4 else GROUP) + chunk * 4 * lanes + lane * 4
        raw = v.let(v.load(vector.weights, vector.weights_base + v.wide(inner), 4))
        if int4:
            parts = [
                (4 * chunk, raw & v.constant(15, "uint8", 4)),
                (16 + 4 * chunk, raw >> v.constant(4, "uint8", 4)),
            ]
            offset = 8.0
        else:
            parts = [(4 * chunk, v.reinterpret(raw, "int8", 4))]
            offset = 0.0
        for place, codes in parts:
            values = v.cast(codes, "float32", 4) - v.constant(offset, "float32", 4)
            v.store(target, start + place, values * v.splat(scale, 4), 4)
