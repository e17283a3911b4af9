"""Attention and norms on GPUs against numpy, over odd shapes."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pi2.arrays import F16, F32, I8, I32
from pi2.backends.gpu.kernels.attention import list_attention_kernels
from pi2.backends.gpu.kernels.routing import list_norm_kernels
from pi2.backends.gpu.kernels.specification import AttentionKernels, NormKernels
from pi2.backends.gpu.launchers.interface import Launcher
from pi2.plan.documents.model_parts import Norm
from tests.helpers.goldens import measure_error
from tests.helpers.gpu import Bench

CLOSE = 3e-6
CONTEXT, SEQUENCES = 300, 2
GROWTH = (1 + np.arange(CONTEXT) // 7 / 30).astype(np.float32)


def normalize(
    norm: Norm, x: F32, weight: F32, bias: F32 | None = None, width: int | None = None
) -> F32:
    """RMSNorm or LayerNorm over the last axis, or its first ``width`` elements: ``weight`` and
    ``bias`` are zero beyond."""
    if norm.kind == "layernorm":
        x = x - np.mean(x[..., :width], axis=-1, keepdims=True)
    mean_square = np.mean(np.square(x[..., :width]), axis=-1, keepdims=True)
    result = x / np.sqrt(mean_square + np.float32(norm.epsilon)) * weight
    return np.asarray(result if bias is None else result + bias)


def cap(x: F32, limit: float | None) -> F32:
    """Soft cap: limit * tanh(x / limit), or x as it is."""
    return x if limit is None else np.asarray(np.float32(limit) * np.tanh(x / np.float32(limit)))


def rotate(x: F32, cosines: F32, sines: F32) -> F32:
    """Rotate the halves of each head: x [T, heads, d], cosines and sines [T, d / 2]."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = cosines[:, None, :], sines[:, None, :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def quantize_kv(x: F32) -> tuple[I8, F16]:
    """int8 codes and fp16 scales (largest magnitude / 127) of vectors [..., head_dim]."""
    scales = (np.abs(x).max(-1) * np.float32(1 / 127)).astype(np.float16)
    kept = scales.astype(np.float32)[..., None]
    factor = np.divide(np.float32(1), kept, out=np.zeros_like(kept), where=kept > 0)
    return np.clip(np.rint(x * factor), -127, 127).astype(np.int8), scales


def round_kv(attention: AttentionKernels, x: F32) -> F32:
    """What is left of keys or values that were kept."""
    if attention.kv == "fp16":
        return x.astype(np.float16).astype(np.float32)
    if attention.kv == "int8":
        codes, scales = quantize_kv(x)
        return codes.astype(np.float32) * scales[..., None].astype(np.float32)
    return x


def compute_attention(
    attention: AttentionKernels, qkv: F32, norms: F32, tables: tuple[F32, F32], positions: I32,
    sinks: F32,
) -> F32:  # fmt: skip
    """Outputs [T, heads * head_dim] of one sequence whose tokens are all given."""
    heads, kv_heads, size = attention.heads, attention.kv_heads, attention.head_dim
    vectors = qkv.reshape(len(qkv), -1, size)
    query, key, value = np.split(vectors, [heads, heads + kv_heads], axis=1)
    if attention.head_norm:
        norm = Norm(kind="rmsnorm", epsilon=attention.epsilon)
    if attention.head_norm and not attention.norm_after:
        query, key = normalize(norm, query, norms[0]), normalize(norm, key, norms[1])
    cosines, sines = (table[positions] for table in tables)
    query, key = rotate(query, cosines, sines), rotate(key, cosines, sines)
    if attention.head_norm and attention.norm_after:
        query, key = normalize(norm, query, norms[0]), normalize(norm, key, norms[1])
    if attention.growth:
        query = query * GROWTH[positions][:, None, None]
    key, value = round_kv(attention, key), round_kv(attention, value)
    visible = positions[None, :] <= positions[:, None]
    if attention.window is not None and attention.chunked:
        own = positions // attention.window
        visible &= own[None, :] == own[:, None]
    elif attention.window is not None:
        visible &= positions[None, :] > positions[:, None] - attention.window
    outputs = np.empty((len(qkv), heads, size))
    for head in range(heads):
        kv_head = head * kv_heads // heads
        scores = query[:, head].astype(np.float64) @ key[:, kv_head].T * attention.scale
        scores = cap(scores.astype(np.float32), attention.score_cap).astype(np.float64)
        top = scores.max(-1, keepdims=True)
        weights = np.exp(np.where(visible, scores, -np.inf) - top)
        total = weights.sum(-1, keepdims=True)
        if attention.sinks:
            total = total + np.exp(sinks[head].astype(np.float64) - top)
        outputs[:, head] = weights / total @ value[:, kv_head]
    return outputs.reshape(len(qkv), -1).astype(np.float32)


