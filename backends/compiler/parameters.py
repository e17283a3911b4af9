"""Parameters of a function under construction, and the function around them."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v


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


def make_function(name: str, emit: Callable[[Parameters], None]) -> tvm.tirx.PrimFunc:
    """Build a function whose parameters and body ``emit`` adds."""
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name(name)
            T.func_attr({"global_symbol": name, "tirx.noalias": True})
            emit(Parameters())
    return builder.get()
