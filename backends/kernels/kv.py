"""The KV cache of a layer, and rotary positions: what is kept of a token for later ones.

Keys [kv_heads, context / 16, head_dim, 16] (16 tokens, one per lane), values [kv_heads, context,
head_dim]; ``context`` is a multiple of 16.  Three types:

- ``fp32``: as they were computed.
- ``fp16``: rounded.
- ``int8``: every head's vector of a token has one fp16 scale, its largest magnitude / 127; codes
  are rint(x / scale).  ``key_scales`` and ``value_scales`` fp16 [kv_heads, context].  One scale per
  vector costs a multiplication per 16 scores, and per 16 shares; the error of an element is at
  most 1 / 254 of the vector's largest."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.spec import KV_BLOCK, KV_DTYPES, KernelSpec
from pi2.plan.arithmetic.units import KV_ELEMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """The KV cache of a layer and the room that it has, in tokens."""

    keys: v.Buffer
    values: v.Buffer
    key_scales: v.Buffer | None
    """Scales of keys of type ``int8``; None for other types."""
    value_scales: v.Buffer | None
    context: v.Expr
    line: int
    """Elements that a cache line holds."""
    once: v.Expr
    """1, see `Activations.once`."""

    def load(self, buffer: v.Buffer, place: v.Expr, lanes: int) -> v.Expr:
        """Return keys or values as float32, not yet scaled."""
        return v.cast(v.load(buffer, place, lanes), "float32", lanes)

    def scale_keys(self, scores: v.Expr, head: v.Expr, block: v.Expr) -> v.Expr:
        """Return the scores float32 x 16 of a block; ``head`` is kv_head * context."""
        if self.key_scales is None:
            return scores
        return scores * v.let(load_scales(self.key_scales, head, block))

    def load_value_scales(self, head: v.Expr, block: v.Expr) -> v.Expr | None:
        """Return the scales float32 x 16 of a block's values; None if they have none."""
        if self.value_scales is None:
            return None
        return v.let(load_scales(self.value_scales, head, block))


def load_scales(scales: v.Buffer, head: v.Expr, block: v.Expr) -> v.Expr:
    """Return the scales float32 x 16 of a block; ``head`` is the place of its head's first."""
    place = head + v.wide(block) * KV_BLOCK
    return v.cast(v.load(scales, place, KV_BLOCK), "float32", KV_BLOCK)


def make_cache(
    spec: KernelSpec,
    keys: v.Buffer,
    values: v.Buffer,
    scales: tuple[v.Buffer, v.Buffer] | None,
    context: v.Expr,
    once: v.Expr,
) -> Cache:
    """Return the cache of a spec's type; only ``int8`` has ``scales``."""
    assert (scales is None) == (spec.kv != "int8")
    return Cache(
        keys=keys,
        values=values,
        key_scales=None if scales is None else scales[0],
        value_scales=None if scales is None else scales[1],
        context=context,
        line=64 // KV_ELEMENT_BYTES[spec.kv],
        once=once,
    )


def count_lanes(length: int) -> int:
    """Return the widest vector, up to 16 lanes, that divides ``length``."""
    return math.gcd(length, 16)


