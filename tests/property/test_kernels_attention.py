"""Rotary positions, the KV cache and attention, over head counts, windows and chunk sizes."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pi2.arrays import F64
from pi2.backends.arithmetic import compute_rope_tables
from pi2.backends.kernels.spec import KV_DTYPES, SPANS, KernelSpec
from pi2.backends.reference.attention import quantize_kv
from pi2.plan.documents.model_mixing import Rope
from pi2.plan.documents.plan import KvType
from tests.helpers.kernels import (
    X86_FEATURES,
    allocate,
    allocate_mixing_room,
    compile_kernel,
    list_runnable_isas,
    make_isa,
    make_spec,
    measure_error,
)

MOST_TOKENS = 4600
ROWS_TOGETHER = 64
"""Queries whose scores are in memory at once."""


@functools.cache
def make_attention(spec: KernelSpec) -> Callable[[Any], None]:
    """A kernel (tokens, position, context; qkv, cosines, sines, cache, spans, output, room).

    The cache is keys, values and, for int8, their scales.
    """
    from tvm.tirx.script import builder as T

    from pi2.backends.kernels import attention
    from pi2.backends.kernels.chunk_attention import Chunk, emit_chunk_attention
    from pi2.backends.kernels.kv import emit_append, emit_rope, make_cache
    from pi2.backends.kernels.mixing_arithmetic import take_room
    from pi2.backends.kernels.schedule import Schedule

    kv, kv_heads = spec.kv, spec.attention.kv_heads

    def emit(take: Any) -> None:
        tokens, position = take.take_number("tokens"), take.take_number("position")
        context = take.take_number("context")
        qkv, cosines, sines = (take.take_array(name, "float32") for name in ("qkv", "cos", "sin"))
        keys, values = (take.take_array(name, KV_DTYPES[kv]) for name in ("keys", "values"))
        scales = None
        if kv == "int8":
            scales = (take.take_array("a", "float16"), take.take_array("b", "float16"))
        sums, tops, totals = (take.take_array(name, "float32") for name in ("s", "p", "t"))
        output = take.take_array("output", "float32")
        codes, room = take.take_array("codes", "int8"), take_room(take, spec)
        cache = make_cache(spec, keys, values, scales, context, T.min(tokens, 1))
        with T.serial(tokens) as token:
            emit_rope(spec, qkv, (cosines, sines), cache.once, token, position + token)
            emit_append(spec, qkv, cache, token, position + token)
        with T.If(tokens == 1):
            with T.Then():
                spans = attention.divide_blocks(spec, position, sums, tops, totals)
                with T.parallel(spans.count * kv_heads) as task:
                    span, head = T.floormod(task, spans.count), T.floordiv(task, spans.count)
                    attending = attention.Attending(spec, qkv, cache)
                    attention.emit_span_attention(attending, spans, position, span, head)
                attention.emit_merge(spec, spans, cache, output)
            with T.Else():
                chunk = Chunk(
                    schedule=Schedule(spec, spec.isa), qkv=qkv, cache=cache, output=output,
                    codes=codes, tokens=tokens, position=position, sinks=None, room=room,
                )  # fmt: skip
                emit_chunk_attention(chunk)

    return emit


def make_small_spec(
    heads: int, kv_heads: int, head_dim: int, window: int | None, kv: KvType, isa: str,
    chunk_planes: int = 2,
) -> KernelSpec:  # fmt: skip
    """Attention alone, for a schedule."""
    return make_spec(
        hidden=heads * head_dim, heads=heads, kv_heads=kv_heads, head_dim=head_dim, window=window,
        kv=kv, chunk_planes=chunk_planes, features=tuple(sorted(X86_FEATURES[isa])),
    )  # fmt: skip


def make_room(spec: KernelSpec) -> list[Any]:
    """Codes of queries and where threads mix for several tokens, up to `MOST_TOKENS`."""
    codes = allocate("int8", MOST_TOKENS, spec.most_planes, spec.attention.stored_query)
    return [codes, *allocate_mixing_room(spec)]


def attend_plainly(
    query: F64, key: F64, value: F64, cosines: F64, sines: F64, window: int | None,
    kv: KvType = "fp16",
) -> F64:  # fmt: skip
    """Attention of all tokens in float64; keys and values rounded to the cache's type."""

    def keep(x: F64) -> F64:
        if kv == "fp32":
            return x
        if kv == "fp16":
            return x.astype(np.float16).astype(np.float64)
        codes, scales = quantize_kv(x.astype(np.float32))
        return codes.astype(np.float64) * scales[..., None]

    def rotate(x: F64) -> F64:
        half = x.shape[-1] // 2
        first, second = x[..., :half], x[..., half:]
        cos, sin = cosines[:, None], sines[:, None]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    tokens, heads, size = query.shape
    group = heads // key.shape[1]
    query = rotate(query)
    key, value = keep(rotate(key)), keep(value)
    result = np.empty_like(query)
    for start in range(0, tokens, ROWS_TOGETHER):
        now = np.arange(start, min(start + ROWS_TOGETHER, tokens))[:, None]
        # Tokens that one of them sees.
        begin, end = max(0, start + 1 - (window or tokens)), start + len(now)
        seen = np.arange(begin, end)[None]
        hidden = (seen > now) | (seen <= now - (window or tokens))
        for head in range(heads):
            own = slice(begin, end), head // group
            shares = query[start:end, head] / np.sqrt(size) @ key[own].T
            np.copyto(shares, -np.inf, where=hidden)
            shares -= shares.max(-1, keepdims=True)
            np.exp(shares, out=shares)
            result[start:end, head] = shares @ value[own] / shares.sum(-1, keepdims=True)
    return result


