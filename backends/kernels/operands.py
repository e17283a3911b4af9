"""Operands of dot products, packed weight vectors and activations of some tokens; the primitive:
unsigned weight bytes times signed activation bytes, summed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.isa import Isa
from pi2.plan.weights.layout import GROUP, Precision, round_up, split_lanes, weight_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Places of n neurons in ``bundles``, and of T tokens in a chunk, of one expert in an MoE
    model; None: all."""

    neurons: v.Buffer | None = None
    """int32 [n]."""
    tokens: v.Buffer | None = None
    """int32 [T], ascending; if tokens are multiplied in pairs (`i8mm`), both of each, but for the
    last one of a chunk that has no other."""
    origin: v.Expr | None = None
    """Token from which numbers are counted; None: from the first."""

    def find_neuron(self, number: v.Expr) -> v.Expr:
        """Return the place of neuron ``number`` of the call."""
        return number if self.neurons is None else v.let(self.neurons[number])

    def find_token(self, number: v.Expr) -> v.Expr:
        """Return the place of token ``number`` of the call."""
        number = number if self.origin is None else self.origin + number
        return number if self.tokens is None else v.let(self.tokens[number])

    def count_from(self, token: v.Expr) -> Chosen:
        """Return the same neurons and tokens, of which ``token`` is number 0."""
        return replace(self, origin=token)


EVERYTHING = Chosen()


FLOAT_PLANES = 4
"""Bytes of an activation that is not rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Quantised vectors of ``length``, one per token, in flat buffers.

    ``codes`` int8 [tokens, planes, length], ``scales`` float32 [tokens, length / 32], ``sums``
    int32 [tokens, length / 32] (-8 * sum of the group), ``values`` float32 [tokens, length] (the
    unquantised vectors, for fp16 weights). With `FLOAT_PLANES`, ``codes`` are the bytes of the
    values in lane order (`kernels.unpacking`), and scales and sums have no meaning."""

    length: int
    planes: int
    codes: v.Buffer
    scales: v.Buffer
    sums: v.Buffer
    values: v.Buffer
    once: v.Expr
    """1, but the compiler cannot know: loops of known length over the blocks of a vector would be
    unrolled and their loads hoisted, which spills registers and takes seconds to compile."""
    several: v.Expr | None = None
    """Whether there is more than one token, if a chunk's have other planes or another order."""
    chunk_planes: int = 0
    """Their planes; the arrays are large enough for either."""
    tiles: v.Buffer | None = None
    """int8 [threads, `Isa.count_tile_bytes`]: rows of weights unpacked for several tokens, in
    schedules that do so (`i8mm`, `amx`)."""
    blocks: v.Buffer | None = None
    """int8 [tokens / 16, `isa.count_places`, `isa.count_block_bytes`]: codes and scales of many
    tokens once more, in the order of `amx`."""
    upper_sums: v.Buffer | None = None
    """int32 [tokens, length / 32]: -8 * sum of the codes of the upper plane of two, if several
    tokens are multiplied only by these codes."""
    upper: bool = False
    """Whether they are multiplied so now."""
    paired: bool = False
    """Whether codes and scales are in the order of `i8mm`, as for several tokens there."""

    @property
    def used_planes(self) -> int:
        return 1 if self.upper else self.planes

    def for_chunk(self) -> Activations:
        """Return the same arrays as several tokens have them."""
        own = replace(self, upper=True) if self.upper_sums is not None else self
        if self.several is None:
            return own
        paired = self.tiles is not None and self.blocks is None
        return replace(own, planes=self.chunk_planes, several=None, paired=paired)

    def for_one(self) -> Activations:
        return replace(self, several=None, paired=False)


FinishItem = Callable[[v.Expr, v.Expr, list[v.Expr]], None]
"""Called with (token, item, dot product of each of the item's vectors) to store the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """Items ``begin`` to ``end``, each of ``parts`` vectors: 1 (a row) or 2 (gate and up)."""

    begin: v.Expr
    end: v.Expr
    parts: int = 1
    take_vectors: Callable[[v.Expr], Sequence[Vector]]
    finish: FinishItem


Prefetch = Callable[[int, v.Expr, int], None]
"""Called with (vector, byte, size) where the weights ``byte`` to ``byte + size`` of a vector are
loaded, to ask for others at the same pace: requests in bunches would wait for each other."""


def list_runs(length: int) -> list[tuple[int, int, int]]:
    """Return (lanes, first group, number of blocks) for each run of equal blocks."""
    blocks = split_lanes(length)
    full = blocks.count(16)
    runs = [(16, 0, full)] if full else []
    group = full * 16
    for lanes in blocks[full:]:
        runs.append((lanes, group, 1))
        group += lanes
    return runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector:
    """A packed weight vector: first bytes of its weights and scales in uint8 buffers; blocks with
    looked-up codes have a table as ``scales``."""

    weights: v.Buffer
    weights_base: v.Expr
    scales: v.Buffer
    scales_base: v.Expr
    precision: Precision
    spread: bool = False
    """Whether every element has a scale."""
    factor_base: v.Expr | None = None
    """Byte, next to the weights, of a further float32 factor of the vector; None: there is none."""


LINE = 64
"""Bytes of a cache line."""
REQUESTS = 8
"""Tiles of tokens in which the next vectors are asked for, a part of them in each."""


def emit_request(vectors: Sequence[Vector], length: int, turn: v.Expr) -> None:
    """Ask for ``vectors``, for the second-level cache: in each of the first `REQUESTS` turns for a
    part of them."""
    with T.If(turn < REQUESTS), T.Then():
        for vector in vectors:
            size = round_up(weight_bytes(length, vector.precision), REQUESTS * LINE) // REQUESTS
            begin = v.let(vector.weights_base + v.wide(turn) * size)
            for line in range(0, size, LINE):
                v.prefetch(vector.weights, begin + line, 2)


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
