"""Plain C functions out of TensorIR, and the vocabulary of Hexagon's vectors."""

from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from pi2.backends.hexagon.specification import LANES, Version

Expr = Any
Buffer = Any

VECTOR_BYTES = 128
_SIZE = 2**30
"""Elements of a view: nothing checks them."""


def make_target(version: Version) -> tvm.target.Target:
    return tvm.target.Target(
        {
            "kind": "llvm",
            "mtriple": "hexagon",
            "mcpu": f"hexagon{version}",
            "mattr": [f"+hvx{version}", "+hvx-length128b"],
        }
    )


def make_function(name: str, parameters: Sequence[str], emit: Callable[..., None]) -> tirx.PrimFunc:
    """Build a function with int32 ``parameters``, which ``emit`` is called with."""
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name(name)
            # Addresses may be of the same memory.
            T.func_attr({"global_symbol": name, "tirx.noalias": False})
            emit(*(T.arg(parameter, T.int32()) for parameter in parameters))
    return builder.get()


def view(address: Expr, dtype: str, align: int = 4) -> Buffer:
    """Return the memory at ``address`` as a flat array; ``align`` is a power of two."""
    # The compiler believes an alignment that it can see.
    wide = T.cast(address & T.int32(-align), "int64")
    kind = tvm.ir.PointerType(tvm.ir.PrimType(dtype))
    pointer = T.bind(T.reinterpret(wide, dtype=kind))
    return T.decl_buffer((_SIZE,), dtype, data=pointer, align=align)


def view_vectors(address: Expr) -> Buffer:
    """Return the memory at ``address``, a multiple of 128, as words for `load` and `store`."""
    return view(address, "int32", VECTOR_BYTES)


def load(words: Buffer, vector: Expr) -> Expr:
    return words[T.ramp(vector * LANES, 1, LANES)]


def store(words: Buffer, vector: Expr, value: Expr) -> None:
    T.buffer_store(words, value, [T.ramp(vector * LANES, 1, LANES)])


def write(buffer: Buffer, index: Expr, value: Expr) -> None:
    T.buffer_store(buffer, value, [index])


def splat(value: Expr) -> Expr:
    """Return an int32 in every lane."""
    return T.broadcast(value, LANES)


def call_hvx(name: str, *operands: Expr) -> Expr:
    """Return the words that an instruction of the vector unit gives."""
    return T.call_llvm_pure_intrin("int32x32", f"llvm.hexagon.V6.{name}.128B", *operands)


def call(name: str, *operands: Expr) -> None:
    T.evaluate(T.call_extern("int32", name, *operands))


def number(value: float) -> Expr:
    return T.FloatImm("float32", value)


def widen(value: Expr) -> Expr:
    return T.cast(value, "float32")
