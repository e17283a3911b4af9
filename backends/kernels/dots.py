"""Dot products of packed vectors (`pi2.plan.layout`) with quantised activations.

An activation x of a group is ``scale * x16`` with x16 = 256 high + low in two int8 planes (or
x = ``scale * x8`` in one), each plane in the interleaved int8 layout.  Weights enter as unsigned
nibbles q + 8 (int4) or q + 128 (int8), so that one primitive, unsigned times signed byte, serves
both; ``sums`` holds -8 * sum(x) of each group to take the offset out again.  The integer sum of a
group is exact: only its product with the two scales rounds.

Overflow: a nibble times a byte is at most 15 * 128; ``maddubs`` adds 16 of them into an int16
(30720), ``multiply`` adds 8 (15360).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.kernels import vectors as v
from pi2.backends.kernels.isa import Isa
from pi2.plan.layout import GROUP, Precision, split_lanes


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Quantised vectors of ``length``, one per token, in flat buffers.

    ``codes`` int8 [tokens, planes, length], ``scales`` float32 [tokens, length / 32], ``sums``
    int32 [tokens, length / 32] (-8 * sum of the group), ``values`` float32 [tokens, length] (what
    was quantised; fp16 weights use it).
    """

    length: int
    planes: int
    codes: v.Buffer
    scales: v.Buffer
    sums: v.Buffer
    values: v.Buffer
    once: v.Expr
    """1, but the compiler cannot know: loops of known length over the blocks of a vector would be
    unrolled and their loads hoisted, which spills registers and takes seconds to compile."""


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
    """A packed weight vector: where its weights and scales begin, in bytes of uint8 buffers."""

    weights: v.Buffer
    weights_base: v.Expr
    scales: v.Buffer
    scales_base: v.Expr
    precision: Precision


def emit_dots(
    isa: Isa,
    vector: Vector,
    activations: Activations,
    tokens: Sequence[v.Expr],
    prefetch: Callable[[v.Expr, int], None] | None = None,
) -> list[v.Expr]:
    """Return vector . x for each token; ``prefetch(byte, size)`` is told what is being read."""
    if vector.precision == "fp16":
        return _emit_halves(vector, activations, tokens, prefetch)
    tokens = [v.let(v.wide(token)) for token in tokens]
    runs = list_runs(activations.length)
    top = runs[0][0]
    sums = T.alloc_buffer((len(tokens) * top,), "float32")
    for index in range(len(tokens)):
        v.store(sums, index * top, v.constant(0.0, "float32", top), top)
    for lanes, first, count in runs:
        with T.serial(v.wide(count * activations.once)) as block:
            group = v.let(first + block * lanes)
            _emit_block(isa, vector, activations, tokens, sums, top, group, lanes, prefetch)
    return [
        v.let(v.add_lanes(v.load(sums, index * top, top), "float32", top))
        for index in range(len(tokens))
    ]


