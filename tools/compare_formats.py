"""Compare pi2 with llama.cpp on files that llama.cpp's quantiser makes of one GGUF file.

    python tools/compare_formats.py FILE.gguf --peer PYTHON [--types Q2_K Q6_K ...] [--keep FOLDER]

PYTHON is an interpreter that imports `llama_cpp`.  A table goes to standard output.  Types below 3
bits need an importance matrix, which llama.cpp's program `llama-quantize` takes:

    llama-imatrix -m FILE.gguf -f TEXT -o FILE.imatrix.gguf
    python tools/compare_formats.py FILE.gguf --peer PYTHON --types IQ2_M \\
        --imatrix FILE.imatrix.gguf --quantizer llama-quantize

With
``--floats`` neither rounds activations to 8 bits: pi2 runs with ``fp32``, and llama.cpp computes
the file's weights as float32, which its quantiser has made of them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from real.engines import LlamaCpp, Pi2, measure_quality

TYPES = (
    *("Q2_K", "Q3_K_M", "Q4_0", "Q4_1", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "IQ4_XS", "IQ4_NL"),
    *("IQ3_S", "IQ2_M", "TQ2_0", "F16", "BF16"),
)
QUANTISE = """
import os, sys, llama_cpp
names = "LLAMA_FTYPE_MOSTLY_", "LLAMA_FTYPE_ALL_"
parameters = llama_cpp.llama_model_quantize_default_params()
parameters.ftype = getattr(llama_cpp, names[sys.argv[3] == "F32"] + sys.argv[3])
parameters.allow_requantize = True
parameters.nthread = len(os.sched_getaffinity(0))
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), parameters))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--peer", required=True)
    parser.add_argument("--types", nargs="+", default=list(TYPES))
    parser.add_argument("--floats", action="store_true", help="compare without 8-bit activations")
    parser.add_argument("--imatrix", type=Path, help="llama.cpp's importance matrix")
    parser.add_argument("--quantizer", help="llama.cpp's program llama-quantize, for --imatrix")
    parser.add_argument("--keep", type=Path, help="keep the files in this folder")
    options = parser.parse_args()
    if (options.imatrix is None) != (options.quantizer is None):
        parser.error("--imatrix and --quantizer go together")
    weighed = [] if options.imatrix is None else [options.quantizer, options.imatrix]
    engines = (Pi2(sys.executable), LlamaCpp(options.peer))
    print(
        "| type | MiB | perplexity | llama.cpp | KL, nats | same top | same answers "
        "| its own KL | top | answers | gaps |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.types:
            made = (options.keep or Path(scratch)) / f"{options.file.stem}-{name}.gguf"
            cells = describe_type(options.file, made, name, engines, options.floats, weighed)
            print(f"| {name} | {cells} |", flush=True)
            if options.keep is None:
                made.unlink(missing_ok=True)
    return 0


def quantise(
    source: Path, made: Path, name: str, python: str, weighed: Sequence[str | Path] = ()
) -> str | None:
    """Let llama.cpp make a file, or its program with a matrix (``weighed``); returns why it makes
    none."""
    if made.exists():
        return None
    command: list[str | Path] = [python, "-c", QUANTISE, source, made, name]
    if weighed:
        program, matrix = weighed
        command = [program, "--allow-requantize", "--imatrix", matrix, source, made, name]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if not run.returncode:
        return None
    lines = [line for line in run.stderr.splitlines() if "rror" in line or "imatrix" in line]
    return "llama.cpp makes none: " + (lines[-1].strip() if lines else str(run.returncode))


def describe_type(
    file: Path,
    made: Path,
    name: str,
    engines: tuple[Pi2, LlamaCpp],
    floats: bool,
    weighed: Sequence[str | Path],
) -> str:
    """Cells of a type: size, both perplexities, distances and equal answers."""
    python, peer_file, settings = engines[1].python, made, {}
    if failure := quantise(file, made, name, python, weighed):
        return failure
    if floats:
        peer_file = made.with_suffix(".f32.gguf")
        settings = {f"{part}.activations": "fp32" for part in ("prefill", "decode")}
        if failure := quantise(made, peer_file, "F32", python):
            return failure
    try:
        found = measure_quality(made, engines, peer_file, settings)
    except subprocess.CalledProcessError as error:
        lines = str(error.stderr).strip().splitlines()
        return f"failed: {lines[-1] if lines else error.returncode}"
    finally:
        if floats:
            peer_file.unlink(missing_ok=True)
    steps = found.peer_steps
    assert steps is not None
    return (
        f"{made.stat().st_size / 2**20:,.0f} | {found.perplexity:.3f} "
        f"({found.perplexity / found.peer_perplexity - 1:+.2%}) | {found.peer_perplexity:.3f} "
        f"| {found.kl_nats:.4f} | {found.top_equal:.1%} "
        f"| {found.answers_equal} of {found.answers} "
        f"| {steps.kl_nats:.4f} | {steps.top_equal:.1%} | {steps.answers_equal} | {found.gaps}"
    )


if __name__ == "__main__":
    sys.exit(main())
