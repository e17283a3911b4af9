"""The primitive of dot products: unsigned weight bytes times signed activation bytes, summed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tvm.tirx import Shuffle
from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.operands import Activations, Prefetch, Vector, list_runs
from pi2.backends.kernels.unpacking import (
    count_tile_bytes,
    count_tiles,
    emit_tile,
    load_block_scale,
)
from pi2.formats.micro_floats import MAGNITUDES
from pi2.plan.weights.layout import GROUP, Precision, weight_bytes


def emit_float_block(
    isa: Isa,
    vectors: Sequence[Vector],
    activations: Activations,
    tokens: Sequence[v.Expr],
    sums: Sequence[v.Buffer],
    top: int,
    group: v.Expr,
    lanes: int,
    prefetch: Prefetch | None,
) -> None:
    """Add quantised weights times float32 values, of the block of ``lanes`` groups that begins
    with ``group``, to ``sums`` float32 [tokens, top] of each vector.

    Integers times values are added up over the block, then multiplied with the scales.
    """
    precision = vectors[0].precision
    group_bytes = weight_bytes(GROUP, precision)
    zero = v.constant(0.0, "float32", lanes)
    # Two sums in turn, as an addition waits for the last one to the same sum; always two, so that a
    # gate has the same bits wherever it is computed.
    cells = [[(v.Cell(zero), v.Cell(zero)) for _ in tokens] for _ in vectors]
    # A loop that LLVM cannot unroll: it would reorder the additions and spill.
    size = count_tile_bytes(precision, lanes)
    with T.serial(v.wide(count_tiles(precision) * activations.once)) as tile:
        tiles = []
        for index, vector in enumerate(vectors):
            if prefetch is not None:
                prefetch(index, group * group_bytes + tile * size, size)
            tiles.append(emit_tile(isa, vector, lanes, group, tile))
        for turn, rows in enumerate(zip(*tiles, strict=True)):
            place = v.let(rows[0][0])
            values = [
                v.let(_load_values(activations, token * activations.length + place, lanes))
                for token in tokens
            ]
            for (_, unpacked), row in zip(rows, cells, strict=True):
                weights = v.let(unpacked)
                for value, parts in zip(values, row, strict=True):
                    cell = parts[turn % 2]
                    cell.set(T.fma(weights, value, cell.get()))
    for vector, buffer, row in zip(vectors, sums, cells, strict=True):
        scale = v.let(load_block_scale(vector, lanes, group))
        for index, (first, second) in enumerate(row):
            old = v.load(buffer, index * top, lanes)
            total = T.fma(first.get() + second.get(), scale, old)
            v.store(buffer, index * top, total, lanes)


def _load_values(activations: Activations, place: v.Expr, lanes: int) -> v.Expr:
    return v.load_as(activations.codes, place * 4, "float32", lanes)


def emit_lane_order(target: Activations, token: v.Expr) -> None:
    """Copy a token's values in lane order to its codes."""
    start = v.let(v.wide(token) * target.length)
    for lanes, first, count in list_runs(target.length):
        with T.serial(count * target.once) as block, T.serial(GROUP * target.once) as element:
            base = v.let(start + (first + block * lanes) * GROUP)
            row = target.values[v.span(base + element, lanes, GROUP)]
            bytes_ = v.reinterpret(row, "int8", 4 * lanes)
            v.store(target.codes, (base + element * lanes) * 4, bytes_, 4 * lanes)


