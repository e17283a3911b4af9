"""Compares pi2 with Hugging Face transformers on tiny random models of random configurations.

Needs torch and transformers, which pi2 itself does not.  ``python tools/compare_families.py`` draws
configurations of every family; names of families (``model_type``) choose some.  Every model is
converted, computed by a backend that rounds nothing, and compared: logits of a prompt, and the
greedy tokens that follow it.  A configuration that pi2 refuses counts as refused, with its message.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from drawn_configurations import DRAWERS, Options
from drawn_further import FURTHER_DRAWERS
from drawn_states import STATE_DRAWERS
from golden_options import VOCAB
from make_goldens import compute, make_model
from pi2.diagnostics import UserError
from tests.helpers.goldens import (
    EXACT,
    UNROUNDED,
    Golden,
    convert_golden,
    make_small_tokenizer,
    measure_error,
    run_golden,
    write_plan,
)

ERROR = 1e-4
"""Largest difference of a logit, of the largest logit."""
GAP = 1e-3
"""Greedy tokens are compared up to where the best two logits are nearer than this."""
TOKENS = 16
FAMILIES = {**DRAWERS, **FURTHER_DRAWERS, **STATE_DRAWERS}


@dataclass
class Tally:
    """What became of a family's configurations."""

    agreed: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)


def compare(
    kind: str, options: Options, seed: int, settings: dict[str, str], is_streamed: bool
) -> str:
    """Return what differs; nothing if the model agrees.  Raises `UserError` where it is refused."""
    model = make_model(kind, options, seed)
    if hasattr(model, "set_experts_implementation"):
        # The others want sizes that suit their kernels.
        model.set_experts_implementation("eager")
    prompt = torch.randint(3, VOCAB, (20,), generator=torch.Generator().manual_seed(seed))
    logits, greedy, _ = compute(model, prompt)
    gaps = measure_gaps(model, prompt, greedy)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = folder / "checkpoint"
        model.half().save_pretrained(checkpoint)
        (checkpoint / "generation_config.json").unlink(missing_ok=True)
        (checkpoint / "tokenizer.json").write_bytes(make_small_tokenizer(VOCAB))
        document = convert_golden(checkpoint, folder, EXACT)
        has_experts = document.moe is not None and document.moe.router != "none"
        plan = STREAMED if is_streamed and has_experts else {}
        golden = Golden(prompt=prompt.tolist(), logits=logits, greedy=greedy)
        found, text = run_golden(
            write_plan(folder, document, plan), golden, tokens=TOKENS, settings=settings
        )
    error = measure_error(found, logits)
    if not error <= ERROR:
        return f"logits differ by {error:.1e}"
    clear = next((n for n, gap in enumerate(gaps) if gap < GAP), TOKENS)
    if text[:clear] != greedy[:clear]:
        return f"greedy tokens differ within the first {clear}"
    return ""


def measure_gaps(model: Any, prompt: torch.Tensor, greedy: list[int]) -> list[float]:
    """How far the best logit is from the next before each of the greedy tokens."""
    tokens = torch.cat([prompt, torch.tensor(greedy[:TOKENS])])[None]
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
    best = logits.topk(2).values
    gaps: list[float] = ((best[:, 0] - best[:, 1]) / logits.abs().amax(1)).tolist()
    return gaps


STREAMED = {"decode": {"predictor": "none"}, "layers": {"split": {"cpu": 1.0}, "hot": 0.1}}
"""What makes experts of mixtures come from the disk."""


def main() -> int:
    """Compare, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("families", nargs="*", choices=[[], *FAMILIES], metavar="FAMILY")
    parser.add_argument("--count", type=int, default=5, help="configurations of each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=["reference", "cpu"], default="reference")
    parser.add_argument("--streamed", action="store_true", help="experts come from the disk")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    settings = {**UNROUNDED, "backends.cpu": options.backend}
    bad = 0
    for name in options.families or FAMILIES:
        tally = Tally()
        for seed in range(options.seed, options.seed + options.count):
            drawn = random.Random(f"{name} {seed}")
            kind, values = FAMILIES[name](drawn)
            try:
                difference = compare(kind, values, seed, settings, options.streamed)
            except UserError as error:
                tally.refused[error.diagnostics[0].message.rpartition("config.json: ")[2]] += 1
                continue
            except Exception:
                difference = traceback.format_exc(limit=-3)
            if difference:
                tally.failed.append(f"seed {seed}: {difference}\n    {values}")
            else:
                tally.agreed += 1
        bad += len(tally.failed)
        print(f"{name:18} {tally.agreed} of {options.count} agree", flush=True)
        for message, times in tally.refused.items():
            print(f"    refused {times} times: {message}")
        for problem in tally.failed:
            print(f"    {problem}")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
