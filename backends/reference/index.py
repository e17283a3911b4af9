"""The index of the reference backend, which chooses the keys that queries attend to."""

from collections.abc import Callable

import numpy as np

from pi2.arrays import F32, Bits
from pi2.backends.reference.operators import normalize, rotate
from pi2.model.blocks import find_attention
from pi2.plan.documents.model import Model

Keep = Callable[[int, int, int, F32], F32]
"""Keeps keys [T, width] of a sequence and layer from a position on; returns all tokens' keys."""


def choose_keys(scores: F32, position: int, *, chosen: int, block: int, local: int) -> Bits:
    """Which keys [lists, T, end] tokens from ``position`` on attend to, by their scores; of equal
    ones, the first counts.  See `pi2.plan.documents.model_mixing.Index`."""
    lists, count, end = scores.shape
    now = np.arange(position, position + count)[:, None]
    seen = np.where(np.arange(end)[None] <= now, scores, -np.inf)
    blocks = -(-end // block)
    filled = np.full((lists, count, blocks * block), -np.inf, np.float32)
    filled[..., :end] = seen
    best = filled.reshape(lists, count, blocks, block).max(-1)
    own, numbers = now // block, np.arange(blocks)[None]
    best = np.where((numbers <= own) & (numbers > own - local), np.inf, best)
    order = np.argsort(-best, axis=-1, kind="stable")[..., :chosen]
    found = np.zeros(best.shape, bool)
    np.put_along_axis(found, order, True, axis=-1)
    return np.repeat(found, block, axis=-1)[..., :end]


class KeyIndex:
    """The index of a model, with its last choice in each sequence."""

    def __init__(self, model: Model, read: Callable[[int, str], F32], keep: Keep) -> None:
        """``read`` gives a tensor of a layer [rows, length]."""
        self._model, self._read, self._keep = model, read, keep
        self.chosen: dict[int, Bits] = {}
        """By sequence; layers that share an index read it."""

    def see(
        self, layer: int, x: F32, made: F32, place: tuple[int, int], tables: tuple[F32, F32]
    ) -> Bits | None:
        """Which keys [lists, T, end] tokens attend to; None if to all.  ``x``: the layer's input;
        ``made``: the vectors that give queries; ``place``: sequence and first position; ``tables``:
        cosines and sines of the tokens."""
        own, (sequence, position) = find_attention(self._model, layer), place
        index = own.index
        if index is None or own.chooses == "shared":
            return None if index is None else self.chosen[sequence]
        query = made @ self._read(layer, "index_query").T
        query = query.reshape(len(x), index.heads, index.width)
        key = x @ self._read(layer, "index_key").T
        norm = self._model.norm.model_copy(update={"kind": "rmsnorm"})
        if index.kind == "tokens":
            norm = norm.model_copy(update={"kind": "layernorm", "epsilon": index.epsilon})
            bias = self._read(layer, "index_key_norm_bias")
            key = normalize(norm, key, self._read(layer, "index_key_norm"), bias)
        else:
            key = normalize(norm, key, self._read(layer, "index_key_norm"))
            query = normalize(norm, query, self._read(layer, "index_query_norm"))
        rotated = own.rope.count_rotated(own.turned_width)
        cos, sin = (table[:, : rotated // 2] for table in tables)
        query[..., :rotated] = rotate(query[..., :rotated], cos, sin)
        key[:, :rotated] = rotate(key[:, None, :rotated], cos, sin)[:, 0]
        keys = self._keep(sequence, layer, position, key)
        scores = np.einsum("thd,sd->hts", query, keys)
        if index.kind == "tokens":
            weights = x @ self._read(layer, "index_weights").T
            scores = np.einsum("hts,th->ts", np.maximum(scores, 0), weights)[None]
        found = choose_keys(
            scores, position, chosen=index.chosen, block=index.block, local=index.local
        )
        self.chosen[sequence] = found
        return found
