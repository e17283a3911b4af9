"""Attention of one token with grouped queries over the KV cache (`pi2.backends.kernels.kv`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.kv import Cache, count_lanes, load_scales
from pi2.backends.kernels.spec import KV_BLOCK, KV_DTYPES, SPANS, KernelSpec
from pi2.plan.documents.model_mixing import Latent
from pi2.plan.documents.plan import KvType

QUERIES_TOGETHER = 4
"""Queries that share one pass over the KV cache: their sums and a key fit the registers."""
SPAN_BLOCKS = 16
"""Fewest blocks of a span: 256 tokens."""
NEVER = -1e30
"""Score of a masked token: its exponential is 1e-38, which rounds away next to the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Query:
    source: v.Expr
    """Its first element in ``qkv``."""
    result: v.Expr
    """The first element of its sum in the target."""
    first: v.Expr
    last: v.Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """How the blocks that a token sees are divided, and room for what each span adds up to.

    ``sums`` float32 [heads, SPANS, head_dim], not yet divided by the total of the shares;
    ``tops`` and ``totals`` float32 [heads, SPANS]: largest score and total of the shares."""

    sums: v.Buffer
    tops: v.Buffer
    totals: v.Buffer
    count: v.Expr
    begin: v.Expr
    """First block."""
    blocks: v.Expr
    size: v.Expr
    """Blocks of a span; the last may have fewer."""


def find_first(spec: KernelSpec, last: v.Expr) -> v.Expr:
    """Return the first token that the query at ``last`` sees."""
    if spec.attention.window is None:
        return T.int32(0)
    if spec.attention.options.window_kind == "chunked":
        return v.let(last - T.floormod(last, spec.attention.window))
    return v.let(T.max(last - (spec.attention.window - 1), 0))


def divide_blocks(
    spec: KernelSpec, position: v.Expr, sums: v.Buffer, tops: v.Buffer, totals: v.Buffer
) -> Spans:
    """Return the spans of the token at ``position``."""
    begin = v.let(T.floordiv(find_first(spec, position), KV_BLOCK))
    blocks = v.let(T.floordiv(position, KV_BLOCK) - begin + 1)
    size = v.let(T.max(T.floordiv(blocks + (SPANS - 1), SPANS), SPAN_BLOCKS))
    count = v.let(T.floordiv(blocks + size - 1, size))
    return Spans(
        sums=sums, tops=tops, totals=totals, count=count, begin=begin, blocks=blocks, size=size
    )


def find_share(spec: KernelSpec, top: v.Expr, total: v.Expr, sink: v.Expr | None) -> v.Expr:
    """Factor of sums of shares, which are relative to the largest score ``top``; a ``sink`` has a
    share as well. A far larger sink leaves nothing."""
    scale = v.constant(spec.attention.options.value_scale, "float32")
    if sink is None:
        return scale / total
    most = v.let(T.max(top, sink))
    own = v.let(v.take_exponential(top - most, 1))
    share = own / (total * own + v.take_exponential(sink - most, 1))
    return share if spec.attention.options.value_scale == 1.0 else share * scale


@dataclass(frozen=True, slots=True)
class Attending:
    """Queries of some tokens, and the KV cache of earlier ones."""

    spec: KernelSpec
    qkv: v.Buffer
    cache: Cache


def emit_span_attention(
    attending: Attending,
    spans: Spans,
    position: v.Expr,
    span: v.Expr,
    kv_head: v.Expr,
    token: v.Expr | int = 0,
) -> None:
    """Attend the heads of ``kv_head`` of ``token`` to the blocks of a span."""
    spec = attending.spec
    group = spec.attention.heads // spec.attention.kv_heads
    first = find_first(spec, position)
    skipped = v.let(span * spans.size)
    count = v.let(T.min(spans.blocks - skipped, spans.size))
    for offset in range(0, group, QUERIES_TOGETHER):
        queries, places = [], []
        for index in range(min(QUERIES_TOGETHER, group - offset)):
            head = v.let(kv_head * group + (offset + index))
            place = v.let(head * SPANS + span)
            places.append(place)
            queries.append(
                _Query(
                    source=v.let(token * spec.attention.projected + head * spec.attention.head_dim),
                    result=v.let(place * spec.attention.head_dim),
                    first=first,
                    last=position,
                )
            )

        def finish(index: int, top: v.Expr, total: v.Expr, places: list[v.Expr] = places) -> None:
            v.store(spans.tops, places[index], top, 1)
            v.store(spans.totals, places[index], total, 1)

        begin = v.let(spans.begin + skipped)
        _emit_queries(attending, spans.sums, queries, kv_head, begin, count, finish)


