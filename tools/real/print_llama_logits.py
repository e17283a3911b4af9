"""Write the logits that llama.cpp computes, for tools/record_peer_logits.py.

    PYTHON print_llama_logits.py FILE.gguf TOKENS PROMPT LOGITS.npy

TOKENS is a JSON list, of which the first PROMPT come together and the others one by one.  Keys and
values are float32; there is one thread, no flash attention, and no matrix is repacked.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import llama_cpp
import numpy as np

CONTEXT = 256
"""Tokens at least that llama.cpp has room for."""
NOTES: list[str] = []


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def note(_level: int, text: bytes, _data: object) -> None:
    NOTES.append(text.decode(errors="replace").strip())


def open_model(file: Path) -> ctypes.c_void_p:
    """A context for the file; exits with llama.cpp's words if there is none."""
    settings = llama_cpp.llama_model_default_params()
    settings.use_extra_bufts = False
    settings.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), settings)
    if not model:
        sys.exit(next((text for text in NOTES if "error" in text), "it says no reason"))
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = CONTEXT
    options.n_batch = options.n_ubatch = CONTEXT
    options.n_threads = options.n_threads_batch = 1
    options.type_k = options.type_v = llama_cpp.GGML_TYPE_F32
    options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context: ctypes.c_void_p | None = llama_cpp.llama_init_from_model(model, options)
    if context is None:
        sys.exit(NOTES[-1])
    return context


def compute(context: ctypes.c_void_p, ids: list[int], first: int) -> list[np.ndarray]:
    """Logits of tokens that come together, from position ``first`` on."""
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for place, token in enumerate(ids):
        batch.token[place], batch.pos[place] = token, first + place
        batch.n_seq_id[place], batch.seq_id[place][0], batch.logits[place] = 1, 0, 1
    assert llama_cpp.llama_decode(context, batch) == 0
    vocabulary = llama_cpp.llama_model_get_vocab(llama_cpp.llama_get_model(context))
    width = llama_cpp.llama_vocab_n_tokens(vocabulary)
    rows = (llama_cpp.llama_get_logits_ith(context, place) for place in range(len(ids)))
    return [np.ctypeslib.as_array(row, (width,)).copy() for row in rows]


def main() -> None:
    llama_cpp.llama_log_set(note, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    file, tokens, prompt = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
    context = open_model(file)
    rows = compute(context, tokens[:prompt], 0)
    for place in range(prompt, len(tokens)):
        rows += compute(context, tokens[place : place + 1], place)
    np.save(sys.argv[4], np.array(rows, np.float32))
    print(llama_cpp.__version__)


if __name__ == "__main__":
    main()
