"""The reference backend: numpy in float32, straight from the store's bytes.

It is the truth that every kernel is tested against, so it is written to be read: weights are
dequantised where they are used, activations are never quantised, and nothing is fused.  Keys and
values are kept in the plan's type.
"""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from pi2.backends.protocol import BuildRequest, Tensor
from pi2.backends.rope import compute_rope_tables
from pi2.plan.model import Model
from pi2.plan.packing import dequantize, unpack_bundles
from pi2.plan.sizes import LOGIT_ROWS
from pi2.plan.tensor_names import EMBEDDING, FINAL_NORM, HEAD, name_layer_tensor

NAME = "reference"

_F32 = npt.NDArray[np.float32]


def find_obstacles(features: frozenset[str], architecture: str) -> list[str]:
    """Return nothing: numpy runs everywhere."""
    return []


def build(request: BuildRequest) -> ReferenceExecutor:
    """Make the executor; nothing is compiled."""
    return ReferenceExecutor(request)


def activate(model: Model, gate: _F32, up: _F32) -> _F32:
    """Apply the model's FFN activation: float32 arrays of equal shape -> the same shape."""
    match model.ffn.activation:
        case "relu":
            return np.maximum(gate, 0) * up
        case "drelu":
            return np.maximum(gate, 0) * np.maximum(up, 0)
        case "fatrelu":
            return np.where(gate > model.ffn.threshold, gate, 0) * up
        case "relu2":
            return np.square(np.maximum(gate, 0)) * up
        case "silu":
            return np.asarray(gate / (1 + np.exp(-gate)) * up)


def normalize(x: _F32, weight: _F32, epsilon: float) -> _F32:
    """RMSNorm over the last axis: x / sqrt(mean(x^2) + epsilon) * weight."""
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
    return np.asarray(x / np.sqrt(mean_square + np.float32(epsilon)) * weight)


def rotate(x: _F32, cosines: _F32, sines: _F32) -> _F32:
    """Rotate the halves of each head: x [T, heads, d], cosines and sines [T, d / 2]."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = cosines[:, None, :], sines[:, None, :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def quantize_kv(x: _F32) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]]:
    """int8 codes and fp16 scales [...] of vectors [..., head_dim], as the KV cache keeps them.

    The scale is the largest magnitude / 127, rounded; vectors too small for one become zeros.
    """
    scales = (np.abs(x).max(-1) * np.float32(1 / 127)).astype(np.float16)
    kept = scales.astype(np.float32)[..., None]
    factor = np.divide(np.float32(1), kept, out=np.zeros_like(kept), where=kept > 0)
    return np.clip(np.rint(x * factor), -127, 127).astype(np.int8), scales


class KvCache:
    """Keys (0) and values (1) of all layers, in the plan's type."""

    def __init__(self, request: BuildRequest) -> None:
        shape = request.model.shape
        self._int8 = request.kv_type == "int8"
        vectors = (2, shape.layers, request.context, shape.kv_heads)
        count, size = int(np.prod(vectors)), shape.head_dim
        raw = request.allocate("kv", count * size * (1 if self._int8 else 2))
        self._elements = raw.view(np.int8 if self._int8 else np.float16).reshape(*vectors, size)
        if self._int8:
            self._scales = request.allocate("kv", count * 2).view(np.float16).reshape(vectors)

    def keep(self, kind: int, layer: int, position: int, x: _F32) -> None:
        """Keep ``x`` [T, kv_heads, head_dim] of the tokens from ``position`` on."""
        place = (kind, layer, slice(position, position + len(x)))
        if self._int8:
            self._elements[place], self._scales[place] = quantize_kv(x)
        else:
            self._elements[place] = x

    def read(self, kind: int, layer: int, end: int) -> _F32:
        """What is kept of the tokens before ``end``: float32 [end, kv_heads, head_dim]."""
        found = self._elements[kind, layer, :end].astype(np.float32)
        if self._int8:
            found *= self._scales[kind, layer, :end, :, None].astype(np.float32)
        return found


