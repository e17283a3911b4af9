"""Small loops over a row of the residual stream; ``length`` is a multiple of 16."""

from __future__ import annotations

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v


def emit_copy(source: v.Buffer, target: v.Buffer, base: v.Expr, length: int) -> None:
    """Copy ``source[base : base + length]`` to the same place of ``target``."""
    with T.serial(length // 16) as step:
        place = v.let(base + step * 16)
        v.store(target, place, v.load(source, place, 16), 16)


def emit_fill(target: v.Buffer, base: v.Expr, length: int, value: float) -> None:
    """Set ``target[base : base + length]`` to ``value``."""
    with T.serial(length // 16) as step:
        v.store(target, base + step * 16, v.constant(value, "float32", 16), 16)


def emit_scale(target: v.Buffer, base: v.Expr, length: int, factor: float | v.Expr) -> None:
    """Multiply ``target[base : base + length]`` by ``factor``."""
    if isinstance(factor, float):
        if factor == 1.0:
            return
        factor = v.constant(factor, "float32")
    factor = v.let(factor)
    with T.serial(length // 16) as step:
        place = v.let(base + step * 16)
        part = v.load(target, place, 16) * v.splat(factor, 16)
        v.store(target, place, part, 16)


def emit_add_scaled(
    source: v.Buffer, target: v.Buffer, base: v.Expr, length: int, factor: float
) -> None:
    """Add ``factor * source[:length]`` to ``target[base : base + length]``."""
    with T.serial(length // 16) as step:
        place = v.let(base + step * 16)
        part = v.load(source, step * 16, 16) * v.constant(factor, "float32", 16)
        v.store(target, place, v.load(target, place, 16) + part, 16)
