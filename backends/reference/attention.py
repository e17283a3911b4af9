"""Attention of the reference backend: rotations, keys and values, and what queries mix."""

from __future__ import annotations

import math

import numpy as np

from pi2.arrays import F32
from pi2.backends.protocol import BuildRequest
from pi2.backends.reference.kv_cache import KvCache
from pi2.backends.reference.operators import (
    cap,
    normalize,
    rotate,
    take_sigmoid,
    take_softplus,
)
from pi2.backends.rope import RopeTables, compute_growth
from pi2.plan.weights.tensor_names import name_layer_tensor


class Attention:
    """Keys and values of all sequences, and the tables of positions."""

    def __init__(self, request: BuildRequest) -> None:
        self._request = request
        self._model = request.model
        self._head_norm = self._model.norm.model_copy(update={"kind": "rmsnorm"})
        self.kept = KvCache(request)
        self._ropes = {}
        for turn, rope in self._model.list_turns().items():
            arrays = np.empty((2, request.context, turn[1] // 2), np.float32)
            self._ropes[turn] = RopeTables(rope, turn[1], (arrays[0], arrays[1]))

    def expect(self, end: int) -> None:
        """Choose the positions of a sequence of ``end`` tokens."""
        for tables in self._ropes.values():
            tables.expect(end)

    def _read(self, layer: int, kind: str) -> F32:
        """A norm of heads, or sinks, float32 [1, length]."""
        tensor = self._request.tensors[name_layer_tensor(layer, kind)]
        return tensor.weights.reshape(tensor.rows, tensor.length).astype(np.float32)

    def _normalize_heads(self, x: F32, layer: int, kind: str) -> F32:
        """Norm of queries or keys [T, heads, head_dim], of each head or of all together."""
        flat = x
        if self._model.attention.head_norm_of == "all":
            flat = x.reshape(len(x), -1)
        return normalize(self._head_norm, flat, self._read(layer, kind)).reshape(x.shape)

    def _turn(self, x: F32, layer: int, kind: str, position: int) -> F32:
        """Queries or keys [T, heads, head_dim] from ``position`` on as attention takes them: with
        their norm, cut and rotated."""
        attention = self._model.attention
        has_norm, is_first = self._model.has_head_norm(layer), attention.head_norm_place == "before"
        if has_norm and is_first:
            x = self._normalize_heads(x, layer, kind)
        if attention.clip is not None:
            x = np.clip(x, -attention.clip, attention.clip)
        rope = self._ropes[self._model.find_turn(layer)]
        cos, sin = (table[position : position + len(x)] for table in rope.arrays)
        x = rotate(x, cos, sin)
        if has_norm and not is_first:
            x = self._normalize_heads(x, layer, kind)
        return x

    def _keep(self, layer: int, key: F32, value: F32, sequence: int, position: int) -> None:
        """Keep keys and values [T, kv_heads, head_dim] of a sequence's tokens from ``position``
        on."""
        attention = self._model.attention
        if attention.value_norm:
            value = normalize(self._head_norm, value, np.ones(1, np.float32))
        if attention.clip is not None:
            value = np.clip(value, -attention.clip, attention.clip)
        key = self._turn(key, layer, "key_norm", position)
        self.kept.keep(sequence, 0, layer, position, key)
        self.kept.keep(sequence, 1, layer, position, value)

    def mix(self, layer: int, qkv: F32, sequence: int, position: int) -> F32:
        """What the queries of ``qkv`` [T, rows] mix of a sequence, keys and values of which are
        kept from ``position`` on."""
        view, attention = self._model.view_layer(layer), self._model.attention
        shape, count = view.shape, len(qkv)
        end = position + count
        kv_width = shape.kv_heads * shape.head_dim if view.has_keys else 0
        keys_end, values_end = shape.query + kv_width, shape.query + 2 * kv_width
        query, key, value, gates = np.split(qkv, [shape.query, keys_end, values_end], axis=-1)
        query = query.reshape(count, shape.heads, shape.head_dim)
        query = self._turn(query, layer, "query_norm", position)
        query = query * compute_growth(self._model, layer, position, end)[:, None, None]
        if view.has_keys:
            each = (count, shape.kv_heads, shape.head_dim)
            self._keep(layer, key.reshape(each), value.reshape(each), sequence, position)
        source = self._model.find_key_layer(layer)
        keys, values = (self.kept.read(sequence, kind, source, end) for kind in (0, 1))

        seen = np.arange(end)[None, :]
        now = np.arange(position, end)[:, None]
        visible = seen <= now
        window = self._model.find_window(layer)
        if window is not None:
            is_chunked = attention.window_kind == "chunked"
            visible &= seen >= now // window * window if is_chunked else seen > now - window
        scale = np.float32(attention.scale or 1 / math.sqrt(shape.head_dim))
        sinks = self._read(layer, "sinks")[0] if attention.sinks else None
        mixed = np.empty((count, shape.heads, shape.head_dim), np.float32)
        for head in range(shape.heads):
            kv_head = head * shape.kv_heads // shape.heads
            scores = query[:, head] @ keys[:, kv_head].T
            scores = cap(scores * scale, attention.softcap)
            scores = np.where(visible, scores, -np.inf)
            top = scores.max(axis=-1, keepdims=True)
            if sinks is not None:
                top = np.maximum(top, sinks[head])
            weights = np.exp(scores - top)
            total = weights.sum(axis=-1, keepdims=True)
            weights /= total if sinks is None else total + np.exp(sinks[head] - top)
            mixed[:, head] = weights @ values[:, kv_head]
        padding = np.zeros((count, shape.stored_query - shape.query), np.float32)
        flat = mixed.reshape(count, -1) * np.float32(attention.value_scale)
        if attention.output_gate:
            is_soft = attention.output_gate_function == "softplus"
            flat = flat * (take_softplus(gates) if is_soft else take_sigmoid(gates))
        return np.concatenate([flat, padding], axis=1)
