"""Write a GGUF file of random weights in the shape and precisions of a plan's model.

python tools/write_gguf.py PLAN -o FILE.gguf

`tools/bench_against.py PLAN --file FILE.gguf` then lets llama.cpp do the same work as the plan.
int4 becomes Q4_0, int8 Q8_0, fp16 F16, mxfp4 MXFP4: the same bits per weight as a neuron store.
The file is dense, has SiLU, and no sliding window.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from limited.program import run_program
from limited.random_gguf import write_gguf
from pi2.fitting.check import load_plan
from pi2.progress import ProgressBar


def main() -> int:
    """Write the file; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()

    def write() -> None:
        with ProgressBar() as progress:
            write_gguf(load_plan(given.plan).model, given.output, progress)

    return run_program(write)


if __name__ == "__main__":
    sys.exit(main())
