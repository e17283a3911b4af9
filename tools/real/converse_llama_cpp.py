"""Answer conversations with llama.cpp; JSON in and out.

Arguments: GGUF file, context, tokens of an answer.  The conversations come on standard input.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import llama_cpp


def main(file: str, context: int, count: int) -> list[list[dict[str, Any]]]:
    """Turns of every conversation; llama-cpp-python keeps the tokens that two prompts share."""
    threads = len(os.sched_getaffinity(0))
    model = llama_cpp.Llama(
        file, n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False
    )
    found = []
    for messages in json.load(sys.stdin):
        turns = []
        for end in [n + 1 for n, message in enumerate(messages) if message["role"] == "user"]:
            turns.append(ask(model, messages[:end], count))
        found.append(turns)
    return found


def ask(model: Any, messages: list[dict[str, str]], count: int) -> dict[str, Any]:
    """One answer, streamed."""
    start, first, text = time.perf_counter(), None, ""
    held = list(model.input_ids[: model.n_tokens])
    stream = model.create_chat_completion(
        messages=messages, max_tokens=count, temperature=0.0, stream=True
    )
    for event in stream:
        if piece := event["choices"][0]["delta"].get("content"):
            first = first or time.perf_counter()
            text += piece
    made = len(model.tokenize(text.encode(), add_bos=False))
    now = list(model.input_ids[: model.n_tokens])
    shared = 0
    while shared < min(len(held), len(now)) and held[shared] == now[shared]:
        shared += 1
    return {
        "prompt_tokens": model.n_tokens - made,
        "cached_tokens": shared,
        "first_token_s": (first or time.perf_counter()) - start,
        "text": text,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
