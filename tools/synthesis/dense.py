"""Dense tensors of a synthetic model: embedding, attention, predictors, norms, head."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from pi2.arrays import F32
from pi2.formats import find_packing
from pi2.model.tensor import EMBEDDING as EMBEDDING_NAME
from pi2.model.tensor import (
    FINAL_NORM,
    FINAL_NORM_BIAS,
    HEAD,
    HEAD_BIAS,
    POSITIONS,
    DenseTensor,
    split_mixer_kind,
)
from pi2.plan.weights.layout import Precision
from pi2.store.writer import TensorPieces
from synthesis.blueprint import ATTENTION, CONSTANT, NORM, OUTPUT_SHARE, RANDOM, STREAM, Blueprint
from synthesis.neurons import (
    CHUNK_WEIGHTS,
    count_chunks,
    draw_vectors,
    find_gate_biases,
    locate_chunk,
)
from synthesis.randomness import draw_normals, draw_signs

_NEXT_LOGIT = 12.0
_TIED_LOGIT_DEVIATION = 4.0
_BIAS_DEVIATION = 0.1
_PROJECTIONS = {
    "qkv": 0,
    "output": 1,
    "state_in": 0,
    "state_output": 1,
    "latent_query_out": 4,
    "latent_key": 5,
    "latent_value": 6,
    "side_in": 7,
    "side_down": 8,
    "state_parts": 9,
    "state_steps": 10,
    "state_decays": 11,
    "state_output_gates": 12,
}
"""Numbers of projections' random streams; 2 are biases, 3 gates, and 20 more are those of a layer's
second state."""
_INNER_STREAMS = 20
_ONES = ("shared_router", "layer_scale", "expert_scale", "state_skip")
"""Tensors that are ones as norms are."""
_ZEROS = ("sinks", "state_step")
"""Tensors that are zeros as biases are."""


def make_tensor(blueprint: Blueprint, tensor: DenseTensor) -> TensorPieces:
    """Rows of ``tensor`` in pieces, as `pi2.store.writer.StoreWriter.write_dense` wants them."""
    if tensor.name == EMBEDDING_NAME:
        return _quantize(tensor, lambda first, count: _make_embedding(blueprint, first, count))
    if tensor.name == HEAD:
        return _quantize(tensor, lambda first, count: _make_head(blueprint, first, count))
    if tensor.name == FINAL_NORM:
        return [(_make_final_norm(blueprint), None)]
    if tensor.name in (FINAL_NORM_BIAS, HEAD_BIAS):
        return [(np.zeros((1, tensor.length), np.float32), None)]
    if tensor.name == POSITIONS:
        # All alike: what a token adds to the stream decides what fires.
        return _quantize(tensor, lambda _, count: np.zeros((count, tensor.length), np.float32))
    _, number, kind = tensor.name.split(".")
    layer = int(number)
    kind, inner = split_mixer_kind(kind)
    if kind.endswith("_norm") and kind != "router_norm" or kind in _ONES:
        return [(np.ones((1, tensor.length), np.float32), None)]
    if kind.endswith("_bias") and kind not in ("qkv_bias", "predictor_bias") or kind in _ZEROS:
        return [(np.zeros((tensor.rows, tensor.length), np.float32), None)]
    match kind:
        case "router_norm":
            # Routers are drawn for inputs of magnitude 1.
            moe = blueprint.model.moe
            assert moe is not None
            return [(np.full((1, tensor.length), 1 / moe.input_scale, np.float32), None)]
        case "qkv" | "output" | "latent_query_out" | "latent_key" | "latent_value":
            return _draw_projection(blueprint, tensor, layer, kind)
        case "qkv_bias":
            normals = draw_normals((1, tensor.length), *blueprint.key(ATTENTION, layer, 2))
            return [(normals * np.float32(_BIAS_DEVIATION), None)]
        case "state_parts" | "state_steps" | "state_decays" | "state_output_gates":
            return _draw_projection(blueprint, tensor, layer, kind, inner * _INNER_STREAMS)
        case "state_in" | "state_output" | "side_in" | "side_down" | "experts_in" | "experts_out":
            return _draw_projection(blueprint, tensor, layer, kind, inner * _INNER_STREAMS)
        case "state_gates":
            key = blueprint.key(ATTENTION, layer, 3 + inner * _INNER_STREAMS)
            return _quantize(tensor, lambda *rows: _draw_gates(tensor, key, *rows))
        case "state_convolution":
            return [(_make_convolution(tensor.rows, tensor.length), None)]
        case "state_decay":
            # States forget half of what they keep within one to a hundred tokens.
            rates = -np.geomspace(1.0, 0.01, tensor.length, dtype=np.float32)
            return [(np.tile(rates, (tensor.rows, 1)), None)]
        case "predictor_in":
            experts = blueprint.model.expert_count
            rows = make_predictor_in(blueprint, layer, tensor.rows // experts)
            # Experts fire in the same directions; their loadings differ.
            return _quantize(
                tensor, lambda first, count: rows[np.arange(first, first + count) % len(rows)]
            )
        case "predictor_out":
            return _make_predictor_out(blueprint, tensor, layer)
        case "predictor_bias":
            bias = make_predictor_bias(blueprint)
            return [(_group_by_expert(blueprint, bias).reshape(1, -1), None)]
        case "router":
            # Shared experts are not chosen.
            return [(blueprint.draw_router(layer)[: tensor.rows], None)]
    raise AssertionError(tensor.name)


def _draw_gates(tensor: DenseTensor, key: tuple[int, ...], first: int, count: int) -> F32:
    """Rows of magnitude 1."""
    normals = draw_normals((count, tensor.length), *key, first)
    return normals / np.float32(math.sqrt(tensor.length))


def _make_convolution(kernel: int, channels: int) -> F32:
    """Mostly the token itself, float32 [kernel, channels], the oldest first."""
    weights = 0.3 ** np.arange(kernel - 1, -1, -1, dtype=np.float32)
    return np.repeat(weights[:, None], channels, axis=1)


def make_predictor_in(blueprint: Blueprint, layer: int, rank: int) -> F32:
    """fc1 float32 [rank, hidden]: B and -B, so that relu(z) - relu(-z) = z.

    A rank above twice the latents repeats them; with an odd half, or fewer latents than half the
    rank, the loadings are shared out over the repetitions (`make_predictor_out`).
    """
    directions = blueprint.draw_directions(layer) * np.float32(blueprint.direction_scale)
    latents = np.arange(rank // 2) % blueprint.latents
    return np.concatenate([directions[latents], -directions[latents]])


def spread_loadings(loadings: F32, rank: int) -> F32:
    """fc2 float32 [n, rank] that gives A z behind `make_predictor_in`; ``loadings`` is A."""
    latents = np.arange(rank // 2) % loadings.shape[1]
    times = np.bincount(latents, minlength=loadings.shape[1]).astype(np.float32)
    half = (loadings / np.maximum(times, 1))[:, latents]
    return np.concatenate([half, -half], axis=1)


def make_predictor_bias(blueprint: Blueprint) -> F32:
    """Score of every neuron at z = 0, float32 [neurons]: its gate there, and the margin."""
    from_threshold = find_gate_biases(blueprint)
    if blueprint.model.ffn.activation == "fatrelu":
        from_threshold = from_threshold - np.float32(blueprint.model.ffn.threshold)
    return from_threshold + np.float32(blueprint.tuning.margin)


def _make_predictor_out(blueprint: Blueprint, tensor: DenseTensor, layer: int) -> TensorPieces:
    assert tensor.precision != "fp32"
    if blueprint.model.moe is None:
        for chunk in range(count_chunks(blueprint)):
            loadings = _draw_scaled_loadings(blueprint, layer, chunk)
            yield find_packing(tensor.precision).quantize(spread_loadings(loadings, tensor.length))
        return
    chunks = range(count_chunks(blueprint))
    every = np.concatenate([_draw_scaled_loadings(blueprint, layer, chunk) for chunk in chunks])
    for expert in range(blueprint.model.expert_count):
        mine = every[expert :: blueprint.model.expert_count]
        for first, count in _cut_rows(len(mine), tensor.length):
            rows = spread_loadings(mine[first : first + count], tensor.length)
            yield find_packing(tensor.precision).quantize(rows)


def _draw_scaled_loadings(blueprint: Blueprint, layer: int, chunk: int) -> F32:
    """A of a chunk's neurons, of length 1 each."""
    _, count = locate_chunk(blueprint, chunk)
    loadings, lengths = blueprint.draw_loadings(layer, chunk, count)
    return np.asarray(loadings * lengths)


