"""Run a file with llama.cpp and print figures as JSON.

Arguments: file, text file, lengths of prompts as JSON, tokens to generate, a memory limit that is
ignored, "mapped" or "repacked"; without arguments the version is printed.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

BEGIN = time.perf_counter()


def main(file: str, text: str, lengths: list[int], count: int, repacks: bool) -> dict[str, object]:
    """Figures of one run; the import of the library belongs to the time of loading."""
    import llama_cpp

    make_settings = llama_cpp.llama_model_default_params

    def choose_settings() -> Any:
        settings = make_settings()
        settings.use_extra_bufts = repacks
        return settings

    llama_cpp.llama_model_default_params = choose_settings
    cores = len(os.sched_getaffinity(0))
    context = sum(lengths) + 2 * count
    model = llama_cpp.Llama(
        file, n_ctx=context, n_threads=cores, n_threads_batch=cores, verbose=False
    )
    found: dict[str, object] = {"load_s": time.perf_counter() - BEGIN}
    ids, first = model.tokenize(Path(text).read_bytes()), 0
    for length in lengths:
        model.reset()
        start = time.perf_counter()
        next(generate(model, ids[first : first + length]))
        found[f"prompt_{length}_tokens_s"] = length / (time.perf_counter() - start)
        first += length
    model.reset()
    made: list[int] = []
    for token in generate(model, ids[-16:]):
        made.append(token)
        if len(made) == 1:
            start = time.perf_counter()
        if len(made) == count:
            break
    found["decode_tokens_s"] = (count - 1) / (time.perf_counter() - start)
    found["ids"] = made
    found["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found


def generate(model: Any, ids: list[int]) -> Iterator[int]:
    """Greedy tokens after ``ids``."""
    yield from model.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0)


def describe_build() -> str:
    import llama_cpp

    return describe_features("llama-cpp-python", llama_cpp.llama_print_system_info())


def describe_features(package: str, info: bytes) -> str:
    """A package's version, and what of its list of features it was built with."""
    parts = [part.split(":")[-1].split("=") for part in info.decode().split("|") if "=" in part]
    built = " ".join(name.strip() for name, value in parts if value.strip() == "1")
    return f"{package} {version(package)} (built with {built})"


if __name__ == "__main__":
    given = sys.argv[1:]
    if not given:
        print(describe_build())
        sys.exit()
    repacks = given[5] == "repacked"
    print(json.dumps(main(given[0], given[1], json.loads(given[2]), int(given[3]), repacks)))
