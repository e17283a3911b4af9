"""How far two engines' predictions of a text are apart."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def normalise(logits: ArrayLike) -> NDArray[np.float64]:
    """Natural logarithms of probabilities [n, vocab]."""
    found = np.asarray(logits, np.float64)
    found = found - found.max(-1, keepdims=True)
    return np.asarray(found - np.log(np.exp(found).sum(-1, keepdims=True)))


def measure_divergence(
    ids: list[int], theirs: NDArray[np.float32], ours: NDArray[np.float32]
) -> dict[str, float]:
    """Perplexity of ``ours`` over tokens ``ids`` [n], mean KL divergence from ``theirs`` to them
    in nats, and the share of equal choices; both are logits [n, vocab]."""
    losses, divergences, equal = [], [], []
    for place, (first, second) in enumerate(zip(theirs, ours, strict=True)):
        peer, own = normalise(first), normalise(second[: len(first)])
        divergences.append((np.exp(peer) * (peer - own)).sum())
        equal.append(peer.argmax() == own.argmax())
        if place + 1 < len(ids):
            losses.append(-own[ids[place + 1]])
    return {
        "perplexity": float(np.exp(np.mean(losses))),
        "kl_nats": float(np.mean(divergences)),
        "top_equal": float(np.mean(equal)),
    }
