"""Run a file with ik_llama.cpp and print figures as JSON; arguments as of `run_llama_cpp`."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, os.fspath(Path(__file__).parents[1]))
from real.run_llama_cpp import BEGIN, describe_features


def import_library() -> Any:
    """The package's modules; its libraries need each other, and lie where no loader looks."""
    found = importlib.util.find_spec("ik_llama_cpp")
    if found is None or found.origin is None:
        sys.exit("ik_llama_cpp is not installed")
    for name in ("libggml.so", "libllama.so"):
        ctypes.CDLL(os.fspath(Path(found.origin).parent / "lib" / name), ctypes.RTLD_GLOBAL)
    import ik_llama_cpp._ctypes_api
    import ik_llama_cpp.llama

    return ik_llama_cpp


def open_model(file: str, context: int, repacks: bool) -> Any:
    """The file with flash attention; weights are mapped, or repacked as with ``-rtr``."""
    library = import_library()
    # Its attention works without AVX-VNNI: the package's check would turn it off.
    library.llama._cpu_has_avx_vnni = lambda: True
    api = library._ctypes_api
    make_settings = api.llama_model_default_params

    def choose_settings() -> Any:
        settings = make_settings()
        settings.repack_tensors = repacks
        settings.use_mmap = not repacks
        return settings

    api.llama_model_default_params = choose_settings
    cores = len(os.sched_getaffinity(0))
    return library.llama.IkLlama(
        file, n_ctx=context, n_threads=cores, use_mmap=not repacks, verbose=False
    )


def compute(model: Any, ids: list[int], position: int) -> None:
    """Compute tokens that stand from ``position`` on."""
    library: Any = sys.modules["ik_llama_cpp.llama"]
    make = library.make_batch_range
    size = model._context._n_ubatch
    for first in range(0, len(ids), size):
        piece, is_end = ids[first : first + size], first + size >= len(ids)
        batch = make(piece, pos_start=position + first, logits_last=is_end)
        if model._context.decode(batch):
            sys.exit("ik_llama.cpp failed to decode")


def main(file: str, text: str, lengths: list[int], count: int, repacks: bool) -> dict[str, object]:
    """Figures of one run; the import of the library belongs to the time of loading."""
    model = open_model(file, max(2048, sum(lengths) + 2 * count), repacks)
    found: dict[str, object] = {"load_s": time.perf_counter() - BEGIN}
    ids, first = model.tokenize(Path(text).read_text("utf-8")), 0
    for length in lengths:
        model._context.kv_cache_clear()
        start = time.perf_counter()
        compute(model, ids[first : first + length], 0)
        found[f"prompt_{length}_tokens_s"] = length / (time.perf_counter() - start)
        first += length
    model._context.kv_cache_clear()
    compute(model, ids[:16], 0)
    start = time.perf_counter()
    # The package chooses no tokens of its own here: the text's take as long.
    for place in range(16, 15 + count):
        compute(model, ids[place : place + 1], place)
    found["decode_tokens_s"] = (count - 1) / (time.perf_counter() - start)
    found["ids"] = []
    found["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found


def describe_build() -> str:
    library = import_library()
    path = Path(library.__file__).parent / "lib" / "libllama.so"
    describe = ctypes.CDLL(os.fspath(path)).llama_print_system_info
    describe.restype = ctypes.c_char_p
    return describe_features("ik-llama-cpp-python", describe())


if __name__ == "__main__":
    given = sys.argv[1:]
    if not given:
        print(describe_build())
        sys.exit()
    repacks = given[5] == "repacked"
    print(json.dumps(main(given[0], given[1], json.loads(given[2]), int(given[3]), repacks)))
