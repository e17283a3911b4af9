"""Compare pi2's logits with those of llama.cpp that a file holds; print figures as JSON.

Arguments: GGUF file, and an .npz file with ``ids`` [n] and ``logits`` [n, vocab].
"""

from __future__ import annotations

import json
import sys

import numpy as np
from numpy.typing import ArrayLike, NDArray

import pi2


def normalise(logits: ArrayLike) -> NDArray[np.float64]:
    """Natural logarithms of probabilities [n, vocab]."""
    found = np.asarray(logits, np.float64)
    found = found - found.max(-1, keepdims=True)
    return np.asarray(found - np.log(np.exp(found).sum(-1, keepdims=True)))


def main(file: str, known: str) -> dict[str, float]:
    """Perplexities, KL divergence and equal choices."""
    with np.load(known) as arrays:
        ids, theirs = arrays["ids"].tolist(), normalise(arrays["logits"])
    with pi2.load(file) as model:
        ours = normalise(model.logits(ids))[:, : theirs.shape[1]]
    rows = np.arange(len(ids) - 1)
    return {
        "perplexity": float(np.exp(-ours[rows, ids[1:]].mean())),
        "peer_perplexity": float(np.exp(-theirs[rows, ids[1:]].mean())),
        "kl_nats": float((np.exp(theirs) * (theirs - ours)).sum(-1).mean()),
        "top_equal": float((theirs.argmax(-1) == ours.argmax(-1)).mean()),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
