"""Memory of a model beside its weights, as numbers before anything is allocated."""

from __future__ import annotations

import numpy as np

from pi2.arrays import F16, U8, Raw
from pi2.backends.blocks.sizes import (
    count_attention_bytes,
    count_longest_input,
    count_scratch_bytes,
    count_token_bytes,
)
from pi2.backends.executor import CONTEXT_BLOCK
from pi2.plan.arithmetic.sizes import LOGIT_ROWS
from pi2.plan.documents.model import Model

ALIGNMENT = 64
_MOST_LANES = 16
"""Lanes of the widest registers."""
_VECTORS = 4
"""Norms and biases of a layer, in vectors as long as what attention reads and mixes."""


def count_kv_bytes(model: Model, context: int, sequences: int) -> int:
    """Return the bytes of keys and values."""
    context = -(-context // CONTEXT_BLOCK) * CONTEXT_BLOCK
    return sum(
        4 * sequences * context * view.shape.kv_heads * view.shape.head_dim * layers
        for view, layers in model.list_views()
        if view.has_keys
    )


def count_workspace_bytes(
    model: Model,
    chunk: int,
    sequences: int,
    planes: int = 1,
    *,
    context: int = 0,
    threads: int = 1,
) -> int:
    """Return the bytes that computing ``chunk`` tokens, or steps of ``sequences``, takes at most
    beside weights, keys and values."""
    rows = max(LOGIT_ROWS, sequences)
    tokens = max(chunk, rows)
    turns = sum(4 * max(width, 2) for _, width in model.list_turns())
    heads = model.shape.heads // model.shape.kv_heads
    scratch = max(
        count_scratch_bytes(count_longest_input(model), _MOST_LANES),
        *(
            count_attention_bytes(heads, view.shape.head_dim, _MOST_LANES)
            for view, _ in model.list_views()
        ),
    )
    return (
        tokens * count_token_bytes(model, planes)
        + rows * (4 * model.shape.vocab + 64)
        + (context + CONTEXT_BLOCK) * (turns + 4 * threads)
        + threads * scratch
        + _VECTORS * 4 * model.shape.layers * (model.shape.hidden + model.shape.query)
    )


def allocate(size: int) -> U8:
    """Return zeros that begin at a cache line; pages come when they are written."""
    raw: U8 = np.zeros(size + ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT
    return raw[skip : skip + size]


class KvCache:
    """Keys and values of layers, fp16 [sequences, heads, context, head_dim] each."""

    def __init__(self, model: Model, context: int, sequences: int) -> None:
        self._layers: dict[int, tuple[F16, F16]] = {}
        for layer in range(model.shape.layers):
            view = model.view_layer(layer)
            if not view.has_keys:
                continue
            shape = (sequences, view.shape.kv_heads, context, view.shape.head_dim)
            size = 2 * int(np.prod(shape))
            first, second = (allocate(size).view(np.float16).reshape(shape) for _ in range(2))
            self._layers[layer] = first, second

    def find(self, layer: int) -> tuple[F16, F16]:
        """Return a layer's keys and values."""
        return self._layers[layer]

    def read(self, sequence: int, first: int, end: int) -> U8:
        """Return a copy [n] of what is kept of a sequence's tokens from ``first`` to ``end``."""
        parts = [
            np.ascontiguousarray(array[sequence, :, first:end]).view(np.uint8).reshape(-1)
            for pair in self._layers.values()
            for array in pair
        ]
        return np.concatenate(parts)

    def put(self, sequence: int, first: int, end: int, kept: U8) -> None:
        """Put back what `read` gave for these tokens."""
        done = 0
        for pair in self._layers.values():
            for array in pair:
                part: Raw = array[sequence, :, first:end]
                size = part.size * 2
                part[...] = kept[done : done + size].view(np.float16).reshape(part.shape)
                done += size
