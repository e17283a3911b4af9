"""What dot products are made of: packed weight vectors, and activations of some tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.plan.weights.layout import Precision, round_up, split_lanes, weight_bytes


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

    def keep_values(self, values: v.Buffer, length: int) -> Activations:
        """Return others of ``length`` that are not quantised, for fp16 weights: only ``values``."""
        return replace(
            self,
            length=length,
            values=values,
            several=None,
            tiles=None,
            blocks=None,
            upper_sums=None,
        )

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
