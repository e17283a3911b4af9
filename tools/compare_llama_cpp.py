"""Compares pi2 with llama.cpp on GGUF files of the golden models, which are tiny and random.

Needs llama-cpp-python, gguf, torch and transformers, which pi2 itself does not.  ``python
tools/compare_llama_cpp.py NAME...`` takes some golden models, by default all that tests write
files of.  Both programs read the same float32 file; logits of a prompt are compared, and the greedy
tokens that follow it, up to where the best two logits are nearer than rounding may move them.
Keys and values are float32 in both.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import NormalDist
from typing import Any
from unittest.mock import patch

import gguf
import llama_cpp
import numpy as np
from gguf.scripts.gguf_new_metadata import MetadataDetails, copy_with_new_metadata

import pi2
from golden_options import VOCAB
from make_goldens import MODELS, make_model
from pi2.arrays import F32
from pi2.backends.reference import executor, operators
from pi2.backends.reference import operators as neurons
from pi2.backends.reference import operators as prediction
from pi2.backends.reference.operators import activate
from pi2.importing.convert import convert_checkpoint
from pi2.importing.new_model import describe_checkpoint
from pi2.model.ffn import find_normal_quantile
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_parts import Quantization
from suited_goldens import suit_checkpoint
from tests.helpers.gguf_files import write_gguf
from tests.helpers.gguf_gemma import write_gemma3n, write_gemma4
from tests.helpers.gguf_goldens import GOLDENS, UNNAMED, UNSAID
from tests.helpers.gguf_nemotron import write_nemotron
from tests.helpers.gguf_tensors import read_checkpoint, translate
from tests.helpers.goldens import (
    EXACT,
    UNROUNDED,
    Golden,
    copy_checkpoint,
    make_small_tokenizer,
    measure_error,
    read_golden,
    write_plan,
)

ERROR, GELU_ERROR = 5e-5, 2.5e-3
"""Largest difference of a logit, of the largest; with GELU, the rounding of which deep models
enlarge."""
GAP = 2e-3
"""Greedy tokens are compared up to where the best two logits are nearer than this."""
TOKENS = 16
CONTEXT = 64


def write_nemotron_file(file: Path, checkpoint: Path) -> Path:
    """Write a file of Nemotron-H."""
    return write_nemotron(file, *read_checkpoint(checkpoint))


def write_other(file: Path, checkpoint: Path) -> Path:
    """Write a file of any other family, of a configuration that files can state."""
    name = checkpoint.name
    config, weights = read_checkpoint(checkpoint)
    if name in UNSAID:
        config |= UNSAID[name]
        (checkpoint / "config.json").write_text(json.dumps(config))
    scaling = config.get("rope_parameters") or {}
    if scaling.get("rope_type") == "longrope":
        # llama.cpp has room for 256 tokens at least, and chooses factors by that.
        scaling |= {"original_max_position_embeddings": 512}
        config |= {"rope_parameters": scaling, "original_max_position_embeddings": 512}
        (checkpoint / "config.json").write_text(json.dumps(config))
    if name in UNNAMED:
        weights = {key: v for key, v in weights.items() if not key.endswith(UNNAMED[name])}
    return write_gguf(file, config, translate(weights, config))


WRITERS: dict[str, Callable[[Path, Path], Path]] = {
    **dict.fromkeys(GOLDENS, write_other),
    **dict.fromkeys(("gemma4", "gemma4-moe", "gemma4-e2b"), write_gemma4),
    "gemma3n": write_gemma3n,
    **dict.fromkeys(("nemotron-h", "nemotron-h-moe"), write_nemotron_file),
}
"""What writes a golden model's file, by its name."""


WITHOUT_WINDOW = {"attention": {"sliding_window": None, "window_layers": None}}
FFN = 80
"""Gates of a layer of the golden models' common width."""
_SHARE = NormalDist().cdf(find_normal_quantile(0.95) * (FFN / (FFN - 1)) ** 0.5)
"""llama.cpp divides squares by the number of gates less one."""
DIFFERENT: dict[str, dict[str, dict[str, Any]]] = {
    **dict.fromkeys(("mistral-window", "phi3", "starcoder2"), WITHOUT_WINDOW),
    "gemma3n": {"ffn": {"gate_sparsity": (*(_SHARE,) * 10, 0.0)}},
    "gpt-oss": {"rope": {"whole_pairs": True}},
    "phimoe": {
        "norm": {"kind": "rmsnorm"},
        "moe": {"router": "softmax", "normalise_weights": True},
        **WITHOUT_WINDOW,
    },
}
"""What llama.cpp computes otherwise than the families' own code: the document says so, too."""

