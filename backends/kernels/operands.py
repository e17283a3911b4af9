"""Operands of dot products, packed weight vectors and activations of some tokens; the primitive:
unsigned weight bytes times signed activation bytes, summed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tvm.tirx.script import builder as T

from pi2.backends.blocks.machine import Machine
from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.isa import Isa
from pi2.plan.weights.layout import GROUP, Precision, split_lanes


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Places of n neurons in ``bundles``, and of T tokens in a chunk, of one expert in an MoE
    model; None: all."""

    neurons: v.Buffer | None = None
    """int32 [n]."""
    tokens: v.Buffer | None = None
    """int32 [T], ascending."""

    def find_neuron(self, number: v.Expr) -> v.Expr:
        """Return the place of neuron ``number`` of the call."""
        return number if self.neurons is None else v.let(self.neurons[number])

    def find_token(self, number: v.Expr) -> v.Expr:
        """Return the place of token ``number`` of the call."""
        return number if self.tokens is None else v.let(self.tokens[number])


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
    """Whether there is more than one token, if a chunk's have other planes."""
    chunk_planes: int = 0
    """Their planes; the arrays are large enough for either."""
    tiles: v.Buffer | None = None
    """int8 [threads, `isa.count_tile_bytes`]: rows of weights unpacked for tiles (`amx`)."""
    blocks: v.Buffer | None = None
    """int8 [tokens / 16, `isa.count_blocks_bytes`]: codes and scales of many tokens in their
    order."""
    upper_sums: v.Buffer | None = None
    """int32 [tokens, length / 32]: -8 * sum of the codes of the upper plane of two, if several
    tokens are multiplied only by these codes."""
    upper: bool = False
    """Whether they are multiplied so now."""

    @property
    def used_planes(self) -> int:
        return 1 if self.upper else self.planes

    def for_chunk(self) -> Activations:
        """Return the same arrays as several tokens have them."""
        own = replace(self, upper=True) if self.upper_sums is not None else self
        if self.several is None:
            return own
        return replace(own, planes=self.chunk_planes, several=None)

    def for_one(self) -> Activations:
        return replace(self, several=None)


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


def emit_lane_order(target: Activations, token: v.Expr) -> None:
    """Copy a token's values in lane order to its codes."""
    start = v.let(v.wide(token) * target.length)
    for lanes, first, count in list_runs(target.length):
        with T.serial(count * target.once) as block, T.serial(GROUP * target.once) as element:
            base = v.let(start + (first + block * lanes) * GROUP)
            row = target.values[v.span(base + element, lanes, GROUP)]
            bytes_ = v.reinterpret(row, "int8", 4 * lanes)
            v.store(target.codes, (base + element * lanes) * 4, bytes_, 4 * lanes)


class DotPrimitive:
    """The primitive ``sum += unsigned weight byte * signed activation byte`` of an ISA."""

    def __init__(self, isa: Isa, width: int) -> None:
        self.isa = isa
        self.dot = isa.dot
        self.width = width
        self.whole_bytes = self.dot in ("vnni", "sdot")
        self.signed = self.dot == "sdot"
        self._machine = Machine(isa)

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
        size = 4 * self.width
        if self.whole_bytes:
            return self._machine.add_bytes(total, weights, codes, size)
        if self.dot == "maddubs":
            return total + self._machine.add_pairs(weights, codes, size)
        return total + v.cast(weights, "int16", size) * v.cast(codes, "int16", size)

    def finish(self, total: v.Expr) -> v.Expr:
        """Return the sums of the groups as int32 x ``width``."""
        width = self.width
        if self.whole_bytes:
            return total
        if self.dot == "maddubs":
            ones = v.constant(1, "int16", 2 * width)
            return self._machine.multiply_words(total, ones, width)
        # Four int16 of a lane: add neighbours within int32, then within int64.
        sixteen = v.constant(16, "int32", 2 * width)
        pairs = v.let(v.reinterpret(total, "int32", 2 * width))
        pairs = ((pairs << sixteen) >> sixteen) + (pairs >> sixteen)
        both = v.let(v.reinterpret(pairs, "int64", width))
        return v.cast(both + (both >> v.constant(32, "int64", width)), "int32", width)
