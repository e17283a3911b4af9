"""Compare pi2's logits and greedy answers with llama.cpp's; print figures as JSON.

Arguments: GGUF file, what score_llama_cpp.py wrote of it, and settings of the plan as JSON.
"""

from __future__ import annotations

import json
import sys

import numpy as np

import pi2
from real.divergence import measure_divergence


def main(file: str, known: str, settings: str = "{}") -> dict[str, object]:
    """Perplexities, KL divergence, equal choices and answers, and llama.cpp's own distances."""
    with np.load(known) as arrays:
        ids, theirs = arrays["ids"].tolist(), arrays["logits"]
        answers, steps = (json.loads(str(arrays[name])) for name in ("answers", "steps"))
    with pi2.load(file, set=json.loads(settings)) as model:
        ours = np.asarray(model.logits(ids))
        gaps = [gap for given, made in answers if (gap := find_gap(model, given, made)) is not None]
    return {
        **measure_divergence(ids, theirs, ours),
        "peer_perplexity": measure_divergence(ids, theirs, theirs)["perplexity"],
        "answers": len(answers),
        "answers_equal": len(answers) - len(gaps),
        "gaps": [round(gap, 3) for gap in gaps],
        "peer_steps": steps,
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
