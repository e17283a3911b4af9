"""Measure the perplexity of a plan's model."""

from __future__ import annotations

import json
from pathlib import Path

import click

from pi2.cli.options import ChosenPlan, add_json_option, add_text_options, take_plan
from pi2.diagnostics import UserError

GROUP = "More commands"
WORDS = ("reference", "gate", "low-rank", "llama.cpp")


@click.command("evaluate")
@add_text_options("UTF-8 text that the model was not trained on; repeatable.")
@click.option(
    "--stride",
    type=click.IntRange(min=1),
    help="Tokens from the start of one window to the next; default: no overlap.",
)
@click.option(
    "--against",
    multiple=True,
    metavar="WHAT",
    help="Also evaluate reference, gate, low-rank, llama.cpp (same GGUF file), or another plan.",
)
@take_plan(has_files=True)
@add_json_option
def command(
    plan: ChosenPlan,
    files: tuple[Path, ...],
    context: int | None,
    stride: int | None,
    windows: int | None,
    against: tuple[str, ...],
    as_json: bool,
) -> None:
    """Measure the perplexity of PLAN's model on texts.

    The text is scored densely (every neuron is computed), then sparsely (only neurons that the
    plan's predictor selects), and both are compared token by token.  The recall of low-rank
    predictors is counted layer by layer.  Each token is scored once, with at least CONTEXT - STRIDE
    tokens before it.
    """
    from pi2.cli.progress import ProgressBar
    from pi2.evaluation.evaluation import evaluate_plan
    from pi2.evaluation.report import describe_evaluation, write_markdown
    from pi2.statistics.texts import read_texts

    with ProgressBar() as progress:
        evaluation = evaluate_plan(
            plan.path,
            read_texts(files),
            overrides=plan.overrides,
            context=context,
            stride=stride,
            windows=windows,
            against=[item if item in WORDS else name_other(item) for item in against],
            progress=progress,
        )
    if as_json:
        click.echo(json.dumps(describe_evaluation(evaluation), indent=2))
    else:
        click.echo(write_markdown(evaluation))


def name_other(name: str) -> str:
    """The path of another plan; UserError P663 for a name that nothing has."""
    from pi2.cli.named_plans import find_plan_path

    try:
        return str(find_plan_path(Path(name), has_files=True))
    except UserError as error:
        (found,) = error.diagnostics
        help_text = f"use reference, gate, low-rank, or another plan; {found.help}"
        raise UserError.of("P663", f"cannot compare with {name!r}", help=help_text) from None
