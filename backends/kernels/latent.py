"""Latent attention: queries of what keys are made of, over a cache of one vector for each token.

The vector of a token has what keys and values are made of, ``rank`` elements, and the rotated key
that all heads share.  It lies in one row: scores are sums over a row, and values are its first
``rank`` elements, so that it is kept once.  A head's query is turned into one of the vector
beforehand, and what it has mixed is turned into values afterwards (`kernels.latent_block`).

Online softmax and division into spans are those of `kernels.attention`.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1, with its matrices absorbed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.attention import NEVER, Spans
from pi2.backends.kernels.kv import load_scales
from pi2.backends.kernels.spec import KV_BLOCK, KV_DTYPES, SPANS
from pi2.plan.documents.plan_memory import KvType
from pi2.plan.weights.latent import LatentShape

TOKENS_TOGETHER = 2
"""Tokens whose scores are added up at once: they share the loads of queries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What is kept of a sequence: ``rows`` [context, kept], and for ``int8`` the ``scales`` float16
    [context] of them."""

    shape: LatentShape
    kv: KvType
    rows: v.Buffer
    scales: v.Buffer | None
    once: v.Expr
    """1, see `Activations.once`."""

    @property
    def lanes(self) -> int:
        """Elements of a vector of the instruction set, in both parts of a row."""
        return math.gcd(self.shape.rank, self.shape.rotated, 16)

    def load(self, place: v.Expr, lanes: int) -> v.Expr:
        """Return elements as float32, not yet scaled."""
        return v.cast(v.load(self.rows, place, lanes), "float32", lanes)

    def load_scales(self, block: v.Expr) -> v.Expr | None:
        """Return the scales float32 x 16 of a block; None if there are none."""
        if self.scales is None:
            return None
        return v.let(load_scales(self.scales, v.wide(0), block))


def count_heads_together(heads: int) -> int:
    """Return the heads that share one pass over rows."""
    return math.gcd(heads, 4)


def emit_keep_row(kept: Kept, source: v.Buffer, place: v.Expr, at: v.Expr) -> None:
    """Keep the row from ``source[place:]`` for the token that stands ``at``."""
    size, lanes, dtype = kept.shape.kept, kept.lanes, KV_DTYPES[kept.kv]
    factor = None
    if kept.scales is not None:
        largest = v.Cell(v.constant(0.0, "float32", lanes))
        with T.serial(size // lanes * kept.once) as step:
            largest.set(T.max(largest.get(), T.abs(v.load(source, place + step * lanes, lanes))))
        top = v.find_largest(largest.get(), "float32", lanes)
        scale = v.let(v.cast(top * v.constant(1.0 / 127, "float32"), "float16", 1))
        v.store(kept.scales, at, scale, 1)
        # Codes belong to the scale as it is kept.  Vectors too small for one are zero.
        own = v.let(v.cast(scale, "float32", 1))
        zero = v.constant(0.0, "float32")
        factor = v.let(T.Select(own > zero, v.constant(1.0, "float32") / own, zero))
    with T.serial(size // lanes * kept.once) as step:
        part = v.load(source, place + step * lanes, lanes)
        if factor is not None:
            part = T.nearbyint(part * v.splat(factor, lanes))
            low, high = (v.constant(side, "float32", lanes) for side in (-127.0, 127.0))
            part = v.cast(T.max(T.min(part, high), low), "int32", lanes)
        target = v.let(v.wide(at) * size + v.wide(step * lanes))
        v.store(kept.rows, target, v.cast(part, dtype, lanes), lanes)


def emit_heads(
    kept: Kept,
    queries: v.Buffer,
    sources: list[v.Expr],
    target: v.Buffer,
    results: list[v.Expr],
    last: v.Expr,
    begin: v.Expr,
    blocks: v.Expr,
    scale: v.Expr,
    finish: Callable[[int, v.Expr, v.Expr], None],
) -> None:
    """Add up what is kept in ``blocks`` blocks from ``begin`` on, weighted by the shares of some
    heads of one token, which sees all up to ``last``.

    Queries begin at ``sources`` of ``queries``, sums float32 [rank] at ``results`` of ``target``;
    ``scale`` float32 is the factor of scores.
    ``finish(index, largest score, total of shares)`` is called for every head at the end.
    """
    rank, size, lanes, count = kept.shape.rank, kept.shape.kept, kept.lanes, len(sources)
    scores = T.alloc_buffer((count * KV_BLOCK,), "float32")
    shares = T.alloc_buffer((count * KV_BLOCK,), "float32")
    largest = T.alloc_buffer((count,), "float32")
    totals = T.alloc_buffer((count,), "float32")
    factors = T.alloc_buffer((count,), "float32")
    for index, result in enumerate(results):
        v.store(largest, index, v.constant(NEVER, "float32"), 1)
        v.store(totals, index, v.constant(0.0, "float32"), 1)
        with T.serial(rank // lanes * kept.once) as step:
            v.store(target, result + step * lanes, v.constant(0.0, "float32", lanes), lanes)
    with T.serial(blocks) as turn:
        block = v.let(begin + turn)
        with T.serial(KV_BLOCK // TOKENS_TOGETHER * kept.once) as pair:
            first = v.let(pair * TOKENS_TOGETHER)
            rows = [
                v.let(v.wide(block * KV_BLOCK + first + other) * size)
                for other in range(TOKENS_TOGETHER)
            ]
            zeros = v.constant(0.0, "float32", lanes)
            sums = [[v.Cell(zeros) for _ in rows] for _ in sources]
            with T.serial(size // lanes * kept.once) as step:
                keys = [v.let(kept.load(row + v.wide(step * lanes), lanes)) for row in rows]
                for source, cells in zip(sources, sums, strict=True):
                    query = v.let(v.load(queries, source + step * lanes, lanes))
                    for key, cell in zip(keys, cells, strict=True):
                        cell.set(T.fma(query, key, cell.get()))
            for index, cells in enumerate(sums):
                for other, cell in enumerate(cells):
                    total = v.add_lanes(cell.get(), "float32", lanes)
                    v.store(scores, index * KV_BLOCK + first + other, total, 1)
        where = v.let(T.ramp(block * KV_BLOCK, 1, KV_BLOCK))
        scales = kept.load_scales(block)
        for index in range(count):
            score = v.load(scores, index * KV_BLOCK, KV_BLOCK) * v.splat(scale, KV_BLOCK)
            if scales is not None:
                score = score * scales
            # Not named: TVM's analyzer cannot hold vectors of bool.
            hidden = where > v.splat(last, KV_BLOCK)
            never = v.constant(NEVER, "float32", KV_BLOCK)
            masked = v.let(T.Select(hidden, never, score))
            top = v.let(T.max(largest[index], v.find_largest(masked, "float32", KV_BLOCK)))
            factor = v.let(v.take_exponential(largest[index] - top, 1))
            share = v.let(v.take_exponential(masked - v.splat(top, KV_BLOCK), KV_BLOCK))
            weighted = share if scales is None else share * scales
            v.store(shares, index * KV_BLOCK, weighted, KV_BLOCK)
            total = T.fma(totals[index], factor, v.add_lanes(share, "float32", KV_BLOCK))
            v.store(totals, index, total, 1)
            v.store(largest, index, top, 1)
            v.store(factors, index, factor, 1)
        with T.serial(rank // lanes * kept.once) as part:
            places = [v.let(result + part * lanes) for result in results]
            parts = [
                v.let(v.load(target, place, lanes) * v.splat(factors[index], lanes))
                for index, place in enumerate(places)
            ]
            for other in range(KV_BLOCK):
                row = v.wide(block * KV_BLOCK + other) * size + v.wide(part * lanes)
                value = v.let(kept.load(row, lanes))
                for index in range(count):
                    weight = v.splat(shares[index * KV_BLOCK + other], lanes)
                    parts[index] = v.let(T.fma(weight, value, parts[index]))
            for place, total in zip(places, parts, strict=True):
                v.store(target, place, total, lanes)
    for index in range(count):
        finish(index, v.let(largest[index]), v.let(totals[index]))


def emit_divide(kept: Kept, target: v.Buffer, place: v.Expr, total: v.Expr) -> None:
    """Divide a head's sum at ``place`` by the total of its shares."""
    lanes = kept.lanes
    factor = v.let(v.constant(1.0, "float32") / total)
    with T.serial(kept.shape.rank // lanes * kept.once) as part:
        at = v.let(place + part * lanes)
        v.store(target, at, v.load(target, at, lanes) * v.splat(factor, lanes), lanes)


def emit_merge_spans(
    kept: Kept, spans: Spans, heads: int, target: v.Buffer, find_place: Callable[[v.Expr], v.Expr]
) -> None:
    """Set ``target`` from ``find_place(head)`` on to what all spans say of a head."""
    rank, lanes = kept.shape.rank, kept.lanes
    with T.serial(heads) as head:
        first = v.let(head * SPANS)
        top = v.Cell(spans.tops[first])
        with T.serial(spans.count - 1) as step:
            top.set(T.max(top.get(), spans.tops[first + step + 1]))
        total = v.Cell(v.constant(0.0, "float32"))
        result = v.let(find_place(head))
        with T.serial(rank // lanes * kept.once) as part:
            v.store(target, result + part * lanes, v.constant(0.0, "float32", lanes), lanes)
        with T.serial(spans.count) as step:
            place = v.let(first + step)
            factor = v.let(v.take_exponential(spans.tops[place] - top.get(), 1))
            total.set(T.fma(spans.totals[place], factor, total.get()))
            with T.serial(rank // lanes * kept.once) as part:
                value = v.load(spans.sums, place * rank + part * lanes, lanes)
                old = v.load(target, result + part * lanes, lanes)
                new = T.fma(value, v.splat(factor, lanes), old)
                v.store(target, result + part * lanes, new, lanes)
        emit_divide(kept, target, result, total.get())