def _group_by_expert(blueprint: Blueprint, values: F32) -> F32:
    """What stored neurons have, [neurons], expert by expert: [experts, ffn]."""
    return np.ascontiguousarray(values.reshape(-1, blueprint.model.expert_count).T)


def _make_embedding(blueprint: Blueprint, first: int, count: int) -> F32:
    parts = blueprint.draw_token_parts(first, count)
    parts *= np.float32(STREAM * RANDOM)
    parts += blueprint.draw_constant() * np.float32(STREAM * CONSTANT)
    return parts


def _make_head(blueprint: Blueprint, first: int, count: int) -> F32:
    """Row t points to what token t - 1 adds to the stream: greedy decoding walks through the
    vocabulary, and so activates other neurons at every step."""
    before = np.empty((count, blueprint.model.shape.hidden), np.float32)
    start = 0
    if first == 0:
        # Nobody is followed by token 0 but the last one.
        before[0] = blueprint.draw_token_parts(blueprint.model.shape.vocab - 1, 1)[0]
        start = 1
    if count > start:
        before[start:] = blueprint.draw_token_parts(first + start - 1, count - start)
    return before * np.float32(_NEXT_LOGIT / (RANDOM * blueprint.model.shape.hidden))


def _make_final_norm(blueprint: Blueprint) -> F32:
    """Ones; random signs where the head is the embedding, or every token would follow itself."""
    hidden = blueprint.model.shape.hidden
    if not blueprint.model.tied_head:
        return np.ones((1, hidden), np.float32)
    signs = draw_signs(hidden, *blueprint.key(NORM))[None, :]
    return np.asarray(signs * np.float32(_TIED_LOGIT_DEVIATION / (STREAM * math.sqrt(hidden))))