def _emit_block(
    isa: Isa,
    vector: Vector,
    activations: Activations,
    tokens: Sequence[v.Expr],
    sums: v.Buffer,
    top: int,
    group: v.Expr,
    lanes: int,
    prefetch: Callable[[v.Expr, int], None] | None,
) -> None:
    """Add the products of the block that begins with group ``group`` to ``sums``."""
    element = group * GROUP
    group_bytes = GROUP // 2 if vector.precision == "int4" else GROUP
    byte = v.let(vector.weights_base + group * group_bytes)
    if prefetch is not None:
        prefetch(group * group_bytes, lanes * group_bytes)
    # A block narrower than a register: several of its chunks fill one.
    fold = min(max(isa.lanes // lanes, 1), 4)
    width = min(isa.lanes, lanes)
    for first in range(0, lanes, width):
        totals = _emit_groups(
            isa,
            vector,
            activations,
            tokens,
            byte + 4 * first,
            element + 4 * first,
            group + first,
            lanes,
            width,
            fold,
        )
        scale_byte = vector.scales_base + (group + first) * 2
        weight_scale = v.let(v.load_halves(vector.scales, scale_byte, width))
        groups = activations.length // GROUP
        for index, token in enumerate(tokens):
            scale = weight_scale * v.load(activations.scales, token * groups + group + first, width)
            total = v.cast(totals[index], "float32", width)
            place = index * top + first
            v.store(sums, place, T.fma(total, scale, v.load(sums, place, width)), width)


def _emit_groups(
    isa: Isa,
    vector: Vector,
    activations: Activations,
    tokens: Sequence[v.Expr],
    byte: v.Expr,
    element: v.Expr,
    group: v.Expr,
    lanes: int,
    width: int,
    fold: int,
) -> list[v.Expr]:
    """Return int32 x ``width`` sums of q * x over ``width`` groups of a block, per token.

    ``fold`` consecutive chunks are taken as one of ``fold`` times as many lanes.
    """
    unit = _Unit(isa, width * fold)
    planes = activations.planes
    int8 = vector.precision == "int8"
    # Weights of int8 are two nibbles: 16 high + low; vnni and sdot take whole bytes.
    split = int8 and not unit.whole_bytes
    streams = 2 if split else 1
    totals = [[[unit.start()] for _ in range(planes * streams)] for _ in tokens]
    size = 4 * width * fold
    for chunk in range(0, 8 if int8 else 4, fold):
        raw = v.let(v.load(vector.weights, byte + chunk * 4 * lanes, size))
        if int8 and unit.signed:
            parts = [(0, 0, v.reinterpret(raw, "int8", size))]
        elif int8:
            offset = v.let(raw ^ v.constant(0x80, "uint8", size))
            if split:
                parts = [(0, 0, unit.take_low(offset)), (0, 1, unit.take_high(offset))]
            else:
                parts = [(0, 0, offset)]
        else:
            parts = [(0, 0, unit.take_low(raw)), (4, 0, unit.take_high(raw))]
        for shift, stream, weights in parts:
            named = v.let(weights)
            for index, token in enumerate(tokens):
                for plane in range(planes):
                    base = (token * planes + plane) * activations.length + element
                    codes = v.load(activations.codes, base + (chunk + shift) * 4 * lanes, size)
                    cell = totals[index][plane * streams + stream]
                    cell[0] = v.let(unit.add(cell[0], named, codes))
    results = []
    wide = width * fold
    for index, token in enumerate(tokens):
        values = [unit.finish(cell[0]) for cell in totals[index]]
        if split:
            four = v.constant(4, "int32", wide)
            values = [values[i] + (values[i + 1] << four) for i in range(0, len(values), 2)]
        total = values[0]
        if planes == 2:
            total = (values[0] << v.constant(8, "int32", wide)) + values[1]
        for lanes_left in (wide >> step for step in range(fold.bit_length() - 1)):
            total = v.let(total)
            total = _add_halves(total, lanes_left)
        if not (int8 and unit.signed):
            groups = activations.length // GROUP
            offset = v.load(activations.sums, token * groups + group, width)
            total = total + (offset << v.constant(4, "int32", width) if int8 else offset)
        results.append(v.let(total))
    return results


def _add_halves(total: v.Expr, lanes: int) -> v.Expr:
    """Return the first half of int32 x ``lanes`` plus the second."""
    if lanes == 2:
        return v.take_lane(total, 0) + v.take_lane(total, 1)
    return v.low_half(total, "int32", lanes) + v.high_half(total, "int32", lanes)


def emit_vpdpbusd(total: v.Expr, weights: v.Expr, codes: v.Expr, width: int) -> v.Expr:
    """Return int32 x ``width`` ``total`` plus 4 products of unsigned and signed bytes each."""
    return T.call_llvm_pure_intrin(
        f"int32x{width}",
        f"llvm.x86.avx512.vpdpbusd.{32 * width}",
        total,
        v.reinterpret(weights, "int8", 4 * width),
        codes,
    )


class _Unit:
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


def _emit_halves(
    vector: Vector,
    activations: Activations,
    tokens: Sequence[v.Expr],
    prefetch: Callable[[v.Expr, int], None] | None,
) -> list[v.Expr]:
    """Return dot products of an fp16 vector with the float32 values."""
    length = activations.length
    sums = T.alloc_buffer((len(tokens) * 32,), "float32")
    for index in range(2 * len(tokens)):
        v.store(sums, index * 16, v.constant(0.0, "float32", 16), 16)
    with T.serial(length // GROUP * activations.once) as group:
        if prefetch is not None:
            prefetch(v.wide(group * 2 * GROUP), 2 * GROUP)
        for half in range(2):
            at = group * GROUP + half * 16
            weights = v.let(v.load_halves(vector.weights, vector.weights_base + v.wide(at * 2), 16))
            for index, token in enumerate(tokens):
                place = index * 32 + half * 16
                value = v.load(activations.values, token * length + at, 16)
                v.store(sums, place, T.fma(weights, value, v.load(sums, place, 16)), 16)
    return [
        v.let(
            v.add_lanes(
                v.load(sums, index * 32, 16) + v.load(sums, index * 32 + 16, 16), "float32", 16
            )
        )
        for index in range(len(tokens))
    ]
