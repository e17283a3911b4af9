"""Parameters of a function under construction, and the function around them."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.compiler.signature import Kind, Parameter, Signature, arrange


class Parameters:
    """Declares the parameters of the function under construction."""

    def __init__(self) -> None:
        self.declared: list[Parameter] = []

    def take_array(self, name: str, dtype: str, *shape: int | str) -> v.Buffer:
        """Declare a flat array that stays the same from call to call; ``shape`` as in
        `Parameter`."""
        return self._take_array(name, "bound", dtype, shape)

    def take_given_array(self, name: str, dtype: str, *shape: int | str) -> v.Buffer:
        """Declare a flat array that every call gives."""
        return self._take_array(name, "given", dtype, shape)

    def _take_array(
        self, name: str, kind: Kind, dtype: str, shape: tuple[int | str, ...]
    ) -> v.Buffer:
        self.declared.append(Parameter(name, kind, dtype, shape))
        handle = T.arg(name, T.handle())
        size = T.int64()
        align = 1 if dtype == "uint8" else 64
        return T.match_buffer(handle, (size,), dtype, align=align)

    def take_number(self, name: str, dtype: str = "int32") -> v.Expr:
        """Declare a scalar."""
        self.declared.append(Parameter(name, "number", dtype))
        return T.arg(name, T.int64() if dtype == "int64" else getattr(T, dtype)())


def make_function(name: str, emit: Callable[[Parameters], None]) -> tvm.tirx.PrimFunc:
    """Build a function whose parameters, as they are declared, and body ``emit`` adds."""
    return _build(name, emit)[0]


def make_bindable_function(
    name: str, emit: Callable[[Parameters], None]
) -> tuple[tvm.tirx.PrimFunc, Signature]:
    """Build the same with its parameters in the order of its signature."""
    function, declared = _build(name, emit)
    signature = arrange(declared)
    handles = {item.name: handle for item, handle in zip(declared, function.params, strict=True)}
    ordered = [handles[item.name] for item in (*signature.bound, *signature.given)]
    arranged = tvm.tirx.PrimFunc(ordered, function.body, function.ret_type, function.attrs)
    return arranged, signature


def _build(
    name: str, emit: Callable[[Parameters], None]
) -> tuple[tvm.tirx.PrimFunc, list[Parameter]]:
    parameters = Parameters()
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name(name)
            T.func_attr({"global_symbol": name, "tirx.noalias": True})
            emit(parameters)
    return builder.get(), parameters.declared
