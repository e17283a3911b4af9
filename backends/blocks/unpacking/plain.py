"""Floats."""

from __future__ import annotations

from pi2.backends.blocks.unpacking.block import Unpacking
from pi2.backends.compiler import vectors as v


def _read_f32(weights: v.Buffer, byte: v.Expr, lanes: int) -> v.Expr:
    return v.load_as(weights, byte, "float32", lanes)


def _read_f16(weights: v.Buffer, byte: v.Expr, lanes: int) -> v.Expr:
    return v.load_halves(weights, byte, lanes)


def _read_bf16(weights: v.Buffer, byte: v.Expr, lanes: int) -> v.Expr:
    raw = v.cast(v.load_as(weights, byte, "int16", lanes), "int32", lanes)
    return v.reinterpret(raw << v.constant(16, "int32", lanes), "float32", lanes)


UNPACKINGS = {
    "f32": Unpacking(size=4, elements=1, floats=_read_f32),
    "f16": Unpacking(size=2, elements=1, floats=_read_f16),
    "bf16": Unpacking(size=2, elements=1, floats=_read_bf16),
}
