"""Which experts of a mixture compute a token, and with which weights; shared by the backends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pi2.arrays import F32, I32
from pi2.backends.protocol import Tensor
from pi2.plan.documents.model import Moe


def route(moe: Moe, inputs: F32, router: F32, shared_router: F32 | None = None) -> F32:
    """Weights float32 [T, experts] of all experts, 0 for those that do not compute a token.

    ``inputs`` float32 [T, hidden], ``router`` float32 [experts, hidden].  ``softmax`` is taken over
    all experts before the best are chosen, as Mixtral does.  Shared experts follow the others: 1,
    or the sigmoid of the score by ``shared_router`` float32 [1, hidden].
    """
    scores = inputs @ router.T
    chosen = np.argsort(-scores, axis=-1, kind="stable")[:, : moe.active_experts]
    if moe.router == "softmax":
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
    else:
        shares = 1 / (1 + np.exp(-scores))
    weights = np.zeros_like(scores)
    best = np.take_along_axis(shares, chosen, axis=-1)
    if moe.normalise_weights:
        best /= best.sum(axis=-1, keepdims=True)
    np.put_along_axis(weights, chosen, best, axis=-1)
    if moe.shared_experts:
        shared = np.ones((len(inputs), moe.shared_experts), np.float32)
        if shared_router is not None:
            shared /= 1 + np.exp(-(inputs @ shared_router.T))
        weights = np.concatenate([weights, shared], axis=-1)
    return np.asarray(weights, np.float32)


def list_chosen(routes: F32) -> I32:
    """Experts, ascending, that compute a token, from its weights float32 [experts]."""
    return np.flatnonzero(routes).astype(np.int32)


def slice_tensor(tensor: Tensor, part: int, parts: int) -> Tensor:
    """Rows of part ``part`` of ``parts`` equal ones; a tensor of one row is cut in its length."""
    if tensor.rows == 1:
        size = tensor.length // parts
        values = tensor.weights[:, part * size : (part + 1) * size]
        return replace(tensor, length=size, weights=values)
    size = tensor.rows // parts
    rows = slice(part * size, (part + 1) * size)
    scales = None if tensor.scales is None else tensor.scales[rows]
    return replace(tensor, rows=size, weights=tensor.weights[rows], scales=scales)
