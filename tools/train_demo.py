"""Train pi2's demonstration model from nothing, on a CPU, in about an hour and a half.

What: a LLaMA-like decoder of 8.9 million parameters with a dReLU FFN, which learns to complete
Python source. About one FFN neuron in ten is active for a token, and a small predictor per
layer says which, so the model is a real, if tiny, example of what pi2 runs from flash.

Text: the source and docstrings of the standard library of the interpreter that runs this tool.
Licence of the text: PSF-2.0 (Python Software Foundation Licence, version 2). Nothing is
downloaded. About 3 % of the files, drawn by a seeded hash of their path, are held out.

How (from the repository root; PyTorch, numpy, tokenizers, safetensors, pyarrow needed)::

    python tools/train_demo.py train --minutes 85    # build/demo/train.pt, about 90 minutes
    python tools/train_demo.py export                # build/demo/checkpoint/, any time
    python tools/train_demo.py predictors            # predictors and neuron counts, 15 minutes
    python tools/train_demo.py report                # training.json, held-out figures, samples
    python tools/train_demo.py train --experts --minutes 20    # a mixture of experts instead
    python tools/train_demo.py export --experts      # build/demo/mixture/

The schedule follows the clock: warm-up, a constant rate, and a decay that ends when the minutes
are over, whatever the speed of the machine. The last part trains with fake-quantised weights
(INT4 groups of 32, INT8 embedding) and with longer sequences. A checkpoint is written every
three minutes; after an interruption run ``train --resume`` with the same options, and the run
goes on at the same place with the minutes that were left. Everything random is seeded, but the
clock steers the schedule, so two runs are alike and not equal.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

# Without these glibc returns every large tensor to the system and takes it back page by page.
ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
    "MALLOC_TOP_PAD_": "268435456",
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    from demo.predictors import PredictorRecipe
    from demo.training import Recipe

    base, guess = Recipe(), PredictorRecipe()
    parser = argparse.ArgumentParser(description="Train pi2's demonstration model.")
    parser.add_argument("--folder", type=Path, default=Path("build/demo"), help="working folder")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train the model")
    train.add_argument(
        "--experts", action="store_true", help="a mixture of 32 experts instead (mixture.pt)"
    )
    train.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    train.add_argument("--minutes", type=float, default=base.minutes, help="wall-clock budget")
    train.add_argument("--seed", type=int, default=base.seed)
    train.add_argument("--threads", type=int, default=base.threads)
    train.add_argument("--muon-lr", type=float, default=base.muon_lr)
    train.add_argument("--adam-lr", type=float, default=base.adam_lr)
    train.add_argument("--micro-tokens", type=int, default=base.micro_tokens)
    train.add_argument("--activation-target", type=float, default=base.activation_target)
    export = commands.add_parser("export", help="write the checkpoint folder")
    export.add_argument("--experts", action="store_true", help="of the mixture (mixture/)")
    predict = commands.add_parser("predictors", help="train the predictors, count activations")
    predict.add_argument("--rank", type=int, default=guess.rank)
    predict.add_argument("--tokens", type=int, default=guess.tokens)
    predict.add_argument("--minutes", type=float, default=guess.minutes)
    predict.add_argument("--recall", type=float, default=guess.recall)
    predict.add_argument("--active-weight", type=float, default=guess.active_weight)
    show = commands.add_parser("report", help="measure on the held-out text")
    show.add_argument("--note", action="append", default=[], help="a remark for training.json")
    return parser.parse_args(arguments)


def main() -> None:
    """Run one command."""
    if any(name not in os.environ for name in ALLOCATOR):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ALLOCATOR})
    options = vars(parse())

    import torch

    from demo.corpus import load_corpus
    from demo.export import export
    from demo.model import DemoConfig
    from demo.predictors import PredictorRecipe, train_predictors
    from demo.report import report
    from demo.training import Recipe, read_seed, train

    folder, command = options.pop("folder"), options.pop("command")
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint, target = folder / "train.pt", folder / "checkpoint"
    vocabulary = DemoConfig().vocab_size
    if options.pop("experts", False):
        from demo.mixture import export_mixture, train_mixture

        mixture = folder / "mixture.pt"
        corpus = load_corpus(folder, options.get("seed", Recipe().seed), vocabulary)
        if command == "train":
            chosen = {name: options[name] for name in ("minutes", "seed", "threads", "resume")}
            train_mixture(corpus, mixture, **chosen)
        else:
            export_mixture(corpus, mixture, folder / "mixture")
        return
    if command == "train":
        resume = options.pop("resume")
        recipe = Recipe(**options)
        train(load_corpus(folder, recipe.seed, vocabulary), recipe, checkpoint, resume)
        return
    torch.set_num_threads(Recipe().threads)
    corpus = load_corpus(folder, read_seed(checkpoint), vocabulary)
    if command == "export":
        export(corpus, checkpoint, target)
    elif command == "predictors":
        settings = PredictorRecipe(**options)
        target.mkdir(parents=True, exist_ok=True)
        layers = train_predictors(corpus, checkpoint, target, settings)
        result = {"settings": asdict(settings), "calibration": layers}
        (folder / "predictors.json").write_text(json.dumps(result, indent=1) + "\n")
    else:
        report(corpus, folder, checkpoint, target, options["note"])


if __name__ == "__main__":
    main()
