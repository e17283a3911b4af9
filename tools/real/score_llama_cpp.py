"""Write llama.cpp's logits of a text to an .npz file: ``ids`` [n] and ``logits`` [n, vocab].

Arguments: GGUF file, text file, number of tokens, output file.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import llama_cpp
import numpy as np


def main(file: str, text: str, count: int, out: str) -> None:
    """Evaluate the first ``count`` tokens at once."""
    threads = len(os.sched_getaffinity(0))
    model = llama_cpp.Llama(
        file, n_ctx=count, n_batch=count, n_threads=threads, verbose=False, logits_all=True
    )
    ids = model.tokenize(Path(text).read_bytes())[:count]
    model.eval(ids)
    np.savez(out, ids=np.array(ids), logits=np.array(model.scores[: len(ids)], np.float32))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
