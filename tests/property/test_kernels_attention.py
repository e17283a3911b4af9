"""Rotary positions, the KV cache and attention, over head counts, windows and chunk sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from pi2.backends.rope import compute_rope_tables
from pi2.plan.model import Rope
from tests.helpers.kernels import (
    allocate,
    compile_kernel,
    list_runnable_isas,
    make_isa,
    make_spec,
    measure_error,
)

F64 = npt.NDArray[np.float64]


@functools.cache
def make_attention(
    heads: int, kv_heads: int, head_dim: int, window: int | None
) -> Callable[[Any], None]:
    """A kernel (tokens, position, context; qkv, cosines, sines, keys, values, output)."""
    from tvm.tirx.script import builder as T

    from pi2.backends.kernels.attention import Cache, emit_attention, emit_rope

    spec = make_spec(
        hidden=heads * head_dim, heads=heads, kv_heads=kv_heads, head_dim=head_dim, window=window
    )

    def emit(take: Any) -> None:
        tokens, position = take.take_number("tokens"), take.take_number("position")
        context = take.take_number("context")
        qkv, cosines, sines = (take.take_array(name, "float32") for name in ("qkv", "cos", "sin"))
        keys, values = (take.take_array(name, "float16") for name in ("keys", "values"))
        output = take.take_array("output", "float32")
        cache = Cache(keys=keys, values=values, context=context, once=T.min(tokens, 1))
        with T.serial(tokens) as token:
            emit_rope(spec, qkv, cosines, sines, cache, token, position)
        with T.parallel(tokens * kv_heads) as task:
            token, head = T.floormod(task, tokens), T.floordiv(task, tokens)
            emit_attention(spec, qkv, cache, output, token, position, head)

    return emit


def attend_plainly(
    query: F64, key: F64, value: F64, cosines: F64, sines: F64, window: int | None
) -> F64:
    """Attention of all tokens at once in float64; keys and values rounded to fp16."""

    def rotate(x: F64) -> F64:
        half = x.shape[-1] // 2
        first, second = x[..., :half], x[..., half:]
        cos, sin = cosines[:, None], sines[:, None]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    tokens, heads, size = query.shape
    group = heads // key.shape[1]
    query = rotate(query)
    key = rotate(key).astype(np.float16).astype(np.float64)
    value = value.astype(np.float16).astype(np.float64)
    now, seen = np.arange(tokens)[:, None], np.arange(tokens)[None]
    visible = (seen <= now) & (seen > now - (window or tokens))
    result = np.empty_like(query)
    for head in range(heads):
        scores = query[:, head] @ key[:, head // group].T / np.sqrt(size)
        scores = np.where(visible, scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        result[:, head] = shares / shares.sum(-1, keepdims=True) @ value[:, head // group]
    return result


@settings(max_examples=8)
@given(
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 4, 5, 7]),
    head_dim=st.sampled_from([32, 64, 96, 128]),
    window=st.sampled_from([None, 1, 7, 16, 40]),
    chunks=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    rope=st.sampled_from(
        [
            Rope(),
            Rope(kind="linear", factor=4.0),
            Rope(kind="llama3", factor=8.0, original_context=16),
        ]
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_attention_in_any_chunks_is_that_of_the_whole_sequence(
    kv_heads: int,
    group: int,
    head_dim: int,
    window: int | None,
    chunks: list[int],
    rope: Rope,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    tokens, heads, context = sum(chunks), kv_heads * group, 112
    rows = (heads + 2 * kv_heads) * head_dim
    qkv = rng.standard_normal((tokens, rows)).astype(np.float32)
    # The cache holds whatever an earlier sequence left: nothing of it may be seen.
    keys = allocate("float16", context * kv_heads * head_dim)
    values = allocate("float16", context * kv_heads * head_dim)
    keys[:] = 1000
    values[:] = 1000
    cosines, sines = (allocate("float32", context, head_dim // 2) for _ in range(2))
    cosines[:], sines[:] = compute_rope_tables(rope, head_dim, context)
    isa = make_isa(list_runnable_isas()[-1])
    kernel = compile_kernel(make_attention(heads, kv_heads, head_dim, window), isa)
    parts, position = [], 0
    for count in chunks:
        part = allocate("float32", count, rows)
        part[:] = qkv[position : position + count]
        output = allocate("float32", count, heads * head_dim)
        kernel(count, position, context, part, cosines, sines, keys, values, output)
        parts.append(output)
        position += count
    shaped = qkv.astype(np.float64).reshape(tokens, -1, head_dim)
    expected = attend_plainly(
        shaped[:, :heads],
        shaped[:, heads : heads + kv_heads],
        shaped[:, heads + kv_heads :],
        cosines[:tokens].astype(np.float64),
        sines[:tokens].astype(np.float64),
        window,
    )
    # fp16 rounds a few keys and values to the other side: half of its last place.
    assert measure_error(np.concatenate(parts), expected.reshape(tokens, -1)) < 1e-3


def test_scores_far_apart_stay_finite() -> None:
    heads, head_dim, context = 2, 32, 32
    isa = make_isa(list_runnable_isas()[-1])
    kernel = compile_kernel(make_attention(heads, 1, head_dim, None), isa)
    qkv = allocate("float32", 20, (heads + 2) * head_dim)
    qkv[:, : heads * head_dim] = 100
    qkv[:, heads * head_dim : -head_dim] = np.where(np.arange(20) % 2, 100, -100)[:, None]
    qkv[:, -head_dim:] = np.arange(20)[:, None]
    cosines, sines = allocate("float32", context, 16), allocate("float32", context, 16)
    cosines[:] = 1
    keys, values = (allocate("float16", context * head_dim) for _ in range(2))
    output = allocate("float32", 20, heads * head_dim)
    kernel(20, 0, context, qkv, cosines, sines, keys, values, output)
    # Odd tokens have equal, huge scores: the last token sees the mean of theirs.
    assert np.allclose(output[19], np.arange(1, 20, 2).mean(), rtol=1e-6)
    assert np.allclose(output[0], 0, atol=1e-6)