SUITED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4-e2b": ("Gemma4Text", MODELS["gemma4-e2b"][1] | {"num_kv_shared_layers": 2}),
    "gemma3n": (
        "Gemma3nText",
        {
            "head_dim": 8,
            "intermediate_size": FFN,
            # The first ten have cutoffs, and those from the twenty-first on share keys.
            "num_hidden_layers": 11,
            "num_kv_shared_layers": 0,
            "sliding_window": 5,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": VOCAB,
        },
    ),
}
"""Models of sizes that llama.cpp takes for granted; they are drawn instead of the golden ones."""


def draw_checkpoint(name: str, folder: Path) -> Golden:
    """Write a checkpoint of `SUITED`; return a prompt for it, without what is expected."""
    family, options = SUITED[name]
    model = make_model(family, options, 0)
    model.half().save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(make_small_tokenizer(VOCAB))
    prompt = np.random.default_rng(0).integers(3, VOCAB, 24).tolist()
    return Golden(prompt=prompt, logits=np.zeros((24, VOCAB), np.float32), greedy=[])


def add_vocabulary(source: Path, target: Path, vocab: int) -> Path:
    """Copy a file, with a vocabulary of words without text beside what it has of one."""
    reader = gguf.GGUFReader(source)
    field = reader.get_field("general.architecture")
    assert field is not None
    architecture = str(field.contents())
    writer = gguf.GGUFWriter(target, architecture)
    text, number, texts = (
        gguf.GGUFValueType.STRING,
        gguf.GGUFValueType.UINT32,
        gguf.GGUFValueType.ARRAY,
    )
    kinds = [gguf.TokenType.NORMAL] * vocab
    added = {
        "tokenizer.ggml.model": MetadataDetails(text, "llama"),
        "tokenizer.ggml.tokens": MetadataDetails(
            texts, [f"w{index}" for index in range(vocab)], sub_type=text
        ),
        "tokenizer.ggml.scores": MetadataDetails(
            texts, [0.0] * vocab, sub_type=gguf.GGUFValueType.FLOAT32
        ),
        "tokenizer.ggml.token_type": MetadataDetails(
            texts, [int(kind) for kind in kinds], sub_type=gguf.GGUFValueType.INT32
        ),
        f"{architecture}.vocab_size": MetadataDetails(number, vocab),
    }
    copy_with_new_metadata(reader, writer, added, [])
    return target


NOTES: list[str] = []
"""What llama.cpp has to say."""


def note(_level: int, text: bytes, _data: ctypes.c_void_p) -> None:
    """Keep a note of llama.cpp's."""
    NOTES.append(text.decode(errors="replace"))


def ask_llama_cpp(file: Path, golden: Golden) -> tuple[F32, list[int]]:
    """Logits of the prompt [n, vocab], and the greedy tokens after it; raises `ValueError` with the
    reason where llama.cpp cannot load the file."""
    NOTES.clear()
    try:
        model = open_llama_cpp(file)
    except ValueError as error:
        reasons = [note for note in NOTES if "error" in note]
        raise ValueError("".join(reasons).strip() or str(error)) from None
    model.eval(golden.prompt)
    count = len(golden.prompt)
    logits = np.array(model.scores[:count], np.float32)
    tokens: list[int] = []
    for place in range(TOKENS):
        tokens.append(int(model.scores[count + place - 1].argmax()))
        model.eval(tokens[-1:])
    model.close()
    return logits, tokens


def open_llama_cpp(file: Path) -> llama_cpp.Llama:
    """Open a file with keys and values of 32 bits."""
    return llama_cpp.Llama(
        str(file),
        n_ctx=CONTEXT,
        n_batch=CONTEXT,
        n_threads=1,
        logits_all=True,
        flash_attn=False,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        verbose=False,
    )


