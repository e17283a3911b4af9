"""Which experts of a mixture compute a token, and with which weights; shared by the backends."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pi2.plan.model import Moe

F32 = npt.NDArray[np.float32]


def route(moe: Moe, inputs: F32, router: F32) -> F32:
    """Weights float32 [T, experts] of all experts, 0 for those that do not compute a token.

    ``inputs`` float32 [T, hidden], ``router`` float32 [experts, hidden].  ``softmax`` is taken over
    all experts before the best are chosen, as Mixtral does.
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
    return np.asarray(weights, np.float32)