@pytest.mark.parametrize(
    "attention",
    [
        AttentionKernels(heads=3, kv_heads=1, head_dim=20, scale=0.3, kv="fp32", window=70),
        AttentionKernels(
            heads=4, kv_heads=2, head_dim=64, scale=0.125, kv="fp16", head_norm=True, epsilon=1e-6
        ),
        AttentionKernels(
            heads=2, kv_heads=2, head_dim=256, scale=0.06, kv="fp32", score_cap=2.0, sinks=True
        ),
        AttentionKernels(heads=2, kv_heads=1, head_dim=96, scale=0.1, kv="int8"),
        AttentionKernels(
            heads=4, kv_heads=2, head_dim=32, scale=0.2, kv="fp32", window=70, chunked=True,
            head_norm=True, epsilon=1e-5, norm_after=True, growth=True,
        ),
    ],
    ids=lambda attention: f"{attention.kv}-{attention.head_dim}",
)  # fmt: skip
def test_attention_of_chunks_and_steps(launcher: Launcher, attention: AttentionKernels) -> None:
    random = np.random.default_rng(attention.head_dim)
    bench = Bench(launcher, list(list_attention_kernels(attention)))
    total = 260
    rows = (attention.heads + 2 * attention.kv_heads) * attention.head_dim
    angles = random.random((CONTEXT, attention.head_dim // 2)) * 6
    # Such as YaRN's make vectors longer, which a norm behind them undoes.
    length = 1.25 if attention.norm_after else 1.0
    cosines, sines = length * np.cos(angles), length * np.sin(angles)
    tables = (cosines.astype(np.float32), sines.astype(np.float32))
    norms = (1 + random.random((2, attention.head_dim))).astype(np.float32)
    qkv = random.standard_normal((total, rows)).astype(np.float32)
    positions = np.arange(total, dtype=np.int32)
    sinks = (3 * random.standard_normal(attention.heads)).astype(np.float32)
    wanted = compute_attention(attention, qkv, norms, tables, positions, sinks)
    vectors = SEQUENCES * attention.kv_heads * CONTEXT
    arrays: dict[str, npt.NDArray[Any]] = {
        "sinks": sinks, "query_norm": norms[0], "key_norm": norms[1], "growth": GROWTH,
        "cosines": tables[0], "sines": tables[1],
        "keys": np.zeros((vectors, attention.row_words), np.uint32),
        "values": np.zeros((vectors, attention.row_words), np.uint32),
        "keys_scales": np.zeros(vectors, np.float32),
        "values_scales": np.zeros(vectors, np.float32),
    }  # fmt: skip
    # A chunk, one token, and a chunk again, all of the second sequence.
    for first, count, spans in ((0, 150, 1), (150, 1, 3), (151, 109, 2)):
        arrays["qkv"] = qkv[first : first + count]
        arrays["places"] = np.stack([np.ones(count, np.int32), positions[first : first + count]], 1)
        numbers = {"context": CONTEXT, "tokens": count, "spans": spans}
        arrays |= bench.run("keep_0", arrays, numbers)
        for kept in (arrays["keys"], arrays["values"]):
            of_sequences = kept.reshape(SEQUENCES, attention.kv_heads, CONTEXT, -1)
            assert not of_sequences[0].any() and not of_sequences[1, :, first + count :].any()
        shape = (spans, count, attention.heads)
        arrays["partials"] = np.empty((*shape, attention.head_dim), np.float32)
        arrays["tops"] = np.empty((*shape, 2), np.float32)
        arrays |= bench.run("attend_0", arrays, numbers)
        arrays["mixed"] = np.full((count, attention.width), 7, np.float32)
        mixed = bench.run("mix_0", arrays, numbers)["mixed"]
        used = attention.heads * attention.head_dim
        # One code of int8, or one step of fp16, that rounds the other way.
        allowed = {"fp32": CLOSE, "fp16": 3e-4, "int8": 3e-3}[attention.kv]
        assert measure_error(mixed[:, :used], wanted[first : first + count]) < allowed
        assert not mixed[:, used:].any()


@pytest.mark.parametrize(
    "norm",
    [
        NormKernels(length=288, width=288, norm=Norm(outputs=True), residual_factor=0.5),
        NormKernels(length=320, width=300, norm=Norm(epsilon=1e-3, kind="layernorm", bias=True)),
    ],
    ids=lambda norm: norm.norm.kind,
)
def test_norms_and_sums(launcher: Launcher, norm: NormKernels) -> None:
    random = np.random.default_rng(1)
    x, y = (random.standard_normal((5, norm.length)).astype(np.float32) for _ in range(2))
    weights, biases = (random.standard_normal(norm.length).astype(np.float32) for _ in range(2))
    for array in (weights, biases):
        array[norm.width :] = 0
    x[:, norm.width :] = 0
    bench = Bench(launcher, list(list_norm_kernels(norm)))
    arrays = {"x": x, "y": y, "weights": weights, "biases": biases, "outputs": np.empty_like(x)}
    document = norm.norm
    own_biases = biases if norm.norm.bias else None
    found = bench.run("norm", arrays, {"first": 0, "tokens": 5})["outputs"]
    assert measure_error(found, normalize(document, x, weights, own_biases, norm.width)) < CLOSE
    if norm.norm.outputs:
        found = bench.run("add_norm", arrays, {"tokens": 5})["x"]
        added = normalize(document, y, weights, own_biases, norm.width)
    else:
        found = bench.run("add", arrays, {"tokens": 5})["x"]
        added = y
    assert measure_error(found, x + np.float32(norm.residual_factor) * added) < CLOSE
