"""Norms of all kinds: of the residual stream, with activation quantisation, and of single heads."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.kv import count_lanes
from pi2.backends.kernels.matrix import emit_norm, emit_quantize
from pi2.backends.kernels.operands import Activations
from pi2.backends.kernels.spec import KernelSpec


def emit_copy(source: v.Buffer, target: v.Buffer, base: v.Expr, length: int) -> None:
    """Copy ``source[base : base + length]`` to the same place of ``target``."""
    with T.serial(length // 16) as step:
        place = v.let(base + step * 16)
        v.store(target, place, v.load(source, place, 16), 16)


def emit_fill(target: v.Buffer, base: v.Expr, length: int) -> None:
    """Set ``target[base : base + length]`` to 0."""
    with T.serial(length // 16) as step:
        v.store(target, base + step * 16, v.constant(0.0, "float32", 16), 16)


def emit_scale(target: v.Buffer, base: v.Expr, length: int, factor: float | v.Expr) -> None:
    """Multiply ``target[base : base + length]`` by ``factor``."""
    if isinstance(factor, float):
        if factor == 1.0:
            return
        factor = v.constant(factor, "float32")
    factor = v.let(factor)
    with T.serial(length // 16) as step:
        place = v.let(base + step * 16)
        part = v.load(target, place, 16) * v.splat(factor, 16)
        v.store(target, place, part, 16)


def emit_add_scaled(
    source: v.Buffer, target: v.Buffer, base: v.Expr, length: int, factor: float
) -> None:
    """Add ``factor * source[:length]`` to ``target[base : base + length]``."""
    with T.serial(length // 16) as step:
        place = v.let(base + step * 16)
        part = v.load(source, step * 16, 16) * v.constant(factor, "float32", 16)
        v.store(target, place, v.load(target, place, 16) + part, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormWeights:
    """float32 [length] each."""

    weight: v.Buffer
    bias: v.Buffer | None


def emit_normalize(
    spec: KernelSpec,
    source: v.Buffer,
    row: v.Expr,
    norm: NormWeights | None,
    target: Activations,
    token: v.Expr,
) -> None:
    """Set ``target.values[token]`` to the norm of ``source[row]``, or to a copy of it without
    ``norm``, and quantise it.

    ``source`` float32 [rows, length]. Mean and variance are computed one after the other:
    subtracting large squares would cancel."""
    if norm is None:
        with T.serial(target.length // 16 * target.once) as step:
            part = v.load(source, row * target.length + step * 16, 16)
            v.store(target.values, token * target.length + step * 16, part, 16)
        emit_quantize(target, token)
        return
    if spec.norm.kind == "rmsnorm" and norm.bias is None:
        width = spec.normalized_width
        emit_norm(source, row, norm.weight, spec.norm.epsilon, target, token, width)
        return
    length = target.length
    base = v.let(row * length)
    mean = v.constant(0.0, "float32")
    if spec.norm.kind == "layernorm":
        mean = _average(spec, source, base, target.once)
    squares = _add_squares(spec, source, base, mean, target.once)
    factor = invert_root(spec, squares, spec.normalized_width, 16)
    with T.serial(length // 16 * target.once) as step:
        part = (v.load(source, base + step * 16, 16) - v.splat(mean, 16)) * v.splat(factor, 16)
        part = part * v.load(norm.weight, step * 16, 16)
        if norm.bias is not None:
            part = part + v.load(norm.bias, step * 16, 16)
        v.store(target.values, token * length + step * 16, part, 16)
    emit_quantize(target, token)


def emit_add_normalized(
    spec: KernelSpec,
    source: v.Buffer,
    target: v.Buffer,
    weight: v.Buffer,
    once: v.Expr,
    token: v.Expr,
    row: v.Expr | None = None,
) -> None:
    """Add the norm of ``source[token]`` [hidden], scaled as outputs are, to ``target[token]``, or
    to ``target[row]``.

    ``source`` may change."""
    length = spec.hidden
    base = v.let(token * length)
    origin = base if row is None else v.let(row * length)
    mean = v.constant(0.0, "float32")
    if spec.norm.kind == "layernorm":
        mean = _average(spec, source, base, once)
    squares = _add_squares(spec, source, base, mean, once)
    inverse = invert_root(spec, squares, spec.normalized_width, 16)
    factor = v.let(inverse * v.constant(spec.model.multipliers.residual, "float32"))
    with T.serial(length // 16 * once) as step:
        place = v.let(base + step * 16)
        part = (v.load(source, place, 16) - v.splat(mean, 16)) * v.splat(factor, 16)
        part = part * v.load(weight, step * 16, 16)
        at = v.let(origin + step * 16)
        v.store(target, at, v.load(target, at, 16) + part, 16)


def _add_squares(
    spec: KernelSpec, source: v.Buffer, base: v.Expr, mean: v.Expr, once: v.Expr
) -> v.Expr:
    """Squares of the differences to ``mean`` of the elements from ``base`` on, in 16 sums."""
    zeros = v.constant(0.0, "float32", 16)
    squares = v.Cell(zeros)
    steps, rest = divmod(spec.normalized_width, 16)
    with T.serial(steps * once) as step:
        part = v.let(v.load(source, base + step * 16, 16) - v.splat(mean, 16))
        squares.set(T.fma(part, part, squares.get()))
    if rest:
        # The zeros that follow differ from the mean.
        part = v.load(source, base + steps * 16, 16) - v.splat(mean, 16)
        inside = T.ramp(T.int32(0), 1, 16) < v.splat(T.int32(rest), 16)
        kept = v.let(T.Select(inside, part, zeros))
        squares.set(T.fma(kept, kept, squares.get()))
    return v.let(squares.get())


def _average(spec: KernelSpec, source: v.Buffer, base: v.Expr, once: v.Expr) -> v.Expr:
    """Mean of the residual stream's vector that begins at ``base``; zeros beyond its width."""
    total = v.Cell(v.constant(0.0, "float32", 16))
    with T.serial(spec.hidden // 16 * once) as step:
        total.set(total.get() + v.load(source, base + step * 16, 16))
    sum_ = v.add_lanes(total.get(), "float32", 16)
    return v.let(sum_ * v.constant(1.0 / spec.normalized_width, "float32"))


def emit_head_norms(
    spec: KernelSpec,
    qkv: v.Buffer,
    query_weight: v.Buffer,
    key_weight: v.Buffer | None,
    once: v.Expr,
    token: v.Expr,
) -> None:
    """RMSNorm of every query and key head of ``token`` in ``qkv`` [tokens, qkv_rows], or of all
    query and all key heads together, in place; only of queries without ``key_weight``."""
    for weight, origin, count in (
        (query_weight, 0, spec.attention.heads),
        (key_weight, spec.attention.heads, spec.attention.kv_heads),
    ):
        if weight is None:
            continue
        heads, size = (count, spec.attention.head_dim)
        if spec.attention.options.head_norm_of == "all":
            heads, size = 1, count * spec.attention.head_dim
        first = v.let(token * spec.attention.projected + origin * spec.attention.head_dim)
        _emit_head_norm(spec, qkv, weight, once, _Vectors(first, heads, size))


def emit_value_norms(spec: KernelSpec, qkv: v.Buffer, once: v.Expr, token: v.Expr) -> None:
    """RMSNorm without weights of every value head of ``token`` in ``qkv`` [tokens, qkv_rows]."""
    origin = (spec.attention.heads + spec.attention.kv_heads) * spec.attention.head_dim
    first = v.let(token * spec.attention.projected + origin)
    _emit_head_norm(
        spec, qkv, None, once, _Vectors(first, spec.attention.kv_heads, spec.attention.head_dim)
    )


def emit_embedding_norm(spec: KernelSpec, x: v.Buffer, once: v.Expr, token: v.Expr) -> None:
    """RMSNorm without weights of ``token`` in ``x`` [tokens, hidden], in place."""
    first, width = v.let(token * spec.hidden), spec.normalized_width
    _emit_head_norm(spec, x, None, once, _Vectors(first, 1, spec.hidden, width))


def emit_mixed_norm(
    spec: KernelSpec, values: v.Buffer, weight: v.Buffer, once: v.Expr, token: v.Expr
) -> None:
    """RMSNorm of what all heads of ``token`` have mixed in ``values`` [tokens, width], in place."""
    attention = spec.attention
    first, width = (v.let(token * attention.stored_query), attention.heads * attention.head_dim)
    _emit_head_norm(spec, values, weight, once, _Vectors(first, 1, attention.stored_query, width))


def take_sub_norm_factor(spec: KernelSpec, squares: v.Expr) -> v.Expr:
    """What normalises a layer's activations, of which ``squares`` is the sum of the squares."""
    return invert_root(spec, squares, spec.sub_norm, 1)


@dataclass(frozen=True, slots=True)
class _Vectors:
    """``count`` vectors of ``size`` elements from ``first`` on; zeros follow after ``width`` of
    them, if they are fewer."""

    first: v.Expr
    count: int
    size: int
    width: int | None = None


def _emit_head_norm(
    spec: KernelSpec, qkv: v.Buffer, weight: v.Buffer | None, once: v.Expr, vectors: _Vectors
) -> None:
    """RMSNorm of vectors, in place."""
    size = vectors.size
    lanes = count_lanes(size)
    with T.serial(vectors.count) as head:
        base = v.let(vectors.first + head * size)
        squares = v.Cell(v.constant(0.0, "float32", lanes))
        with T.serial(size // lanes * once) as step:
            part = v.let(v.load(qkv, base + step * lanes, lanes))
            squares.set(T.fma(part, part, squares.get()))
        factor = invert_root(spec, squares.get(), vectors.width or size, lanes)
        with T.serial(size // lanes * once) as step:
            place = v.let(base + step * lanes)
            part = v.load(qkv, place, lanes) * v.splat(factor, lanes)
            if weight is not None:
                part = part * v.load(weight, step * lanes, lanes)
            v.store(qkv, place, part, lanes)


def invert_root(spec: KernelSpec, squares: v.Expr, length: int, lanes: int) -> v.Expr:
    """1 / sqrt(mean of squares + epsilon)."""
    total = v.add_lanes(squares, "float32", lanes)
    mean = total * v.constant(1.0 / length, "float32") + v.constant(spec.norm.epsilon, "float32")
    return v.let(v.constant(1.0, "float32") / T.sqrt(mean))