def activate_by_table(model: Model, gate: F32, up: F32 | None, cutoffs: F32 | None = None) -> F32:
    """What `activate` gives where GELU comes from a table of halves, as in llama.cpp."""
    if not model.ffn.activation.startswith("gelu"):
        return activate(model, gate, up, cutoffs)
    if cutoffs is not None:
        gate = np.maximum(gate - cutoffs, 0)
    rounded = activate(model, gate.astype(np.float16).astype(np.float32), None)
    value = rounded.astype(np.float16).astype(np.float32)
    value = np.where(gate >= 10, gate, np.where(gate <= -10, np.float32(0), value))
    return value if up is None else np.asarray(value * up)


def ask_pi2(file: Path, checkpoint: Path, prompt: list[int]) -> tuple[F32, bool]:
    """Logits [n, vocab] of ``prompt``, by a store that is made of the file, and whether the model
    computes GELU."""
    folder = file.parent
    made = describe_checkpoint(file, "golden").model
    changes: dict[str, Any] = {"quantization": Quantization.model_validate(dict(EXACT))}
    for table, values in DIFFERENT.get(checkpoint.name, {}).items():
        changes[table] = getattr(made, table).model_copy(update=values)
    model = made.model_copy(update=changes)
    convert_checkpoint(file, model, folder / "store", tokenizer=checkpoint / "tokenizer.json")
    with ExitStack() as stack:
        for module in (executor, operators, neurons, prediction):
            stack.enter_context(patch.object(module, "activate", activate_by_table))
        loaded = stack.enter_context(pi2.load(write_plan(folder, model, {}), set=UNROUNDED))
        return loaded.logits(prompt), model.ffn.activation.startswith("gelu")


def compare(name: str) -> str:
    """Say what differs; nothing if the model agrees."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        checkpoint = folder / name
        if name in SUITED:
            golden = draw_checkpoint(name, checkpoint)
        else:
            golden = read_golden(name)
            copy_checkpoint(name, checkpoint)
            suit_checkpoint(checkpoint)
        file = WRITERS[name](folder / "tiny.gguf", checkpoint)
        vocab = golden.logits.shape[1]
        whole = add_vocabulary(file, folder / "whole.gguf", vocab)
        try:
            logits, tokens = ask_llama_cpp(whole, golden)
        except ValueError as refusal:
            return f"llama.cpp does not load it: {refusal}"
        # Of llama.cpp's text, so that one other token does not change those after it.
        found, has_gelu = ask_pi2(file, checkpoint, [*golden.prompt, *tokens])
    count = len(golden.prompt)
    error = measure_error(found[:count], logits)
    if error > (GELU_ERROR if has_gelu else ERROR):
        return f"logits differ by {error:.1e} of the largest"
    for place, token in enumerate(tokens):
        row = found[count + place - 1]
        second, best = np.sort(row)[-2:]
        if best - second < GAP * np.abs(row).max():
            continue
        if int(row.argmax()) != token:
            return f"token {place + 1} after the prompt is {int(row.argmax())}, not {token}"
    print(f"{name:24} agrees: {error:.1e} of the largest logit, {len(tokens)} tokens", flush=True)
    return ""


def compare_apart(name: str) -> bool:
    """Compare a model in a process of its own, because llama.cpp ends it where a size does not suit
    it; return whether the model agrees."""
    command = [sys.executable, __file__, name]
    quiet = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    done = subprocess.run(command, env=quiet, capture_output=True, text=True, check=False)
    print(done.stdout, end="", flush=True)
    if done.returncode < 0 or not done.stdout:
        last = (done.stderr.strip() or "no message").splitlines()
        reasons = [line for line in last if "ASSERT" in line] or last[-1:]
        print(f"{name:24} llama.cpp or pi2 failed: {reasons[0]}", flush=True)
    return done.returncode == 0


def main() -> None:
    """Compare golden models, and exit with 1 if some differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", choices=[[], *WRITERS], metavar="NAME")
    names = parser.parse_args().names or list(WRITERS)
    if len(names) > 1:
        failed = [name for name in names if not compare_apart(name)]
        sys.exit(1 if failed else 0)
    callback = llama_cpp.llama_log_callback(note)
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    problem = compare(names[0])
    if problem:
        print(f"{names[0]:24} {problem}", flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
