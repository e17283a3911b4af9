"""Parameters of a function under construction, and the function around them."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from pi2.backends.kernels import vectors as v
from pi2.backends.kernels.matrix import Matrix
from pi2.backends.kernels.operands import Activations
from pi2.plan.weights.layout import Precision


class Parameters:
    """Declares the parameters of the function under construction, in order."""

    def take_array(self, name: str, dtype: str) -> v.Buffer:
        """Declare a flat array of any size."""
        handle = T.arg(name, T.handle())
        size = T.int64()
        align = 1 if dtype == "uint8" else 64
        return T.match_buffer(handle, (size,), dtype, align=align)

    def take_number(self, name: str, dtype: str = "int32") -> v.Expr:
        """Declare a scalar."""
        return T.arg(name, T.int64() if dtype == "int64" else getattr(T, dtype)())

    def take_matrix(self, name: str, rows: int, length: int, precision: Precision) -> Matrix:
        """Declare weights and scales of a packed matrix."""
        return Matrix(
            weights=self.take_array(f"{name}_weights", "uint8"),
            scales=self.take_array(f"{name}_scales", "uint8"),
            rows=rows,
            length=length,
            precision=precision,
        )

    def take_activations(
        self,
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
            codes=self.take_array(f"{name}_codes", "int8"),
            scales=self.take_array(f"{name}_scales", "float32"),
            sums=self.take_array(f"{name}_sums", "int32"),
            values=self.take_array(f"{name}_values", "float32"),
            tiles=self.take_array(f"{name}_tiles", "int8") if pairs else None,
        )


def make_function(name: str, emit: Callable[[Parameters], None]) -> tvm.tirx.PrimFunc:
    """Build a function whose parameters and body ``emit`` adds."""
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name(name)
            T.func_attr({"global_symbol": name, "tirx.noalias": True})
            emit(Parameters())
    return builder.get()


def emit_each_token(tokens: v.Expr, emit: Callable[[v.Expr], None]) -> None:
    """Run ``emit`` for every token: in place for one, in parallel for more."""
    with T.If(tokens == 1):
        with T.Then():
            emit(T.int32(0))
        with T.Else(), T.parallel(tokens) as token:
            emit(token)