@settings(max_examples=12)
@given(
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 4, 5, 7]),
    head_dim=st.sampled_from([32, 64, 96, 128]),
    window=st.sampled_from([None, 1, 7, 16, 40]),
    chunks=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    kv=st.sampled_from(["fp32", "fp16", "int8"]),
    rope=st.sampled_from(
        [
            Rope(),
            Rope(kind="linear", factor=4.0),
            Rope(kind="llama3", factor=8.0, original_context=16),
        ]
    ),
    isa=st.sampled_from(list_runnable_isas()),
    seed=st.integers(0, 2**32 - 1),
)
def test_attention_in_any_chunks_is_that_of_the_whole_sequence(
    kv_heads: int, group: int, head_dim: int, window: int | None, chunks: list[int], kv: KvType,
    rope: Rope, isa: str, seed: int,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    tokens, heads, context = sum(chunks), kv_heads * group, 112
    rows = (heads + 2 * kv_heads) * head_dim
    qkv = rng.standard_normal((tokens, rows)).astype(np.float32)
    # The cache holds whatever an earlier sequence left: nothing of it may be seen.
    cache = make_arrays(context, kv_heads, head_dim, kv, left=100)
    spans = make_spans(heads, head_dim)
    cosines, sines = (allocate("float32", context, head_dim // 2) for _ in range(2))
    cosines[:], sines[:] = compute_rope_tables(rope, head_dim, context)
    spec = make_small_spec(heads, kv_heads, head_dim, window, kv, isa)
    room, kernel = make_room(spec), compile_kernel(make_attention(spec), make_isa(isa))
    parts, position = [], 0
    for number in chunks:
        part = allocate("float32", number, rows)
        part[:] = qkv[position : position + number]
        output = allocate("float32", number, heads * head_dim)
        kernel(number, position, context, part, cosines, sines, *cache, *spans, output, *room)
        parts.append(output)
        position += number
    shaped = qkv.astype(np.float64).reshape(tokens, -1, head_dim)
    expected = attend_plainly(
        shaped[:, :heads], shaped[:, heads : heads + kv_heads], shaped[:, heads + kv_heads :],
        cosines[:tokens].astype(np.float64), sines[:tokens].astype(np.float64), window, kv,
    )  # fmt: skip
    # A few keys and values are rounded to the other side: half of a type's last place.
    limit = {"fp32": 3e-6, "fp16": 1e-3, "int8": 1e-2}[kv]
    assert measure_error(np.concatenate(parts), expected.reshape(tokens, -1)) < limit


def make_arrays(context: int, kv_heads: int, head_dim: int, kv: KvType, left: int = 0) -> list[Any]:
    """Keys, values and, for int8, their scales, all ``left`` by an earlier sequence."""
    size = context * kv_heads
    cache = [allocate(KV_DTYPES[kv], size * head_dim) for _ in range(2)]
    if kv == "int8":
        cache += [allocate("float16", size) for _ in range(2)]
    for array in cache:
        array[:] = left
    return cache


def make_spans(heads: int, head_dim: int) -> list[Any]:
    """Room for the sums of every span."""
    shapes: tuple[tuple[int, ...], ...] = ((head_dim,), (), ())
    return [allocate("float32", heads, SPANS, *shape) for shape in shapes]


@pytest.mark.parametrize("kv", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize(
    ("position", "window"),
    [(254, None), (255, None), (256, None), (700, None), (4094, None), (4094, 3000), (4600, 3000)],
)
def test_a_long_context_is_attended_in_spans(kv: KvType, position: int, window: int | None) -> None:
    rng = np.random.default_rng(position)
    heads, kv_heads, head_dim, context = 5, 1, 32, 4608
    rows = (heads + 2) * head_dim
    cosines, sines = (allocate("float32", context, head_dim // 2) for _ in range(2))
    cosines[:] = 1
    isa = list_runnable_isas()[-1]
    spec = make_small_spec(heads, kv_heads, head_dim, window, kv, isa)
    room, kernel = make_room(spec), compile_kernel(make_attention(spec), make_isa(isa))
    cache, spans = make_arrays(context, 1, head_dim, kv), make_spans(heads, head_dim)
    qkv = allocate("float32", position + 1, rows)
    qkv[:] = 2 * rng.standard_normal((position + 1, rows))
    before = qkv.astype(np.float64).reshape(position + 1, -1, head_dim)
    output = allocate("float32", position, heads * head_dim)
    kernel(position, 0, context, qkv[:position], cosines, sines, *cache, *spans, output, *room)
    last, together = allocate("float32", 1, rows), allocate("float32", 1, heads * head_dim)
    last[:] = qkv[position:]
    kernel(1, position, context, last, cosines, sines, *cache, *spans, together, *room)
    turn = np.ones((position + 1, head_dim // 2))
    expected = attend_plainly(
        before[:, :heads], before[:, 5:6], before[:, 6:], turn, 0 * turn, window, kv
    )
    limit = 1e-5 if kv == "fp32" else 2e-3
    assert measure_error(together, expected[-1].reshape(1, -1)) < limit
    assert measure_error(output, expected[:-1].reshape(position, -1)) < limit


def test_scores_far_apart_stay_finite() -> None:
    heads, head_dim, context = 2, 32, 32
    isa = list_runnable_isas()[-1]
    spec = make_small_spec(heads, 1, head_dim, None, "fp16", isa)
    room, kernel = make_room(spec), compile_kernel(make_attention(spec), make_isa(isa))
    qkv = allocate("float32", 20, (heads + 2) * head_dim)
    qkv[:, : heads * head_dim] = 100
    qkv[:, heads * head_dim : -head_dim] = np.where(np.arange(20) % 2, 100, -100)[:, None]
    qkv[:, -head_dim:] = np.arange(20)[:, None]
    cosines, sines = allocate("float32", context, 16), allocate("float32", context, 16)
    cosines[:] = 1
    cache, spans = make_arrays(context, 1, head_dim, "fp16"), make_spans(heads, head_dim)
    output = allocate("float32", 20, heads * head_dim)
    kernel(20, 0, context, qkv, cosines, sines, *cache, *spans, output, *room)
    # Odd tokens have equal, huge scores: the last token sees the mean of theirs.
    assert np.allclose(output[19], np.arange(1, 20, 2).mean(), rtol=1e-6)
    assert np.allclose(output[0], 0, atol=1e-6)


@pytest.mark.parametrize("kv", ["fp32", "int8"])
@pytest.mark.parametrize("isa", list_runnable_isas()[-2:])
@pytest.mark.parametrize("window", [None, 50])
def test_how_a_prompt_is_cut_into_chunks_changes_no_bit(
    kv: KvType, isa: str, window: int | None
) -> None:
    rng = np.random.default_rng(3)
    heads, kv_heads, head_dim, tokens = 6, 2, 48, 200
    spec = make_small_spec(heads, kv_heads, head_dim, window, kv, isa)
    kernel = compile_kernel(make_attention(spec), make_isa(isa))
    qkv = rng.standard_normal((tokens, spec.attention.projected)).astype(np.float32)
    cosines, sines = (allocate("float32", 208, head_dim // 2) for _ in range(2))
    cosines[:] = 1
    outputs = []
    for chunks, left in (((200,), 0), ((64, 136), 9), ((2, 17, 45, 130, 6), 100)):
        cache, spans = make_arrays(208, kv_heads, head_dim, kv, left), make_spans(heads, head_dim)
        room, parts, position = make_room(spec), [], 0
        for number in chunks:
            part = allocate("float32", number, spec.attention.projected)
            part[:] = qkv[position : position + number]
            output = allocate("float32", number, heads * head_dim)
            kernel(number, position, 208, part, cosines, sines, *cache, *spans, output, *room)
            parts.append(output)
            position += number
        outputs.append(np.concatenate(parts))
    assert np.array_equal(outputs[0], outputs[1]) and np.array_equal(outputs[0], outputs[2])


@pytest.mark.skipif("avx512vnni" not in list_runnable_isas(), reason="needs AVX-512 VNNI")
@pytest.mark.parametrize(("chunk_planes", "limit"), [(4, 3e-6), (2, 3e-4), (1, 3e-4)])
def test_queries_and_shares_of_int8_keys_are_rounded_unless_the_plan_rounds_nothing(
    chunk_planes: int, limit: float
) -> None:
    rng = np.random.default_rng(5)
    heads, head_dim, tokens = 4, 64, 300
    spec = make_small_spec(heads, 1, head_dim, None, "int8", "avx512vnni", chunk_planes)
    kernel = compile_kernel(make_attention(spec), make_isa("avx512vnni"))
    qkv = allocate("float32", tokens, spec.attention.projected)
    qkv[:] = rng.standard_normal(qkv.shape)
    before = qkv.astype(np.float64).reshape(tokens, -1, head_dim)
    cosines, sines = (allocate("float32", 304, head_dim // 2) for _ in range(2))
    cosines[:] = 1
    cache, spans = make_arrays(304, 1, head_dim, "int8"), make_spans(heads, head_dim)
    output = allocate("float32", tokens, heads * head_dim)
    kernel(tokens, 0, 304, qkv, cosines, sines, *cache, *spans, output, *make_room(spec))
    turn = np.ones((tokens, head_dim // 2))
    expected = attend_plainly(
        before[:, :heads], before[:, 4:5], before[:, 5:], turn, 0 * turn, None, "int8"
    )
    error = measure_error(output, expected.reshape(tokens, -1))
    assert error < limit
    assert chunk_planes == 4 or error > limit / 100