def _draw_projection(
    blueprint: Blueprint, tensor: DenseTensor, layer: int, kind: str, first_stream: int = 0
) -> TensorPieces:
    """Query, key and value of magnitude 1; an output that disturbs the stream little."""
    deviation = 1 / math.sqrt(tensor.length)
    if kind in ("output", "state_output"):
        deviation *= STREAM * OUTPUT_SHARE
    precision = _get_precision(tensor)
    for number, (first, count) in enumerate(_cut(tensor)):
        del first
        key = blueprint.key(ATTENTION, layer, first_stream + _PROJECTIONS[kind], number)
        yield draw_vectors(count, tensor.length, precision, deviation, *key)


def _quantize(tensor: DenseTensor, make: Callable[[int, int], F32]) -> TensorPieces:
    for first, count in _cut(tensor):
        yield find_packing(_get_precision(tensor)).quantize(make(first, count))


def _cut(tensor: DenseTensor) -> Iterator[tuple[int, int]]:
    """First row and number of rows of the pieces that a tensor is made in."""
    return _cut_rows(tensor.rows, tensor.length)


def _cut_rows(rows: int, length: int) -> Iterator[tuple[int, int]]:
    size = max(1, CHUNK_WEIGHTS // length)
    for first in range(0, rows, size):
        yield first, min(size, rows - first)


def _get_precision(tensor: DenseTensor) -> Precision:
    assert tensor.precision != "fp32", tensor.name
    return tensor.precision
