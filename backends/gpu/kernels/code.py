"""Small vocabulary for GPU kernels over TVMScript's builder.

A kernel is explicit: its threads, its loops and what it keeps in registers and in the memory that a
work group shares.  Every function adds to the kernel under construction.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm.script.ir_builder import IRBuilder
from tvm.tirx import Shuffle
from tvm.tirx.script import builder as T

from pi2.backends.gpu.kernels.signature import ONCE, Axis, NumberType

Expr = Any
Buffer = Any
Read = Callable[[Expr], Expr]
Write = Callable[[Expr, Expr], None]


class Cell:
    """A variable of a thread."""

    def __init__(self, start: Expr) -> None:
        self._cell = T.alloc_buffer((1,), start.ty.dtype, scope="local")
        self.set(start)

    def get(self) -> Expr:
        """Return its value."""
        return self._cell[0]

    def set(self, value: Expr) -> None:
        """Change its value."""
        T.buffer_store(self._cell, value, [0])

    def add(self, value: Expr) -> None:
        """Add to its value."""
        self.set(self.get() + value)


def let(value: Expr) -> Expr:
    """Name a value, so that it is computed once however often it is used."""
    return Cell(value).get()


def number(value: float) -> Expr:
    """Return a float32 literal."""
    bits = struct.pack("<f", value)
    # Sources have seven digits of a number: others are given by their bits.
    if struct.pack("<f", float(f"{value:e}")) == bits:
        return T.FloatImm("float32", float(value))
    return T.reinterpret(T.uint32(struct.unpack("<I", bits)[0]), dtype="float32")


def make_zeros(count: int) -> list[Cell]:
    """Return float32 variables that are 0."""
    return [Cell(number(0.0)) for _ in range(count)]


def take_lane(vector: Expr, lane: int) -> Expr:
    """Return one element of a vector."""
    return Shuffle([vector], [lane])


def divide_up(value: Expr, by: int) -> Expr:
    """Return how many pieces of ``by`` hold ``value`` elements."""
    return T.floordiv(value + (by - 1), by)


def share(size: int, dtype: str = "float32") -> Buffer:
    """Return an array that the threads of a work group share."""
    return T.alloc_buffer((size,), dtype, scope="shared")


def wait_for_group() -> None:
    """Let all threads of the work group arrive here, with what they wrote to shared arrays."""
    T.evaluate(T.tvm_storage_sync("shared"))


def add_in_group(shared: Buffer, thread: Expr, value: Expr, threads: int) -> Expr:
    """Return the sum of ``value`` over all ``threads`` (a power of 2), the same in each; ``shared``
    has an element for each."""
    store(shared, thread, value)
    wait_for_group()
    half = threads // 2
    while half:
        with when(thread < half):
            store(shared, thread, shared[thread] + shared[thread + half])
        wait_for_group()
        half //= 2
    total = let(shared[0])
    wait_for_group()
    return total


def store(buffer: Buffer, index: Expr, value: Expr) -> None:
    """Write one element."""
    T.buffer_store(buffer, value, [index])


@contextmanager
def when(condition: Expr) -> Iterator[None]:
    """Add what follows for threads of which ``condition`` holds."""
    with T.If(condition), T.Then():
        yield


@dataclass(frozen=True, slots=True)
class Place:
    """Where a thread is: its group in the grid and its place in the group, by axis."""

    group: tuple[Expr, Expr]
    thread: tuple[Expr, Expr, Expr]


@dataclass
class Kernel:
    """A kernel under construction."""

    name: str
    block: tuple[int, int, int]
    arrays: dict[str, str] = field(default_factory=dict)
    """Types by name, in the order of declaration."""
    numbers: dict[str, NumberType] = field(default_factory=dict)
    grid: tuple[Axis, Axis] = (ONCE, ONCE)
    function: tvm.tirx.PrimFunc | None = None
    _expressions: dict[str, Expr] = field(default_factory=dict)

    @contextmanager
    def declare(self) -> Iterator[None]:
        """Declare the kernel: parameters first, then `run`."""
        with IRBuilder() as builder:
            with T.prim_func(s_tir=True):
                T.func_name(self.name)
                T.func_attr({"global_symbol": self.name, "tirx.noalias": True})
                yield
        self.function = builder.get()

    def take_array(self, name: str, dtype: str) -> Buffer:
        """Declare a flat array."""
        self.arrays[name] = dtype
        handle = T.arg(f"{name}_handle", T.handle())
        return IRBuilder.name(name, T.match_buffer(handle, (T.int32(),), dtype, align=16))

    def take_number(self, name: str, dtype: NumberType = "int32") -> Expr:
        """Declare a scalar."""
        self.numbers[name] = dtype
        self._expressions[name] = T.arg(name, getattr(T, dtype)())
        return self._expressions[name]

    @contextmanager
    def run(self, x: Axis = ONCE, y: Axis = ONCE) -> Iterator[Place]:
        """Add what every thread does, in as many work groups as the axes say."""
        self.grid = (x, y)
        with ExitStack() as stack:

            def bind(tag: str, extent: Expr) -> Expr:
                return stack.enter_context(T.launch_thread(tag, extent))

            groups = [
                T.int32(0) if axis == ONCE else bind(f"blockIdx.{letter}", self._count(axis))
                for letter, axis in zip("xy", self.grid, strict=True)
            ]
            threads = [
                bind(f"threadIdx.{letter}", extent)
                for letter, extent in zip("xyz", self.block, strict=True)
            ]
            yield Place(group=(groups[0], groups[1]), thread=(threads[0], threads[1], threads[2]))

    def _count(self, axis: Axis) -> Expr:
        """Work groups of an axis."""
        if axis.number is None:
            return axis.times
        return axis.times * divide_up(self._expressions[axis.number], axis.per)
