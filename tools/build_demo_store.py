"""Build the demo model's neuron store, which ships with pi2, from its trained checkpoint.

    python tools/build_demo_store.py          # build/demo/checkpoint -> plans/stores/pi2-demo

The same checkpoint gives the same bytes.  Besides the weights the store has the tokenizer, the
activation counts, the figures of the training (training.json) and the held-out text on which
tools/evaluate_demo.py measures the model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pi2.cli.options import read_model
from pi2.diagnostics import UserError, texts
from pi2.importing.convert import convert_checkpoint
from pi2.progress import ProgressBar
from pi2.store.manifest import Manifest

ROOT = Path(__file__).resolve().parents[1]
MAX_MIB = 16
"""What a repository and a wheel can carry."""


def build(checkpoint: Path, output: Path) -> Manifest:
    """Convert the checkpoint with everything that `tools/train_demo.py` wrote beside it."""
    extras = [checkpoint / name for name in ("training.json", "heldout.txt")]
    output.parent.mkdir(parents=True, exist_ok=True)
    with ProgressBar() as progress:
        return convert_checkpoint(
            checkpoint,
            read_model("pi2-demo"),
            output,
            predictors=checkpoint / "predictors.safetensors",
            activations=checkpoint / "activations.parquet",
            extras={file.name: file for file in extras},
            replace=True,
            progress=progress,
        )


def main() -> int:
    """Build and report; exit code 1 if the store is too large, 2 if it cannot be built."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "build/demo/checkpoint")
    parser.add_argument("--output", type=Path, default=ROOT / "plans/stores/pi2-demo")
    arguments = parser.parse_args()
    try:
        manifest = build(arguments.checkpoint, arguments.output)
    except UserError as error:
        sys.stderr.write(texts.render_full(error.diagnostics, colour=False, sources=error.sources))
        return error.exit_code
    size_mib = sum(entry.bytes for entry in manifest.files) / 2**20
    print(f"{arguments.output}: {len(manifest.files)} files, {size_mib:.1f} MiB")
    if size_mib > MAX_MIB:
        print(f"that is more than the {MAX_MIB} MiB that may ship", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
