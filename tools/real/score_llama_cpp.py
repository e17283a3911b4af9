"""Write llama.cpp's logits and greedy answers to an .npz file.

It holds ``ids`` [n] and ``logits`` [n, vocab] of a text, and as JSON ``answers``: of every prompt
its tokens and those that were generated.
Arguments: GGUF file, text file, number of tokens, prompts file, output file.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import llama_cpp
import numpy as np

ANSWER_TOKENS = 24


def main(file: str, text: str, count: int, prompts: str, out: str) -> None:
    """Evaluate the first ``count`` tokens at once, and every line of ``prompts``."""
    threads = len(os.sched_getaffinity(0))
    model = llama_cpp.Llama(
        file, n_ctx=count, n_batch=count, n_threads=threads, verbose=False, logits_all=True
    )
    ids = model.tokenize(Path(text).read_bytes())[:count]
    model.eval(ids)
    logits = np.array(model.scores[: len(ids)], np.float32)
    model.close()
    model = llama_cpp.Llama(file, n_ctx=512, n_threads=threads, verbose=False)
    answers = []
    for line in Path(prompts).read_text(encoding="utf-8").splitlines():
        model.reset()
        given = model.tokenize(line.encode())
        made: list[int] = []
        for token in model.generate(given, temp=0.0, top_k=1, repeat_penalty=1.0):
            made.append(token)
            if len(made) == ANSWER_TOKENS or token == model.token_eos():
                break
        answers.append((given, made))
    np.savez(out, ids=np.array(ids), logits=logits, answers=json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5])
