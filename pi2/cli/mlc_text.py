"""`pi2 run` where MLC-LLM computes: a plan's model, context and sampling."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pi2.cli.terminal_text import write_text
from pi2.diagnostics import UserError

if TYPE_CHECKING:
    from pi2.plan.arithmetic.resolved import ResolvedPlan

PASSED_ON = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


def run_mlc(
    resolved: ResolvedPlan,
    folder: Path | None,
    prompt: str | Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    *,
    as_json: bool,
) -> None:
    """Generate text with the folder's weights, or those that the plan's ``store`` names where it
    names the backend; UserError P686-P689."""
    from pi2.backends.mlc.backend import open_text
    from pi2.backends.text_model import TextRequest

    if options["ignore_eos"]:
        raise UserError.of("P687", "MLC-LLM's interface has no --ignore-eos")
    settings = resolved.plan
    request = TextRequest(
        folder=resolved.store_path if folder is None else folder,
        model=resolved.model,
        unit=resolved.device.units[resolved.sparse_unit] if folder is None else None,
        context=settings.kv.context,
        chunk=settings.prefill.chunk,
    )
    with closing(open_text(request)) as engine:
        begun, first, pieces = time.monotonic(), None, []
        for piece in engine.generate(
            prompt, settings.sampling, max_tokens=options["max_tokens"], stop=options["stop"]
        ):
            first = time.monotonic() if first is None else first
            pieces.append(piece)
            if not as_json:
                write_text(piece)
        ended, finished = time.monotonic(), engine.finished
    assert finished is not None
    rate = None
    if first is not None and finished.tokens and finished.tokens > 1 and ended > first:
        rate = (finished.tokens - 1) / (ended - first)
    facts = {
        "engine": "mlc_llm",
        "text": "".join(pieces),
        "finish_reason": finished.reason,
        "prompt_tokens": finished.prompt_tokens,
        "tokens": finished.tokens,
        "load_s": round(engine.load_s, 4),
        "ttft_s": None if first is None else round(first - begun, 4),
        "decode_tokens_s": None if rate is None else round(rate, 4),
        "plan_digest": resolved.digest,
    }
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    waited = "-" if first is None else f"{(first - begun) * 1e3:.0f} ms"
    speed = "-" if rate is None else f"{rate:.1f} tokens/s"
    click.echo()
    click.echo(
        f"MLC-LLM: load {engine.load_s:.2f} s · first token {waited} · decode {speed}"
        f" ({finished.tokens} tokens, {finished.reason}) · its memory is its own, no budget of the"
        f" plan's holds · plan {resolved.digest[:12]}",
        err=True,
    )


def choose_sampling(options: Mapping[str, Any]) -> dict[str, object]:
    """Return the values of the plan that a run's options replace."""
    return {f"sampling.{name}": options[name] for name in PASSED_ON if options[name] is not None}
