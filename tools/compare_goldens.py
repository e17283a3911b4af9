"""Converts the models that tools/draw_goldens.py has written, and compares logits and greedy tokens
with what transformers computed.

    python tools/compare_goldens.py FOLDER [--backend reference|cpu]

A line for every model that does not agree, and how many of each family do.  A model that is refused
is told apart from one that is computed otherwise.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

import pi2
from pi2.diagnostics import UserError
from pi2.importing.convert import convert_checkpoint
from pi2.importing.new_model import describe_checkpoint
from pi2.plan.documents.model import Quantization
from tests.helpers.goldens import EXACT, UNROUNDED, make_small_tokenizer, write_plan

MOST_ERROR = 1e-4
"""Of the largest logit."""


def compare(folder: Path, backend: str, work: Path) -> str | None:
    """What is wrong with the model in ``folder``; None if it agrees."""
    with np.load(folder / "golden.npz") as arrays:
        expected = {name: arrays[name] for name in arrays.files}
    (folder / "tokenizer.json").write_bytes(make_small_tokenizer(expected["logits"].shape[1]))
    model = describe_checkpoint(folder, "golden").model
    model = model.model_copy(update={"quantization": Quantization.model_validate(EXACT)})
    convert_checkpoint(folder, model, work / "store")
    plan = write_plan(work, model, {"backends": {"cpu": backend}})
    prompt = expected["prompt"].tolist()
    settings: dict[str, object] = dict(UNROUNDED)
    if model.moe is not None:
        settings["decode.predictor"] = "router"
    with pi2.load(plan, set=settings) as loaded:
        logits = loaded.logits(prompt)
        generation = loaded.generate(prompt, max_tokens=32, temperature=0.0, ignore_eos=True)
        greedy = list(generation.result.token_ids)
    error = np.abs(logits - expected["logits"]).max() / np.abs(expected["logits"]).max()
    if not error <= MOST_ERROR:
        return f"logits differ by {error:.1e} of the largest"
    # Where two tokens are nearly as good as each other, rounding decides.
    if greedy != expected["greedy"].tolist() and expected["gap"] > 10 * MOST_ERROR:
        return f"greedy tokens differ, logits by {error:.1e} of the largest"
    return None


def main() -> None:
    """Compare all models of a folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backend", choices=["reference", "cpu"], default="reference")
    chosen = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    for folder in sorted(path.parent for path in chosen.folder.glob("*/golden.npz")):
        family = folder.name.rpartition("-")[0]
        with tempfile.TemporaryDirectory() as work:
            try:
                problem = compare(folder, chosen.backend, Path(work))
                kind = "agrees" if problem is None else "differs"
            except UserError as error:
                problem, kind = f"refused: {error.diagnostics[0].message}", "refused"
        counts[family, kind] += 1
        if problem is not None:
            print(f"{folder.name}: {problem}", flush=True)
    for family in sorted({family for family, _ in counts}):
        parts = [f"{counts[family, kind]} {kind}" for kind in ("agrees", "differs", "refused")]
        print(f"{family}: {', '.join(parts)}")


if __name__ == "__main__":
    main()