def emit_merge(
    spec: KernelSpec,
    spans: Spans,
    cache: Cache,
    output: v.Buffer,
    token: v.Expr | int = 0,
    sinks: v.Buffer | None = None,
) -> None:
    """Set ``output`` float32 [tokens, heads * head_dim] of ``token`` to what all spans say;
    ``sinks`` float32 [heads] are scores that no token has."""
    size = spec.attention.head_dim
    lanes = count_lanes(size)
    with T.serial(spec.attention.heads) as head:
        first = v.let(head * SPANS)
        top = v.Cell(spans.tops[first])
        with T.serial(spans.count - 1) as step:
            top.set(T.max(top.get(), spans.tops[first + step + 1]))
        total = v.Cell(v.constant(0.0, "float32"))
        result = v.let(token * spec.attention.stored_query + head * size)
        with T.serial(size // lanes * cache.once) as part:
            v.store(output, result + part * lanes, v.constant(0.0, "float32", lanes), lanes)
        with T.serial(spans.count) as step:
            place = v.let(first + step)
            factor = v.let(v.take_exponential(spans.tops[place] - top.get(), 1))
            total.set(T.fma(spans.totals[place], factor, total.get()))
            with T.serial(size // lanes * cache.once) as part:
                value = v.load(spans.sums, place * size + part * lanes, lanes)
                old = v.load(output, result + part * lanes, lanes)
                new = T.fma(value, v.splat(factor, lanes), old)
                v.store(output, result + part * lanes, new, lanes)
        share = find_share(spec, top.get(), total.get(), None if sinks is None else sinks[head])
        _emit_scale(spec, cache, output, result, v.let(share))


def _emit_scale(
    spec: KernelSpec, cache: Cache, target: v.Buffer, base: v.Expr, factor: v.Expr
) -> None:
    """Multiply a head's vector at ``base`` by ``factor``."""
    lanes = count_lanes(spec.attention.head_dim)
    with T.serial(spec.attention.head_dim // lanes * cache.once) as part:
        place = base + part * lanes
        v.store(target, place, v.load(target, place, lanes) * v.splat(factor, lanes), lanes)


def _emit_queries(
    attending: Attending,
    target: v.Buffer,
    queries: list[_Query],
    kv_head: v.Expr,
    begin: v.Expr,
    blocks: v.Expr,
    finish: Callable[[int, v.Expr, v.Expr], None],
) -> None:
    """Add up values of ``blocks`` blocks from ``begin`` on, weighted by the queries' shares.

    ``finish(index, largest score, total of shares)`` is called for every query at the end."""
    spec, qkv, cache = attending.spec, attending.qkv, attending.cache
    size, count = spec.attention.head_dim, len(queries)
    lanes = count_lanes(size)
    # Elements of 16 tokens' keys: a cache line of them, and two at least, as many as sums.
    together = math.gcd(max(cache.line // KV_BLOCK, 2), size)
    # Parts of a value that share the loads of the queries' shares: bytes come quicker than they are
    # computed with, wider types do not.
    wide = math.gcd(size // lanes, 2 if cache.value_scales is not None else 1)
    scores = T.alloc_buffer((count * KV_BLOCK,), "float32")
    shares = T.alloc_buffer((count * KV_BLOCK,), "float32")
    largest = T.alloc_buffer((count,), "float32")
    totals = T.alloc_buffer((count,), "float32")
    factors = T.alloc_buffer((count,), "float32")
    for index, query in enumerate(queries):
        v.store(largest, index, v.constant(NEVER, "float32"), 1)
        v.store(totals, index, v.constant(0.0, "float32"), 1)
        with T.serial(size // lanes * cache.once) as step:
            place = query.result + step * lanes
            v.store(target, place, v.constant(0.0, "float32", lanes), lanes)
    head = v.let(v.wide(kv_head) * v.wide(cache.context))
    with T.serial(blocks) as step:
        block = v.let(begin + step)
        start = v.let((head + v.wide(block) * KV_BLOCK) * size)
        following = v.let(start + size * KV_BLOCK)
        # Two sums per query: one addition after the other would wait for its result.
        sums = [[v.Cell(v.constant(0.0, "float32", 16)) for _ in range(2)] for _ in queries]
        with T.serial(size // together * cache.once) as line:
            for ahead in range(0, together * KV_BLOCK, cache.line):
                v.prefetch(cache.keys, following + v.wide(line * (together * KV_BLOCK) + ahead))
            for turn in range(together):
                element = line * together + turn
                key = v.let(cache.load(cache.keys, start + v.wide(element * 16), 16))
                for query, cells in zip(queries, sums, strict=True):
                    value = v.splat(qkv[query.source + element], 16)
                    cell = cells[turn % 2]
                    cell.set(T.fma(value, key, cell.get()))
        for index, cells in enumerate(sums):
            score = cache.scale_keys(cells[0].get() + cells[1].get(), head, block)
            if spec.attention.options.softcap is not None:
                score = v.take_cap(score, spec.attention.options.softcap, 16)
            v.store(scores, index * 16, score, 16)
        where = v.let(T.ramp(block * KV_BLOCK, 1, 16))
        value_scales = cache.load_value_scales(head, block)
        for index, query in enumerate(queries):
            # Not named: TVM's analyzer cannot hold vectors of bool.
            hidden = T.Or(where > v.splat(query.last, 16), where < v.splat(query.first, 16))
            masked = v.let(
                T.Select(hidden, v.constant(NEVER, "float32", 16), v.load(scores, index * 16, 16))
            )
            top = v.let(T.max(largest[index], v.find_largest(masked, 16)))
            factor = v.let(v.take_exponential(largest[index] - top, 1))
            share = v.let(v.take_exponential(masked - v.splat(top, 16), 16))
            weighted = share if value_scales is None else share * value_scales
            v.store(shares, index * 16, weighted, 16)
            total = T.fma(totals[index], factor, v.add_lanes(share, "float32", 16))
            v.store(totals, index, total, 1)
            v.store(largest, index, top, 1)
            v.store(factors, index, factor, 1)
        run = lanes * wide
        with T.serial(size // run * cache.once) as part:
            offsets = [v.let(part * run + turn * lanes) for turn in range(wide)]
            places = [[v.let(query.result + own) for own in offsets] for query in queries]
            parts = [
                [
                    v.let(v.load(target, place, lanes) * v.splat(factors[index], lanes))
                    for place in row
                ]
                for index, row in enumerate(places)
            ]
            for line in range(0, KV_BLOCK * run, cache.line):
                v.prefetch(cache.values, following + v.wide(part * (KV_BLOCK * run) + line))
            for other in range(KV_BLOCK):
                values = [
                    v.let(cache.load(cache.values, start + v.wide(own + other * size), lanes))
                    for own in offsets
                ]
                for index in range(count):
                    weight = v.let(v.splat(shares[index * 16 + other], lanes))
                    parts[index] = [
                        v.let(T.fma(weight, value, old))
                        for value, old in zip(values, parts[index], strict=True)
                    ]
            for row, found in zip(places, parts, strict=True):
                for place, total in zip(row, found, strict=True):
                    v.store(target, place, total, lanes)
    for index in range(count):
        finish(index, v.let(largest[index]), v.let(totals[index]))


TOKENS_TOGETHER = 2
"""Tokens whose scores are added up at once: they share the loads of queries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The cached latents of a sequence: ``rows`` [context, kept], and for ``int8`` their ``scales``
    float16 [context]."""

    shape: Latent
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
        top = v.find_largest(largest.get(), lanes)
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


@dataclass(frozen=True, slots=True)
class MixedHeads:
    """Queries begin at ``sources`` of ``queries``, sums float32 [rank] at ``results``."""

    queries: v.Buffer
    sources: list[v.Expr]
    target: v.Buffer
    results: list[v.Expr]


def emit_heads(
    kept: Kept,
    heads: MixedHeads,
    last: v.Expr,
    begin: v.Expr,
    blocks: v.Expr,
    scale: v.Expr,
    finish: Callable[[int, v.Expr, v.Expr], None],
) -> None:
    """Add up the cached latents in ``blocks`` blocks from ``begin`` on, weighted by the shares of
    some heads of one token, which sees all up to ``last``.

    ``scale`` float32 is the factor of scores. ``finish(index, largest score, total of shares)`` is
    called for every head at the end."""
    queries, sources, target, results = heads.queries, heads.sources, heads.target, heads.results
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
            top = v.let(T.max(largest[index], v.find_largest(masked, KV_BLOCK)))
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
