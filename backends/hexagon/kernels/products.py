"""Tiles of 32 rows times a few tokens, in integers.

Weights are unsigned bytes and inputs signed ones (``vrmpy``: 4 products are added to each of 32
words).  What the unsigned codes add is taken off before: sums begin with *offsets*, which are
-8 (int4) or -128 (int8) times the sum of the inputs.

Arrays of a tile; word k of a token holds its elements 4k to 4k + 3:

- inputs: int32 [words, tokens], the words of all tokens side by side;
- int4: vector 4g + c has word c of group g in its low and word 4 + c in its high nibbles, as
  ``q + 8``; offsets int32 [groups, tokens]; multipliers int16, even halves for even groups.  A
  row's product is the sum of its groups' products times their multipliers.
- int8: vector k holds word k, as ``q + 128``; offsets int32 [tokens].
"""

from __future__ import annotations

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.hexagon.kernels import code as c
from pi2.plan.weights.layout import GROUP

_LOW = 0x0F0F0F0F
_PACKED_VECTORS = 4
"""Vectors of a group in int4."""
_UNROLLED = 8
"""Words of int8 that are multiplied without a jump."""


def emit_multiply_int4(
    together: int,
    weights: c.Expr,
    multipliers: c.Expr,
    inputs: c.Expr,
    offsets: c.Expr,
    pairs: c.Expr,
    sums: c.Expr,
) -> None:
    """``sums`` int32 [tokens, 32] of ``pairs`` pairs of groups."""
    packed, factors = c.view_vectors(weights), c.view_vectors(multipliers)
    words, starts = c.view(inputs, "int32", 8), c.view(offsets, "int32", 8)
    totals = [v.Cell(c.splat(T.int32(0))) for _ in range(together)]
    mask, shift = v.let(c.splat(T.int32(_LOW))), c.splat(T.int32(4))
    with T.serial(pairs) as pair:
        factor = v.let(c.load(factors, pair))
        for half in range(2):
            group = v.let(pair * 2 + half)
            dots = [v.Cell(c.splat(starts[group * together + token])) for token in range(together)]
            for vector in range(_PACKED_VECTORS):
                codes = v.let(c.load(packed, group * _PACKED_VECTORS + vector))
                low, high = v.let(codes & mask), v.let((codes >> shift) & mask)
                for bytes_, word in ((low, vector), (high, _PACKED_VECTORS + vector)):
                    first = v.let((group * (GROUP // 4) + word) * together)
                    _emit_add(dots, bytes_, words, first)
            for total, dot in zip(totals, dots, strict=True):
                if half == 0:
                    added = c.call_hvx("vmpyiewh.acc", total.get(), dot.get(), factor)
                else:
                    added = total.get() + c.call_hvx("vmpyiowh", dot.get(), factor)
                total.set(added)
    _emit_store(totals, sums)


def emit_multiply_int8(
    together: int,
    weights: c.Expr,
    inputs: c.Expr,
    offsets: c.Expr,
    count: c.Expr,
    sums: c.Expr,
) -> None:
    """``sums`` int32 [tokens, 32] of ``count`` words, a multiple of 8."""
    codes = c.view_vectors(weights)
    words, starts = c.view(inputs, "int32", 8), c.view(offsets, "int32", 4)
    totals = [v.Cell(c.splat(starts[token])) for token in range(together)]
    with T.serial(T.shift_right(count, T.int32(3))) as step:
        for place in range(_UNROLLED):
            word = v.let(step * _UNROLLED + place)
            _emit_add(totals, v.let(c.load(codes, word)), words, v.let(word * together))
    _emit_store(totals, sums)


def _emit_add(sums: list[v.Cell], codes: c.Expr, words: c.Buffer, first: c.Expr) -> None:
    """Add a word of every row times a word of every token."""
    for token, total in enumerate(sums):
        total.set(c.call_hvx("vrmpybus.acc", total.get(), codes, words[first + token]))


def _emit_store(sums: list[v.Cell], address: c.Expr) -> None:
    out = c.view_vectors(address)
    for token, total in enumerate(sums):
        c.store(out, T.int32(token), total.get())
