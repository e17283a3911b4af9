"""Write llama.cpp's logits and greedy answers to an .npz file.

It holds ``ids`` [n] and ``logits`` [n, vocab] of a text, and as JSON ``answers``: of every prompt
its tokens and those that were generated.  JSON ``steps`` says how far llama.cpp is from itself when
it computes the same text and prompts token by token.
Arguments: GGUF file, text file, number of tokens, prompts file, output file.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from real.divergence import measure_divergence

ANSWER_TOKENS = 24


def main(file: str, text: str, count: int, prompts: str, out: str) -> None:
    """Evaluate the first ``count`` tokens at once, and every line of ``prompts``; then both token
    by token."""
    lines = Path(prompts).read_text(encoding="utf-8").splitlines()
    ids, logits = evaluate(file, Path(text).read_bytes(), count, count)
    answers = answer(file, lines, 512)
    _, single = evaluate(file, Path(text).read_bytes(), count, 1)
    steps: dict[str, float] = measure_divergence(ids, logits, single)
    steps["answers_equal"] = sum(
        own == other for own, other in zip(answers, answer(file, lines, 1), strict=True)
    )
    np.savez(
        out, ids=np.array(ids), logits=logits, answers=json.dumps(answers), steps=json.dumps(steps)
    )


def open_model(file: str, context: int, batch: int, *, all_logits: bool) -> llama_cpp.Llama:
    """A model that computes ``batch`` tokens at once."""
    return llama_cpp.Llama(
        file,
        n_ctx=context,
        n_batch=batch,
        n_threads=len(os.sched_getaffinity(0)),
        verbose=False,
        logits_all=all_logits,
    )


def evaluate(
    file: str, text: bytes, count: int, batch: int
) -> tuple[list[int], NDArray[np.float32]]:
    """The first tokens of a text, and their logits [n, vocab]."""
    model = open_model(file, count, batch, all_logits=True)
    ids = model.tokenize(text)[:count]
    model.eval(ids)
    logits = np.array(model.scores[: len(ids)], np.float32)
    model.close()
    return ids, logits


def answer(file: str, lines: list[str], batch: int) -> list[tuple[list[int], list[int]]]:
    """Tokens of every prompt and of its answer."""
    model = open_model(file, 512, batch, all_logits=False)
    answers = []
    for line in lines:
        model.reset()
        given = model.tokenize(line.encode())
        made: list[int] = []
        for token in model.generate(given, temp=0.0, top_k=1, repeat_penalty=1.0):
            made.append(token)
            if len(made) == ANSWER_TOKENS or token == model.token_eos():
                break
        answers.append((given, made))
    model.close()
    return answers


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5])
