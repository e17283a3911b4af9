"""Parameters that the kernels of a model have in common."""

from __future__ import annotations

from collections.abc import Callable

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.compiler.parameters import Parameters
from pi2.backends.kernels.matrix import Matrix
from pi2.backends.kernels.operands import Activations
from pi2.plan.weights.layout import Precision


def take_matrix(
    take: Parameters, name: str, rows: int, length: int, precision: Precision
) -> Matrix:
    """Declare weights and scales of a packed matrix."""
    return Matrix(
        weights=take.take_array(f"{name}_weights", "uint8"),
        scales=take.take_array(f"{name}_scales", "uint8"),
        rows=rows,
        length=length,
        precision=precision,
    )


def take_activations(
    take: Parameters,
    name: str,
    length: int,
    planes: int,
    count: v.Expr,
    chunk_planes: int | None = None,
    *,
    pairs: bool = False,
) -> Activations:
    """Declare the arrays of quantised activations; ``count`` is a positive parameter.

    With ``chunk_planes`` it is the number of tokens, and more than one have those planes and,
    with ``pairs``, the order of `i8mm`.
    """
    differs = chunk_planes is not None and (pairs or chunk_planes != planes)
    return Activations(
        several=count > 1 if differs else None,
        chunk_planes=chunk_planes or planes,
        once=T.min(count, 1),
        length=length,
        planes=planes,
        codes=take.take_array(f"{name}_codes", "int8"),
        scales=take.take_array(f"{name}_scales", "float32"),
        sums=take.take_array(f"{name}_sums", "int32"),
        values=take.take_array(f"{name}_values", "float32"),
        tiles=take.take_array(f"{name}_tiles", "int8") if pairs else None,
    )


def emit_each_token(tokens: v.Expr, emit: Callable[[v.Expr], None]) -> None:
    """Run ``emit`` for every token: in place for one, in parallel for more."""
    with T.If(tokens == 1):
        with T.Then():
            emit(T.int32(0))
        with T.Else(), T.parallel(tokens) as token:
            emit(token)
