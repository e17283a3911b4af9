"""Latent attention of the reference backend: queries of what keys are made of, and values of what
they have mixed of it."""

from __future__ import annotations

import math

import numpy as np

from pi2.arrays import F32
from pi2.backends.protocol import BuildRequest, Tensor
from pi2.backends.reference.kv_cache import KvCache
from pi2.backends.reference.operators import normalize, rotate, take_sigmoid
from pi2.backends.rope import RopeTables, compute_growth
from pi2.plan.weights.layout import fill_groups
from pi2.plan.weights.rounding import dequantize
from pi2.plan.weights.tensor_names import name_layer_tensor


class LatentAttention:
    """What all layers keep, and the tables of positions."""

    def __init__(self, request: BuildRequest) -> None:
        self._request = request
        self._model = request.model
        latent = self._model.attention.latent
        assert latent is not None
        self._latent = latent
        self.kept = KvCache(request)
        size = (request.context, latent.rotated // 2)
        arrays = (np.empty(size, np.float32), np.empty(size, np.float32))
        self._rope = RopeTables(self._model.rope, latent.rotated, arrays)

    def expect(self, end: int) -> None:
        """Choose the positions of a sequence of ``end`` tokens."""
        self._rope.expect(end)

    def _read(self, layer: int, kind: str) -> F32:
        tensor: Tensor = self._request.tensors[name_layer_tensor(layer, kind)]
        if tensor.precision is None:
            return tensor.weights.reshape(tensor.rows, tensor.length).astype(np.float32)
        weights = np.asarray(tensor.weights).view(np.uint8)
        return dequantize(weights, tensor.scales, tensor.length, tensor.precision)

    def _normalize(self, layer: int, x: F32, kind: str) -> F32:
        norm = self._model.norm.model_copy(
            update={"kind": "rmsnorm", "epsilon": self._latent.epsilon}
        )
        return normalize(norm, x, self._read(layer, kind)[:, : x.shape[-1]])

    def _find_queries(self, layer: int, made: F32) -> F32:
        """Queries [T, heads, plain + rotated], of what they are made of or as they are."""
        rank, heads = self._latent.query_rank, self._model.shape.heads
        if rank is not None:
            normal = self._normalize(layer, made, "latent_query_norm")
            padding = ((0, 0), (0, fill_groups(rank) - rank))
            made = np.pad(normal, padding) @ self._read(layer, "latent_query_out").T
        return made.reshape(len(made), heads, self._latent.key)

    def mix(self, layer: int, qkv: F32, sequence: int, position: int) -> F32:
        """What the queries of ``qkv`` [T, rows] mix of a sequence, of which is kept what keys and
        values are made of from ``position`` on."""
        shape, latent = self._model.shape, self._latent
        count, end = len(qkv), position + len(qkv)
        gates = shape.heads if self._model.attention.output_gate else 0
        last = qkv.shape[1] - latent.kept
        cuts = [last - gates, last, qkv.shape[1] - latent.rotated]
        made, gate, vector, key = np.split(qkv, cuts, axis=-1)
        cos, sin = (table[position:end] for table in self._rope.arrays)
        query = self._find_queries(layer, made)
        plain, turned = query[..., : latent.plain], rotate(query[..., latent.plain :], cos, sin)
        padding = ((0, 0), (0, 0), (0, fill_groups(latent.plain) - latent.plain))
        by_head = self._read(layer, "latent_key").reshape(shape.heads, latent.rank, -1)
        absorbed = np.einsum("thp,hrp->thr", np.pad(plain, padding), by_head)
        query = np.concatenate([absorbed, turned], axis=-1)
        query = query * compute_growth(self._model, layer, position, end)[:, None, None]
        vector = self._normalize(layer, vector, "latent_norm")
        kept = np.concatenate([vector, rotate(key[:, None], cos, sin)[:, 0]], axis=-1)
        self.kept.keep(sequence, 0, layer, position, kept[:, None])
        keys = self.kept.read(sequence, 0, layer, end)[:, 0]

        visible = np.arange(end)[None, :] <= np.arange(position, end)[:, None]
        scale = np.float32(self._model.attention.scale or 1 / math.sqrt(latent.key))
        scores = np.einsum("thk,sk->hts", query, keys) * scale
        scores = np.where(visible[None], scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        found = np.einsum("hts,sr->thr", weights, keys[:, : latent.rank])
        padding = ((0, 0), (0, 0), (0, fill_groups(latent.rank) - latent.rank))
        by_head = self._read(layer, "latent_value").reshape(shape.heads, shape.head_dim, -1)
        mixed = np.einsum("thr,hvr->thv", np.pad(found, padding), by_head)
        if gates:
            mixed = mixed * take_sigmoid(gate)[:, :, None]
        mixed = mixed.reshape(count, -1)
        return np.pad(mixed, ((0, 0), (0, shape.stored_query - shape.query))).astype(np.float32)