def emit_half_dots(
    vectors: Sequence[Vector],
    activations: Activations,
    tokens: Sequence[v.Expr],
    prefetch: Prefetch | None,
) -> list[list[v.Expr]]:
    """Return dot products of fp16 vectors with the float32 values."""
    length = activations.length
    sums = [T.alloc_buffer((len(tokens) * 32,), "float32") for _ in vectors]
    for buffer in sums:
        for part in range(2 * len(tokens)):
            v.store(buffer, part * 16, v.constant(0.0, "float32", 16), 16)
    with T.serial(length // GROUP * activations.once) as group:
        if prefetch is not None:
            for index in range(len(vectors)):
                prefetch(index, v.wide(group * 2 * GROUP), 2 * GROUP)
        for half in range(2):
            at = group * GROUP + half * 16
            rows = [
                v.let(v.load_halves(vector.weights, vector.weights_base + v.wide(at * 2), 16))
                for vector in vectors
            ]
            for index, token in enumerate(tokens):
                place = index * 32 + half * 16
                value = v.let(v.load(activations.values, token * length + at, 16))
                for buffer, weights in zip(sums, rows, strict=True):
                    old = v.load(buffer, place, 16)
                    v.store(buffer, place, T.fma(weights, value, old), 16)
    return [
        [
            v.let(
                v.add_lanes(
                    v.load(buffer, index * 32, 16) + v.load(buffer, index * 32 + 16, 16),
                    "float32",
                    16,
                )
            )
            for index in range(len(tokens))
        ]
        for buffer in sums
    ]


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
    """Return the bytes of ``numbers`` [16] at ``places`` uint8 [size], each 0 to 15, as uint8; at
    least 16."""
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


def find_numbers(arm: bool, precision: Precision, codes: v.Expr, size: int) -> v.Expr:
    """Return what nibbles uint8 [size] of int4 or mxfp4 stand for, as int8."""
    if precision != "mxfp4":
        return v.reinterpret(codes, "int8", size) - v.constant(8, "int8", size)
    numbers = [sign * magnitude for sign in (1, -1) for magnitude in MAGNITUDES]
    if size >= 16:
        return v.reinterpret(look_up_bytes(arm, numbers, codes, size), "int8", size)
    # As many lanes have to be given as are taken.
    wide = v.let(Shuffle([codes] * (16 // size), list(range(16))))
    found = v.let(v.reinterpret(look_up_bytes(arm, numbers, wide, 16), "int8", 16))
    return Shuffle([found], list(range(size)))


class DotPrimitive:
    """The primitive ``sum += unsigned weight byte * signed activation byte`` of an ISA."""

    def __init__(self, isa: Isa, width: int) -> None:
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
        """Return the low nibbles of bytes."""
        return raw & v.constant(15, "uint8", 4 * self.width)

    def take_high(self, raw: v.Expr) -> v.Expr:
        """Return the high nibbles of bytes."""
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

    def look_up(self, codes: v.Expr) -> v.Expr:
        """Return what codes of mxfp4 stand for, plus 12 unless weights are ``signed``."""
        offset = 0 if self.signed else MAGNITUDES[-1]
        if self.dot == "multiply":
            return self._find_magnitudes(codes)
        numbers = [sign * magnitude + offset for sign in (1, -1) for magnitude in MAGNITUDES]
        return look_up_bytes(self.dot == "sdot", numbers, codes, 4 * self.width)

    def _find_magnitudes(self, codes: v.Expr) -> v.Expr:
        """Return q + 12 of codes without an instruction that looks up bytes."""
        lanes = 4 * self.width

        def number(value: int) -> v.Expr:
            return v.constant(value, "uint8", lanes)

        place = v.let(codes & number(7))
        # 5, 6 and 7 stand for 6, 8 and 12.
        magnitude = v.let(
            place
            + T.max(place, number(4))
            - number(4)
            + T.Select(place == number(7), number(2), number(0))
        )
        below = number(MAGNITUDES[-1]) - magnitude
        return T.Select(codes > place, below, number(MAGNITUDES[-1]) + magnitude)

    def take_highest(self, raw: v.Expr, number: int) -> v.Expr:
        """Return 4 for bytes that have bit ``number``, and 0 for others."""
        lanes, words = 2 * self.width, raw
        if number != 2:
            words = v.reinterpret(raw, "uint16", lanes)
            shift = v.constant(abs(number - 2), "uint16", lanes)
            words = v.reinterpret(
                words >> shift if number > 2 else words << shift, "uint8", 4 * self.width
            )
        return words & v.constant(4, "uint8", 4 * self.width)

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