class ReferenceExecutor:
    """Executor of `pi2.backends.protocol` in numpy."""

    def __init__(self, request: BuildRequest) -> None:
        self._request = request
        self._model = request.model
        shape = self._model.shape
        self._kv = KvCache(request)
        self._cosines, self._sines = compute_rope_tables(
            self._model.rope, shape.head_dim, request.context
        )
        self._x = np.zeros((0, shape.hidden), np.float32)
        self._u = self._x
        self._y = self._x
        self._active = 0

    def _matrix(self, name: str) -> _F32:
        tensor: Tensor = self._request.tensors[name]
        if tensor.precision is None:
            return tensor.weights.reshape(tensor.rows, tensor.length).astype(np.float32)
        weights = np.asarray(tensor.weights).view(np.uint8)
        return dequantize(weights, tensor.scales, tensor.length, tensor.precision)

    def _layer(self, layer: int, kind: str) -> _F32:
        return self._matrix(name_layer_tensor(layer, kind))

    def embed(self, tokens: npt.NDArray[np.int32]) -> None:
        tensor = self._request.tensors[EMBEDDING]
        assert tensor.precision is not None
        weights = np.asarray(tensor.weights).view(np.uint8)[tokens]
        scales = None if tensor.scales is None else tensor.scales[tokens]
        self._x = dequantize(weights, scales, tensor.length, tensor.precision)

    def attend(self, layer: int, position: int) -> None:
        shape = self._model.shape
        count = len(self._x)
        norm = self._layer(layer, "attention_norm")
        qkv = normalize(self._x, norm, self._model.norm.epsilon) @ self._layer(layer, "qkv").T
        if self._model.attention.qkv_bias:
            qkv = qkv + self._layer(layer, "qkv_bias")
        query_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        query, key, value = np.split(qkv, [query_width, query_width + kv_width], axis=-1)
        end = position + count
        cos, sin = self._cosines[position:end], self._sines[position:end]
        query = rotate(query.reshape(count, shape.heads, shape.head_dim), cos, sin)
        key = rotate(key.reshape(count, shape.kv_heads, shape.head_dim), cos, sin)
        self._kv.keep(0, layer, position, key)
        self._kv.keep(1, layer, position, value.reshape(count, shape.kv_heads, shape.head_dim))
        keys, values = self._kv.read(0, layer, end), self._kv.read(1, layer, end)

        seen = np.arange(end)[None, :]
        now = np.arange(position, end)[:, None]
        visible = seen <= now
        if self._model.attention.sliding_window is not None:
            visible &= seen > now - self._model.attention.sliding_window
        mixed = np.empty((count, shape.heads, shape.head_dim), np.float32)
        for head in range(shape.heads):
            kv_head = head * shape.kv_heads // shape.heads
            scores = query[:, head] @ keys[:, kv_head].T
            scores = np.where(visible, scores / np.sqrt(np.float32(shape.head_dim)), -np.inf)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            mixed[:, head] = weights @ values[:, kv_head]
        self._x = self._x + mixed.reshape(count, query_width) @ self._layer(layer, "output").T

    def begin_ffn(self, layer: int) -> None:
        self._u = normalize(self._x, self._layer(layer, "ffn_norm"), self._model.norm.epsilon)
        self._y = np.zeros_like(self._x)

    def predict_low_rank(self, layer: int, threshold: float) -> npt.NDArray[np.int32]:
        inner = np.maximum(self._layer(layer, "predictor_in") @ self._u[0], 0)
        score = self._layer(layer, "predictor_out") @ inner
        score += self._layer(layer, "predictor_bias")[0]
        return np.flatnonzero(score >= threshold).astype(np.int32)

    def predict_gate(self, layer: int) -> npt.NDArray[np.int32]:
        assert self._request.gate_rows is not None
        weights, scales = self._request.gate_rows[layer]
        layout = self._request.bundle
        gate = dequantize(weights, scales, layout.hidden, layout.precision) @ self._u[0]
        threshold = self._model.ffn.threshold if self._model.ffn.activation == "fatrelu" else 0.0
        return np.flatnonzero(gate > threshold).astype(np.int32)

    def add_neurons(
        self, layer: int, arena: npt.NDArray[np.uint8], slots: npt.NDArray[np.int32]
    ) -> None:
        gate, up, down = unpack_bundles(arena[slots], self._request.bundle)
        active = activate(self._model, self._u @ gate.T, self._u @ up.T)
        self._active += int(np.count_nonzero(active))
        self._y = self._y + active @ down

    def add_dense(self, layer: int, bundles: npt.NDArray[np.uint8]) -> None:
        gate, up, down = unpack_bundles(bundles, self._request.bundle)
        self._y = self._y + activate(self._model, self._u @ gate.T, self._u @ up.T) @ down

    def end_ffn(self, layer: int) -> None:
        self._x = self._x + self._y

    def logits(self, first: int) -> _F32:
        norm = self._matrix(FINAL_NORM)
        head = EMBEDDING if self._model.tied_head else HEAD
        x = self._x[first : first + LOGIT_ROWS]
        return normalize(x, norm, self._model.norm.epsilon) @ self._matrix(head).T

    def count_active(self) -> int:
        active, self._active = self._active, 0
        return active

    def read_bundles(
        self,
        fd: int,
        arena: npt.NDArray[np.uint8],
        slots: npt.NDArray[np.int32],
        offsets: npt.NDArray[np.int64],
        results: npt.NDArray[np.int64],
        start: int,
        step: int,
    ) -> None:
        for i in range(start, len(slots), step):
            try:
                results[i] = os.preadv(fd, [arena[slots[i]].data], int(offsets[i]))
            except OSError:
                results[i] = -1

    def close(self) -> None:
        self._x = self._u = self._y = np.zeros((0, 0), np.float32)
