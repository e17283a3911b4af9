"""What guessing tokens brings: tokens a step and bytes for each token, by kind of text.

    python tools/measure_speculation.py plans/demo.plan.toml --text repeated.txt --text plain.txt
    python tools/measure_speculation.py qwen-1.5b.gguf --draft qwen-0.5b.gguf --text chat.txt

The first half of each text's tokens is a prompt, after which the model goes on as the plan draws
tokens, or greedily with ``--greedy``: without guesses, with those of each kind whenever there are
some, and as long as they pay.  With ``--draft`` a smaller model guesses instead of the neurons in
memory.  Prints a Markdown table.  Bytes are counted; seconds are those of a
machine that may have other work.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pi2
from pi2.arrays import I64
from pi2.engine.loaded_model import LoadedModel
from pi2.engine.speculation import Speculation

KINDS: Mapping[str, Mapping[str, Any] | None] = {
    "none": None,
    "prompt, always": {"drafts": "prompt", "when": "always"},
    "prompt, while it pays": {"drafts": "prompt"},
    "resident, always": {"drafts": "resident", "when": "always"},
    "resident, while it pays": {"drafts": "resident"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one run gave."""

    text: str
    kind: str
    guessed: int
    kept: int
    tokens_a_step: float
    bytes_a_token: float
    flash_bytes_a_token: float
    tokens_s: float
    same_text: bool


class Silent:
    """Never guesses."""

    def propose(self, place: int, ids: I64, most: int) -> list[int]:
        """Guess nothing."""
        return []

    def forget(self, place: int) -> None:
        """Do nothing."""


def silence(model: LoadedModel) -> None:
    """Let bytes of steps be counted, and nothing be guessed."""
    model.scheduler.speculation = Speculation(
        Silent(), tokens=4, step_tokens=5, count_bytes=model._parts.count_touched
    )


def list_kinds(draft: Path | None) -> Mapping[str, Mapping[str, Any] | None]:
    """Settings of each kind of guess, None without guesses."""
    if draft is None:
        return KINDS
    own = {"drafts": "plan", "plan": str(draft.resolve())}
    kept = {kind: found for kind, found in KINDS.items() if not kind.startswith("resident")}
    return {**kept, "model, always": {**own, "when": "always"}, "model, while it pays": own}


def measure(
    plan: Path,
    texts: list[Path],
    tokens: int,
    settings: dict[str, Any],
    drawing: dict[str, Any],
    draft: Path | None,
) -> Iterator[Row]:
    """Run every kind of guess on every text."""
    plain: dict[str, tuple[int, ...]] = {}
    for kind, speculation in list_kinds(draft).items():
        chosen = speculation or {"drafts": "prompt"}
        with pi2.load(plan, set={**settings, "decode.speculation": chosen}) as model:
            if speculation is None:
                silence(model)
            for path in texts:
                ids = model.encode(path.read_text("utf-8"))
                before = model.scheduler.rounds
                generation = model.generate(
                    ids[: max(1, len(ids) // 2)], max_tokens=tokens, ignore_eos=True, **drawing
                )
                result = generation.result
                counters = result.statistics.speculation
                rounds = model.scheduler.rounds - before
                made = counters.drafted_tokens + counters.plain_tokens
                yield Row(
                    text=path.stem,
                    kind=kind,
                    guessed=counters.draft_tokens,
                    kept=counters.accepted_tokens,
                    tokens_a_step=rounds.whole.tokens / rounds.whole.steps,
                    bytes_a_token=(counters.drafted_bytes + counters.plain_bytes) / made,
                    flash_bytes_a_token=(counters.drafted_flash_bytes + counters.plain_flash_bytes)
                    / made,
                    tokens_s=rounds.whole.tokens / rounds.whole.seconds,
                    same_text=plain.setdefault(path.stem, result.token_ids) == result.token_ids,
                )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--greedy", action="store_true")
    parser.add_argument("--draft", type=Path, help="a smaller model with the same tokenizer")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    from pi2.plan.toml.source import parse_assignments

    settings = parse_assignments(tuple(options.set))
    drawing = {"temperature": 0.0, "repetition_penalty": 1.0} if options.greedy else {"seed": 1}
    print("| text | guesses | guessed | kept | tokens a step | KiB a token | from flash ", end="")
    print("| tokens/s | same text |\n|---|---|---|---|---|---|---|---|---|")
    for row in measure(
        options.plan, options.text, options.tokens, settings, drawing, options.draft
    ):
        print(
            f"| {row.text} | {row.kind} | {row.guessed} | {row.kept} | {row.tokens_a_step:.2f} "
            f"| {row.bytes_a_token / 1024:.0f} | {row.flash_bytes_a_token / 1024:.0f} "
            f"| {row.tokens_s:.0f} | {'yes' if row.same_text else 'no'} |"
        )


if __name__ == "__main__":
    main()
