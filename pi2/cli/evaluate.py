"""Measure the perplexity of a plan's model."""

from __future__ import annotations

import json
from pathlib import Path

import click

from pi2.cli.options import add_json_option, add_set_option, add_text_options
from pi2.plan.composing.overrides import parse_assignments

GROUP = "Run"


@click.command("evaluate")
@click.argument("plan", type=click.Path(path_type=Path))
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
    help="Also evaluate reference, gate, low-rank, or another plan; repeatable.",
)
@add_set_option
@add_json_option
def command(
    plan: Path,
    files: tuple[Path, ...],
    context: int | None,
    stride: int | None,
    windows: int | None,
    against: tuple[str, ...],
    settings: tuple[str, ...],
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
            plan,
            read_texts(files),
            overrides=parse_assignments(settings),
            context=context,
            stride=stride,
            windows=windows,
            against=against,
            progress=progress,
        )
    if as_json:
        click.echo(json.dumps(describe_evaluation(evaluation), indent=2))
    else:
        click.echo(write_markdown(evaluation))
