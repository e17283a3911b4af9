"""Kernels under construction, and products of bytes on each instruction set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import PointerType, PrimType
from tvm.script.ir_builder import IRBuilder
from tvm.tirx import Shuffle
from tvm.tirx.script import builder as T

from pi2.backends.blocks.contract import FIELDS, TYPES
from pi2.backends.blocks.room import CHUNK
from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.isa import Isa

_ANY = 1 << 46
"""Elements of an array of unknown size."""


class Table:
    """The arguments of the kernel under construction, each by its name (`contract.FIELDS`)."""

    def __init__(self, kernel: str) -> None:
        handle = T.arg("table", T.handle("int64"))
        self.first = T.arg("first", T.int64())
        """The first item to compute."""
        self.end = T.arg("end", T.int64())
        """The item after the last one."""
        self.thread = T.arg("thread", T.int64())
        fields, types = FIELDS[kernel], TYPES[kernel]
        numbers = T.decl_buffer((len(fields),), "int64", data=handle)
        self._values: dict[str, Any] = {}
        for place, name in enumerate(fields):
            kind = types.get(name)
            if kind == "float":  # the low half of its number
                low = T.cast(numbers[place], "int32")
                self._values[name] = v.let(T.reinterpret(low, dtype="float32"))
            elif kind is None:
                self._values[name] = v.let(numbers[place])
            else:
                self._values[name] = view(numbers[place], kind)

    def __getattr__(self, name: str) -> Any:
        return self._values[name]

    def get_array(self, name: str, dtype: str) -> v.Buffer:
        """Return the array at an address, of elements that a plan chooses."""
        return view(self._values[name], dtype)


def view(address: v.Expr, dtype: str) -> v.Buffer:
    """Return a flat array, of whose alignment nothing is known."""
    pointer = T.bind(tirx.op.reinterpret(PointerType(PrimType(dtype)), address))
    return T.decl_buffer((_ANY,), dtype, data=pointer, align=1)


def make_tabled_function(name: str, emit: Callable[[Table], None]) -> tvm.tirx.PrimFunc:
    """Build the kernel ``name`` of `contract.FIELDS`."""
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name(name)
            T.func_attr({"global_symbol": name})
            emit(Table(name))
    return builder.get()


def pick(value: v.Expr, lanes: int, places: Sequence[int]) -> v.Expr:
    # As many lanes have to be given as are taken.
    copies = -(-len(places) // lanes)
    return Shuffle([value] * copies, list(places))


def join(values: Sequence[v.Expr], lanes: int) -> v.Expr:
    """Return vectors of ``lanes`` one after another."""
    if len(values) == 1:
        return values[0]
    return Shuffle(list(values), list(range(len(values) * lanes)))


def turn_square(rows: Sequence[v.Expr], lanes: int) -> list[v.Expr]:
    """Return the columns of squares of numbers that lie next to each other in rows of ``lanes``."""
    count, step, now = len(rows), 1, list(rows)
    while step < count:
        turned = list(now)
        for place in range(count):
            if place & step:
                continue
            pair = [now[place], now[place + step]]
            first = [k if not k & step else lanes + k - step for k in range(lanes)]
            second = [k + step if not k & step else lanes + k for k in range(lanes)]
            turned[place] = v.let(Shuffle(pair, first))
            turned[place + step] = v.let(Shuffle(pair, second))
        now, step = turned, 2 * step
    return now


def as_bytes(value: v.Expr, dtype: str, size: int) -> v.Expr:
    """Return the same bits as ``dtype`` int8 or uint8."""
    return v.reinterpret(value, dtype, size)


def emit_vpdpbusd(total: v.Expr, weights: v.Expr, codes: v.Expr, width: int) -> v.Expr:
    """Return int32 x ``width`` ``total`` plus 4 products of unsigned and signed bytes each."""
    return T.call_llvm_pure_intrin(
        f"int32x{width}",
        f"llvm.x86.avx512.vpdpbusd.{32 * width}",
        total,
        v.reinterpret(weights, "int8", 4 * width),
        codes,
    )


class Machine:
    """Products on registers of ``width`` bytes."""

    def __init__(self, isa: Isa) -> None:
        self.isa = isa
        self.dot = isa.dot
        self.width = 4 * isa.lanes
        self.lanes = isa.lanes
        self.together = 4 if isa.lanes == 8 else 8
        """Tokens whose sums fit the registers, in `panels`."""
        self.adds_pairs = isa.dot == "maddubs"
        """Whether sums of products are cheaper in 16 bits, as long as they fit."""
        self.is_arm = isa.dot == "sdot" or isa.name == "neon"
        self.pairs = isa.dot in ("vnni", "maddubs")
        """Whether products of two bytes are added to 16 bits, and scaled there."""

    def find_shift(self, most: int) -> int:
        """Return the number added to signed weights, ``most`` at most, to make
        them unsigned; 0 if codes take their signs."""
        if self.dot == "vnni":
            return 128
        return most if self.adds_pairs and most < 16 else 0

    def spread_scales(self, scales: v.Expr, count: int, chunks: Sequence[int]) -> v.Expr:
        """Return `add_scaled`'s argument: the int16 scales of ``chunks`` among a block's
        ``count``."""
        places = [chunk * count // 16 for chunk in chunks]
        each = CHUNK // (2 if self.pairs else 4)
        spread = [place for place in places for _ in range(each)]
        picked = pick(scales, count, spread)
        return picked if self.pairs else v.cast(picked, "int32", len(spread))

    def flip(self, weights: v.Expr, codes: v.Expr, size: int) -> v.Expr:
        """Return ``codes`` with the signs of ``weights``."""
        if self.dot == "maddubs" and size in (16, 32):
            name = {16: "llvm.x86.ssse3.psign.b.128", 32: "llvm.x86.avx2.psign.b"}[size]
            return T.call_llvm_pure_intrin(f"int8x{size}", name, codes, weights)
        zero = v.constant(0, "int8", size)
        return T.Select(weights < zero, zero - codes, codes)

    def measure(self, weights: v.Expr, size: int) -> v.Expr:
        zero = v.constant(0, "int8", size)
        return as_bytes(T.Select(weights < zero, zero - weights, weights), "uint8", size)

    def add_pairs(self, weights: v.Expr, codes: v.Expr, size: int) -> v.Expr:
        """Return sums of two products each of unsigned and signed bytes, int16 [size / 2]."""
        name = {
            64: "llvm.x86.avx512.pmaddubs.w.512",
            32: "llvm.x86.avx2.pmadd.ub.sw",
            16: "llvm.x86.ssse3.pmadd.ub.sw.128",
        }[size]
        weights = as_bytes(weights, "int8", size)
        return T.call_llvm_pure_intrin(f"int16x{size // 2}", name, weights, codes)

    def add_words(self, total: v.Expr, first: v.Expr, second: v.Expr, lanes: int) -> v.Expr:
        """Return ``total`` int32 [lanes] plus two products each of int16."""
        if self.dot == "vnni":
            name = f"llvm.x86.avx512.vpdpwssd.{32 * lanes}"
            return T.call_llvm_pure_intrin(f"int32x{lanes}", name, total, first, second)
        return total + self.multiply_words(first, second, lanes)

    def multiply_words(self, first: v.Expr, second: v.Expr, lanes: int) -> v.Expr:
        """Return sums int32 [lanes] of two products each of int16."""
        if self.pairs:
            name = {
                16: "llvm.x86.avx512.pmaddw.d.512",
                8: "llvm.x86.avx2.pmadd.wd",
                4: "llvm.x86.sse2.pmadd.wd",
            }[lanes]
            return T.call_llvm_pure_intrin(f"int32x{lanes}", name, first, second)
        wide = v.let(v.cast(first, "int32", 2 * lanes) * v.cast(second, "int32", 2 * lanes))
        even = pick(wide, 2 * lanes, range(0, 2 * lanes, 2))
        return even + pick(wide, 2 * lanes, range(1, 2 * lanes, 2))

    def add_scaled(self, total: v.Expr, weights: v.Expr, codes: v.Expr, scales: v.Expr) -> v.Expr:
        """``total`` int32 [lanes] plus scaled products of ``width`` bytes; x86 weights are
        unsigned, up to 128."""
        if self.pairs:
            products = self.add_pairs(weights, codes, self.width)
            return self.add_words(total, products, scales, self.lanes)
        zero = v.constant(0, "int32", self.lanes)
        return total + self.add_bytes(zero, weights, codes, self.width) * scales

    def add_bytes(self, total: v.Expr, weights: v.Expr, codes: v.Expr, size: int) -> v.Expr:
        """Return ``total`` int32 [size / 4] plus 4 products each of ``size`` bytes; weights as
        for `add_scaled`, but any unsigned byte with VNNI."""
        lanes = size // 4
        if self.dot == "vnni":
            return emit_vpdpbusd(total, weights, codes, lanes)
        if self.dot == "maddubs":
            ones = v.constant(1, "int16", 2 * lanes)
            return self.add_words(total, self.add_pairs(weights, codes, size), ones, lanes)
        if self.dot == "sdot":
            name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
            weights = as_bytes(weights, "int8", size)
            return T.call_llvm_pure_intrin("int32x4", name, total, weights, codes)
        kind = "int8" if self.is_arm else "uint8"
        wide = v.let(
            v.cast(as_bytes(weights, kind, size), "int16", size) * v.cast(codes, "int16", size)
        )
        parts = [v.cast(pick(wide, size, range(k, size, 4)), "int32", lanes) for k in range(4)]
        return total + parts[0] + parts[1] + parts[2] + parts[3]

    def take_signed(self, weights: v.Expr, size: int) -> v.Expr:
        """Return the named arguments that `add_signed` takes in addition to signed weights."""
        if self.dot == "vnni":
            sign = v.constant(0x80, "uint8", size)
            return v.let(as_bytes(weights, "uint8", size) ^ sign)
        return weights if self.is_arm else v.let(self.measure(weights, size))

    def add_signed(
        self, total: v.Expr, weights: v.Expr, taken: v.Expr, codes: v.Expr, size: int
    ) -> v.Expr:
        """Return ``total`` int32 [size / 4] plus 4 products each of signed bytes."""
        if self.is_arm:
            return self.add_bytes(total, weights, codes, size)
        if self.dot != "vnni":
            return self.add_bytes(total, taken, v.let(self.flip(weights, codes, size)), size)
        # Weights are larger by 128 each, lane by lane: nothing large is left to be taken off.
        zero, offset = v.constant(0, "int32", size // 4), v.constant(128, "uint8", size)
        more = v.let(self.add_bytes(zero, offset, codes, size))
        return v.let(self.add_bytes(total, taken, codes, size)) - more
