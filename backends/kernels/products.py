"""The primitive of dot products: unsigned weight bytes times signed activation bytes, summed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.operands import Activations, list_runs
from pi2.plan.weights.layout import GROUP


def emit_lane_order(target: Activations, token: v.Expr) -> None:
    """Copy a token's values in lane order to its codes."""
    start = v.let(v.wide(token) * target.length)
    for lanes, first, count in list_runs(target.length):
        with T.serial(count * target.once) as block, T.serial(GROUP * target.once) as element:
            base = v.let(start + (first + block * lanes) * GROUP)
            row = target.values[v.span(base + element, lanes, GROUP)]
            bytes_ = v.reinterpret(row, "int8", 4 * lanes)
            v.store(target.codes, (base + element * lanes) * 4, bytes_, 4 * lanes)


def emit_vpdpbusd(total: v.Expr, weights: v.Expr, codes: v.Expr, width: int) -> v.Expr:
    """Return int32 x ``width`` ``total`` plus 4 products of unsigned and signed bytes each."""
    return T.call_llvm_pure_intrin(
        f"int32x{width}",
        f"llvm.x86.avx512.vpdpbusd.{32 * width}",
        total,
        v.reinterpret(weights, "int8", 4 * width),
        codes,
    )


def look_up_bytes(arm: bool, numbers: Sequence[int], places: v.Expr, size: int) -> v.Expr:
    """Return the bytes of ``numbers`` [16] at ``places`` uint8 [size], 0 to 15; at least 16."""
    words = np.array(numbers, np.int8).view("<i4").tolist() * (size // 16)
    table = v.reinterpret(v.list_constants(words, "int32"), "int8", size)
    name = (
        "llvm.aarch64.neon.tbl1.v16i8"
        if arm
        else {
            16: "llvm.x86.ssse3.pshuf.b.128",
            32: "llvm.x86.avx2.pshuf.b",
            64: "llvm.x86.avx512.pshuf.b.512",
        }[size]
    )
    found = T.call_llvm_pure_intrin(
        f"int8x{size}", name, table, v.reinterpret(places, "int8", size)
    )
    return v.reinterpret(found, "uint8", size)


class DotPrimitive:
    """The primitive ``sum += unsigned weight byte * signed activation byte`` of an ISA."""

    def __init__(self, isa: Isa, width: int) -> None:
        self.isa = isa
        self.dot = isa.dot
        self.width = width
        self.whole_bytes = self.dot in ("vnni", "sdot")
        self.signed = self.dot == "sdot"
        self._bits = str(32 * width)

    def start(self) -> v.Expr:
        """Return the empty sum."""
        if self.whole_bytes:
            return v.constant(0, "int32", self.width)
        return v.constant(0, "int16", self.width * (2 if self.dot == "maddubs" else 4))

    def take_low(self, raw: v.Expr) -> v.Expr:
        return raw & v.constant(15, "uint8", 4 * self.width)

    def take_high(self, raw: v.Expr) -> v.Expr:
        # 16-bit shifts: x86 has none for bytes.
        lanes = 2 * self.width
        shifted = v.reinterpret(raw, "uint16", lanes) >> v.constant(4, "uint16", lanes)
        return v.reinterpret(shifted, "uint8", 4 * self.width) & v.constant(
            15, "uint8", 4 * self.width
        )

    def take_pair(self, raw: v.Expr, number: int) -> v.Expr:
        """Return bits 2 ``number`` and 2 ``number`` + 1 of bytes."""
        if number:
            lanes = 2 * self.width
            shift = v.constant(2 * number, "uint16", lanes)
            raw = v.reinterpret(raw, "uint16", lanes) >> shift
            raw = v.reinterpret(raw, "uint8", 4 * self.width)
        return raw & v.constant(3, "uint8", 4 * self.width)

    def add(self, total: v.Expr, weights: v.Expr, codes: v.Expr) -> v.Expr:
        """Return ``total`` plus the products of 4 ``width`` bytes."""
        width, bits = self.width, self._bits
        if self.dot == "vnni":
            return emit_vpdpbusd(total, weights, codes, width)
        if self.dot == "sdot":
            return T.call_llvm_pure_intrin(
                "int32x4",
                "llvm.aarch64.neon.sdot.v4i32.v16i8",
                total,
                v.reinterpret(weights, "int8", 16),
                codes,
            )
        if self.dot == "maddubs":
            name = {
                "512": "llvm.x86.avx512.pmaddubs.w.512",
                "256": "llvm.x86.avx2.pmadd.ub.sw",
                "128": "llvm.x86.ssse3.pmadd.ub.sw.128",
            }[bits]
            return total + T.call_llvm_pure_intrin(
                f"int16x{2 * width}", name, v.reinterpret(weights, "int8", 4 * width), codes
            )
        lanes = 4 * width
        return total + v.cast(weights, "int16", lanes) * v.cast(codes, "int16", lanes)

    def finish(self, total: v.Expr) -> v.Expr:
        """Return the sums of the groups as int32 x ``width``."""
        width = self.width
        if self.whole_bytes:
            return total
        if self.dot == "maddubs":
            name = {
                "512": "llvm.x86.avx512.pmaddw.d.512",
                "256": "llvm.x86.avx2.pmadd.wd",
                "128": "llvm.x86.sse2.pmadd.wd",
            }[self._bits]
            ones = v.constant(1, "int16", 2 * width)
            return T.call_llvm_pure_intrin(f"int32x{width}", name, total, ones)
        # Four int16 of a lane: add neighbours within int32, then within int64.
        sixteen = v.constant(16, "int32", 2 * width)
        pairs = v.let(v.reinterpret(total, "int32", 2 * width))
        pairs = ((pairs << sixteen) >> sixteen) + (pairs >> sixteen)
        both = v.let(v.reinterpret(pairs, "int64", width))
        return v.cast(both + (both >> v.constant(32, "int64", width)), "int32", width)
