"""Rotary positions, the KV cache, and attention with grouped queries.

KV cache of a layer, fp16: keys [kv_heads, context / 16, head_dim, 16] (16 tokens, one per lane, so
that scores need no sum across lanes), values [kv_heads, context, head_dim].  ``context`` is a
multiple of 16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.kernels import vectors as v
from pi2.backends.kernels.spec import KV_BLOCK, KernelSpec

HEADS_TOGETHER = 4
"""Query heads that share one pass over keys and values."""
_NEVER = -1e30
"""Score of a masked token: its exponential is 1e-38, which rounds away beside the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """The KV cache of a layer and the room that it has, in tokens."""

    keys: v.Buffer
    values: v.Buffer
    context: v.Expr
    once: v.Expr
    """1, see `Activations.once`."""


def count_lanes(length: int) -> int:
    """Return the widest vector, up to 16 lanes, that divides ``length``."""
    return math.gcd(length, 16)


def emit_rope(
    spec: KernelSpec,
    qkv: v.Buffer,
    cosines: v.Buffer,
    sines: v.Buffer,
    cache: Cache,
    token: v.Expr,
    position: v.Expr,
) -> None:
    """Rotate queries and keys of ``token`` and append keys and values to the cache.

    ``qkv`` float32 [tokens, qkv_rows]: queries are rotated in place and divided by
    sqrt(head_dim).  ``cosines`` and ``sines`` float32 [context, head_dim / 2]; element d of a head
    turns with element d + head_dim / 2.
    """
    size, half = spec.head_dim, spec.head_dim // 2
    lanes = count_lanes(half)
    at = v.let(position + token)
    start = v.let(token * spec.qkv_rows)

    def rotate(head: v.Expr, step: v.Expr, scale: float) -> tuple[v.Expr, v.Expr, v.Expr]:
        place = v.let(start + head * size + step * lanes)
        cosine = v.let(v.load(cosines, at * half + step * lanes, lanes))
        sine = v.let(v.load(sines, at * half + step * lanes, lanes))
        first = v.let(v.load(qkv, place, lanes))
        second = v.let(v.load(qkv, place + half, lanes))
        factor = v.constant(scale, "float32", lanes)
        return (
            place,
            v.let((first * cosine - second * sine) * factor),
            v.let((second * cosine + first * sine) * factor),
        )

    with T.serial(spec.heads) as head, T.serial(half // lanes * cache.once) as step:
        place, first, second = rotate(head, step, 1.0 / math.sqrt(size))
        v.store(qkv, place, first, lanes)
        v.store(qkv, place + half, second, lanes)
    with T.serial(spec.kv_heads) as head:
        block = v.let(
            (v.wide(head) * v.wide(T.floordiv(cache.context, KV_BLOCK)))
            + v.wide(T.floordiv(at, KV_BLOCK))
        )
        row = v.let(block * (size * KV_BLOCK) + v.wide(T.floormod(at, KV_BLOCK)))
        with T.serial(half // lanes * cache.once) as step:
            _, first, second = rotate(spec.heads + head, step, 1.0)
            for offset, part in ((0, first), (half, second)):
                place = row + v.wide((step * lanes + offset) * KV_BLOCK)
                T.buffer_store(
                    cache.keys, v.cast(part, "float16", lanes), [v.span(place, lanes, KV_BLOCK)]
                )
        source = v.let(start + (spec.heads + spec.kv_heads + head) * size)
        target = v.let((v.wide(head) * v.wide(cache.context) + v.wide(at)) * size)
        wide = count_lanes(size)
        with T.serial(size // wide * cache.once) as step:
            part = v.cast(v.load(qkv, source + step * wide, wide), "float16", wide)
            v.store(cache.values, target + v.wide(step * wide), part, wide)


def emit_attention(
    spec: KernelSpec,
    qkv: v.Buffer,
    cache: Cache,
    output: v.Buffer,
    token: v.Expr,
    position: v.Expr,
    kv_head: v.Expr,
) -> None:
    """Attend the query heads of ``kv_head`` to the tokens up to ``position + token``.

    ``output`` float32 [tokens, heads * head_dim].  Online softmax over blocks of 16 tokens.
    """
    group = spec.heads // spec.kv_heads
    last = v.let(position + token)
    if spec.window is None:
        first = T.int32(0)
    else:
        first = v.let(T.max(last - (spec.window - 1), 0))
    for offset in range(0, group, HEADS_TOGETHER):
        count = min(HEADS_TOGETHER, group - offset)
        _emit_heads(spec, qkv, cache, output, token, first, last, kv_head, offset, count)


def _emit_heads(
    spec: KernelSpec,
    qkv: v.Buffer,
    cache: Cache,
    output: v.Buffer,
    token: v.Expr,
    first: v.Expr,
    last: v.Expr,
    kv_head: v.Expr,
    offset: int,
    count: int,
) -> None:
    size, group = spec.head_dim, spec.heads // spec.kv_heads
    lanes = count_lanes(size)
    head = v.let(kv_head * group + offset)
    query = v.let(token * spec.qkv_rows + head * size)
    result = v.let(token * spec.width + head * size)
    scores = T.alloc_buffer((count * KV_BLOCK,), "float32")
    shares = T.alloc_buffer((count * KV_BLOCK,), "float32")
    largest = T.alloc_buffer((count,), "float32")
    totals = T.alloc_buffer((count,), "float32")
    factors = T.alloc_buffer((count,), "float32")
    for index in range(count):
        v.store(largest, index, v.constant(_NEVER, "float32"), 1)
        v.store(totals, index, v.constant(0.0, "float32"), 1)
    with T.serial(count * size // lanes) as step:
        v.store(output, result + step * lanes, v.constant(0.0, "float32", lanes), lanes)
    key_head = v.let(v.wide(kv_head) * v.wide(cache.context) * size)
    begin = v.let(T.floordiv(first, KV_BLOCK))
    with T.serial(T.floordiv(last, KV_BLOCK) - begin + 1) as step:
        block = v.let(begin + step)
        keys = v.let(key_head + v.wide(block) * (size * KV_BLOCK))
        following = v.let(keys + size * KV_BLOCK)
        # Two sums per head: one addition after the other would wait for its result.
        sums = [[v.Cell(v.constant(0.0, "float32", 16)) for _ in range(2)] for _ in range(count)]
        with T.serial(size // 2 * cache.once) as pair:
            v.prefetch(cache.keys, following + v.wide(pair * 32))
            for turn in range(2):
                element = pair * 2 + turn
                key = v.load(cache.keys, keys + v.wide(element * 16), 16)
                key = v.let(v.cast(key, "float32", 16))
                for index in range(count):
                    value = v.splat(qkv[query + index * size + element], 16)
                    cell = sums[index][turn]
                    cell.set(T.fma(value, key, cell.get()))
        for index in range(count):
            v.store(scores, index * 16, sums[index][0].get() + sums[index][1].get(), 16)
        where = v.let(T.ramp(block * KV_BLOCK, 1, 16))
        # Not named: TVM's analyzer cannot hold vectors of bool.
        hidden = T.Or(where > v.splat(last, 16), where < v.splat(first, 16))
        for index in range(count):
            masked = v.let(
                T.Select(hidden, v.constant(_NEVER, "float32", 16), v.load(scores, index * 16, 16))
            )
            top = v.let(T.max(largest[index], v.find_largest(masked, "float32", 16)))
            factor = v.let(v.take_exponential(largest[index] - top, 1))
            share = v.let(v.take_exponential(masked - v.splat(top, 16), 16))
            v.store(shares, index * 16, share, 16)
            total = T.fma(totals[index], factor, v.add_lanes(share, "float32", 16))
            v.store(totals, index, total, 1)
            v.store(largest, index, top, 1)
            v.store(factors, index, factor, 1)
        values = v.let(key_head + v.wide(block) * (size * KV_BLOCK))
        with T.serial(size // lanes * cache.once) as part:
            sums = [
                v.let(
                    v.load(output, result + index * size + part * lanes, lanes)
                    * v.splat(factors[index], lanes)
                )
                for index in range(count)
            ]
            for line in range(0, KV_BLOCK * lanes, 32):
                v.prefetch(cache.values, following + v.wide(part * (KV_BLOCK * lanes) + line))
            for other in range(KV_BLOCK):
                value = v.let(
                    v.cast(
                        v.load(cache.values, values + v.wide(part * lanes + other * size), lanes),
                        "float32",
                        lanes,
                    )
                )
                for index in range(count):
                    weight = v.splat(shares[index * 16 + other], lanes)
                    sums[index] = v.let(T.fma(weight, value, sums[index]))
            for index in range(count):
                v.store(output, result + index * size + part * lanes, sums[index], lanes)
    for index in range(count):
        factor = v.let(v.constant(1.0, "float32") / totals[index])
        with T.serial(size // lanes * cache.once) as part:
            place = result + index * size + part * lanes
            v.store(output, place, v.load(output, place, lanes) * v.splat(factor, lanes), lanes)
