"""Compare pi2's logits and greedy answers with llama.cpp's; print figures as JSON.

Arguments: GGUF file, and what score_llama_cpp.py wrote of it.
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


def main(file: str, known: str) -> dict[str, object]:
    """Perplexities, KL divergence, equal choices, and equal answers."""
    with np.load(known) as arrays:
        ids, theirs = arrays["ids"].tolist(), normalise(arrays["logits"])
        answers = json.loads(str(arrays["answers"]))
    with pi2.load(file) as model:
        ours = normalise(model.logits(ids))[:, : theirs.shape[1]]
        gaps = [gap for given, made in answers if (gap := find_gap(model, given, made)) is not None]
    rows = np.arange(len(ids) - 1)
    return {
        "perplexity": float(np.exp(-ours[rows, ids[1:]].mean())),
        "peer_perplexity": float(np.exp(-theirs[rows, ids[1:]].mean())),
        "kl_nats": float((np.exp(theirs) * (theirs - ours)).sum(-1).mean()),
        "top_equal": float((theirs.argmax(-1) == ours.argmax(-1)).mean()),
        "answers": len(answers),
        "answers_equal": len(answers) - len(gaps),
        "gaps": [round(gap, 3) for gap in gaps],
    }


def find_gap(model: pi2.LoadedModel, given: list[int], made: list[int]) -> float | None:
    """How much more probable, in nats, pi2's token is than llama.cpp's where answers part; None if
    they are equal."""
    generation = model.generate(given, max_tokens=len(made), temperature=0.0, ignore_eos=True)
    for _ in generation:
        pass
    own = list(generation.result.token_ids)
    if own == made:
        return None
    part = next(n for n in range(len(made)) if own[: n + 1] != made[: n + 1])
    logits = model.logits([*given, *made[:part]])[-1]
    return float(logits[own[part]] - logits[made[part]])


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
