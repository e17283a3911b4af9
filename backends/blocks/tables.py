"""Kernels under construction: functions of a table of arguments and a range of items."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tvm
from tvm import tirx
from tvm.ir import PointerType, PrimType
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from pi2.backends.blocks.contract import FIELDS
from pi2.backends.compiler import vectors as v

_ANY = 1 << 46
"""Elements of an array whose size nobody needs to know."""


class Table:
    """The arguments of the kernel under construction."""

    def __init__(self, fields: Sequence[str]) -> None:
        self._fields = fields
        handle = T.arg("table", T.handle("int64"))
        self.first = T.arg("first", T.int64())
        """The first item to compute."""
        self.end = T.arg("end", T.int64())
        """The item after the last one."""
        self.thread = T.arg("thread", T.int64())
        self._numbers = T.decl_buffer((len(fields),), "int64", data=handle)

    def take(self, name: str) -> v.Expr:
        """Return a whole number."""
        return v.let(self._numbers[self._fields.index(name)])

    def take_float(self, name: str) -> v.Expr:
        """Return a float32, which is the low half of its number."""
        low = T.cast(self._numbers[self._fields.index(name)], "int32")
        return v.let(T.reinterpret(low, dtype="float32"))

    def take_array(self, name: str, dtype: str) -> v.Buffer:
        """Return a flat array, of whose alignment nothing is known."""
        return view(self._numbers[self._fields.index(name)], dtype)


def view(address: v.Expr, dtype: str) -> v.Buffer:
    """Return what lies at an address as a flat array."""
    pointer = T.bind(tirx.op.reinterpret(PointerType(PrimType(dtype)), address))
    return T.decl_buffer((_ANY,), dtype, data=pointer, align=1)


def make_tabled_function(name: str, emit: Callable[[Table], None]) -> tvm.tirx.PrimFunc:
    """Build the kernel ``name`` of `contract.FIELDS`."""
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name(name)
            T.func_attr({"global_symbol": name})
            emit(Table(FIELDS[name]))
    return builder.get()