def emit_rope(
    spec: KernelSpec,
    qkv: v.Buffer,
    tables: tuple[v.Buffer, v.Buffer],
    once: v.Expr,
    token: v.Expr,
    at: v.Expr,
    growth: v.Buffer | None = None,
) -> None:
    """Rotate queries and keys of ``token``, at position ``at``, in place; only queries if keys are
    another layer's. Unless their norm comes later, multiply queries by the score's scale and by the
    position's ``growth``.

    ``qkv`` float32 [tokens, qkv_rows]; ``tables``: cosines and sines float32 [context, head_dim /
    2]; element d of a head turns with element d + head_dim / 2."""
    size, half = spec.attention.head_dim, spec.attention.head_dim // 2
    cosines, sines = tables
    lanes = count_lanes(half)
    start = v.let(token * spec.attention.projected)
    query_scale = _find_query_scale(spec, at, growth)
    if spec.attention.head_norm and spec.attention.options.head_norm_place == "after":
        query_scale = v.constant(1.0, "float32")
    runs = [(0, spec.attention.heads, query_scale)]
    if spec.attention.has_keys:
        runs.append((spec.attention.heads, spec.attention.kv_heads, v.constant(1.0, "float32")))
    for origin, heads, scale in runs:
        with T.serial(heads) as head, T.serial(half // lanes * once) as step:
            place = v.let(start + (head + origin) * size + step * lanes)
            cosine = v.let(v.load(cosines, at * half + step * lanes, lanes))
            sine = v.let(v.load(sines, at * half + step * lanes, lanes))
            first = v.let(v.load(qkv, place, lanes))
            second = v.let(v.load(qkv, place + half, lanes))
            factor = v.splat(scale, lanes)
            v.store(qkv, place, (first * cosine - second * sine) * factor, lanes)
            v.store(qkv, place + half, (second * cosine + first * sine) * factor, lanes)


def _find_query_scale(spec: KernelSpec, at: v.Expr, growth: v.Buffer | None) -> v.Expr:
    scale = v.constant(
        spec.attention.options.scale or 1.0 / math.sqrt(spec.attention.head_dim), "float32"
    )
    return v.let(scale if growth is None else scale * growth[at])


def emit_scale_queries(
    spec: KernelSpec,
    qkv: v.Buffer,
    once: v.Expr,
    token: v.Expr,
    at: v.Expr,
    growth: v.Buffer | None,
) -> None:
    """Multiply queries of ``token``, which stands ``at``, by the score's scale."""
    size = spec.attention.heads * spec.attention.head_dim
    lanes = count_lanes(size)
    factor = _find_query_scale(spec, at, growth)
    with T.serial(size // lanes * once) as step:
        place = v.let(token * spec.attention.projected + step * lanes)
        v.store(qkv, place, v.load(qkv, place, lanes) * v.splat(factor, lanes), lanes)


def emit_clip(spec: KernelSpec, qkv: v.Buffer, limit: float, once: v.Expr, token: v.Expr) -> None:
    """Cut QKV of ``token`` to -limit..limit."""
    own = 0 if not spec.attention.has_keys else 2 * spec.attention.kv_heads
    size = (spec.attention.heads + own) * spec.attention.head_dim
    lanes = count_lanes(size)
    low, high = (v.constant(side, "float32", lanes) for side in (-limit, limit))
    with T.serial(size // lanes * once) as step:
        place = v.let(token * spec.attention.projected + step * lanes)
        v.store(qkv, place, T.max(T.min(v.load(qkv, place, lanes), high), low), lanes)


def emit_append(spec: KernelSpec, qkv: v.Buffer, cache: Cache, token: v.Expr, at: v.Expr) -> None:
    """Append ``token``, at position ``at``, to the KV cache from ``qkv`` [tokens, qkv_rows]."""
    size = spec.attention.head_dim
    with T.serial(spec.attention.kv_heads) as head:
        context = v.let(v.wide(head) * v.wide(cache.context))
        inside = v.wide(T.floormod(at, KV_BLOCK))
        row = v.let((context + v.wide(at) - inside) * size + inside)
        source = v.let(token * spec.attention.projected + (spec.attention.heads + head) * size)
        place = v.wide(head) * v.wide(cache.context) + v.wide(at)
        keys = _Kept(cache.keys, row, KV_BLOCK, cache.key_scales, place)
        _emit_vector(spec, qkv, source, keys, cache.once)
        source = v.let(source + spec.attention.kv_heads * size)
        row = v.let((context + v.wide(at)) * size)
        values = _Kept(cache.values, row, 1, cache.value_scales, place)
        _emit_vector(spec, qkv, source, values, cache.once)


@dataclass(frozen=True, slots=True)
class _Kept:
    """Place of a head's vector: ``target[row::stride]``, and its scale at a ``place``."""

    target: v.Buffer
    row: v.Expr
    stride: int
    scales: v.Buffer | None
    place: v.Expr


def _emit_vector(spec: KernelSpec, qkv: v.Buffer, source: v.Expr, to: _Kept, once: v.Expr) -> None:
    """Store a head's vector from ``qkv[source:]``."""
    size = spec.attention.head_dim
    lanes = count_lanes(size)
    dtype = KV_DTYPES[spec.kv]
    factor = None
    if to.scales is not None:
        largest = v.Cell(v.constant(0.0, "float32", lanes))
        with T.serial(size // lanes * once) as step:
            part = T.abs(v.load(qkv, source + step * lanes, lanes))
            largest.set(T.max(largest.get(), part))
        top = v.find_largest(largest.get(), lanes)
        scale = v.let(v.cast(top * v.constant(1.0 / 127, "float32"), "float16", 1))
        v.store(to.scales, to.place, scale, 1)
        # Codes belong to the scale as it is kept.  Vectors too small for one are zero.
        kept = v.let(v.cast(scale, "float32", 1))
        zero = v.constant(0.0, "float32")
        factor = v.let(T.Select(kept > zero, v.constant(1.0, "float32") / kept, zero))
    with T.serial(size // lanes * once) as step:
        part = v.load(qkv, source + step * lanes, lanes)
        if factor is not None:
            part = T.nearbyint(part * v.splat(factor, lanes))
            low, high = (v.constant(side, "float32", lanes) for side in (-127.0, 127.0))
            part = v.cast(T.max(T.min(part, high), low), "int32", lanes)
        place = v.span(to.row + v.wide(step * (lanes * to.stride)), lanes, to.stride)
        T.buffer_store(to.target, v.cast(part, dtype, lanes), [place])
