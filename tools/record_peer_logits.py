"""Record the logits that llama.cpp computes from the small files of tests/golden/peers/models.json.

    python tools/record_peer_logits.py --peer PYTHON [NAME ...]

PYTHON is an interpreter that imports `llama_cpp`.  Without names all are recorded anew.  Of a
quantised file also those of the same numbers as float32: there nothing rounds activations.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from pi2.arrays import F32
from tests.helpers.peers import (
    FOLDER,
    PROMPT,
    TOKENS,
    Tiny,
    hash_file,
    read_models,
    read_records,
    write_tiny,
)

PROGRAM = Path(__file__).parent / "real/print_llama_logits.py"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    models = read_models()
    parser.add_argument("names", nargs="*", choices=[[], *models], metavar="NAME")
    parser.add_argument("--peer", required=True, metavar="PYTHON")
    options = parser.parse_args()
    target, failed = FOLDER / "logits.npz", False
    kept = read_records() if options.names and target.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.names or models:
            try:
                kept |= record(options.peer, models[name], Path(scratch))
            except subprocess.CalledProcessError as error:
                said = (error.stderr.strip() or "no message").splitlines()
                reasons = [line for line in said if "ASSERT" in line] or said[-1:]
                print(f"{name}: llama.cpp fails: {reasons[0]}", file=sys.stderr)
                failed = True
    known = {key: own for key, own in kept.items() if key.partition("/")[0] in {*models, "peer"}}
    np.savez_compressed(target, **known)
    return failed


def record(python: str, model: Tiny, folder: Path) -> dict[str, np.ndarray]:
    """Logits, the file's hash, and llama.cpp's version by the keys of the record."""
    own = write_tiny(folder / "own.gguf", model)
    found = {f"{model.name}/sha256": np.array(hash_file(own))}
    if model.kind == "F32":
        found[model.name], version = ask(python, own)
    else:
        floats = write_tiny(folder / "floats.gguf", model, decoded=True)
        found[model.name], version = ask(python, floats)
        found[f"{model.name}/rounded"], _ = ask(python, own)
    return found | {"peer": np.array(version)}


def ask(python: str, file: Path) -> tuple[F32, str]:
    """llama.cpp's logits, and its version."""
    target = file.with_suffix(".npy")
    texts = (python, PROGRAM, file, json.dumps(TOKENS), PROMPT, target)
    command = [str(text) for text in texts]
    quiet = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    run = subprocess.run(command, env=quiet, capture_output=True, text=True, check=True)
    return np.load(target), f"llama-cpp-python {run.stdout.strip()}"


if __name__ == "__main__":
    sys.exit(main())
