"""Train a model's activation predictors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pi2.cli.commands import Subcommands
from pi2.cli.options import (
    ChosenPlan,
    add_json_option,
    add_path_option,
    add_text_options,
    take_plan,
)

if TYPE_CHECKING:
    from pi2.predictors.training import Training

GROUP = "More commands"


@click.group("predictor", cls=Subcommands)
def command() -> None:
    """Train a model's activation predictors."""


@command.command("train")
@add_text_options("UTF-8 training text; its last tenth is held out for evaluation.  Repeatable.")
@add_path_option(
    "-o",
    "--output",
    required=True,
    metavar="FOLDER",
    text="Output folder of the store, model document and plan.",
)
@click.option("--rank", default="auto", show_default=True, help="Rank of every layer, or auto.")
@click.option(
    "--recall",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.97,
    show_default=True,
    help="Share of active neurons to find: higher is more accurate and slower.",
)
@click.option(
    "--passes",
    type=click.FloatRange(0, 1000, min_open=True),
    help="Epochs; default: 4 to 16, fewer for longer texts.",
)
@take_plan()
@add_json_option
def train(
    plan: ChosenPlan,
    files: tuple[Path, ...],
    output: Path,
    rank: str,
    recall: float,
    passes: float | None,
    context: int | None,
    windows: int | None,
    as_json: bool,
) -> None:
    """Train low-rank predictors for PLAN's model on its activations for a text.

    FOLDER gets a store with the predictors (neurons are shared with the old store), a model
    document that lists them, and a plan that uses them.  Existing files are not changed.  With
    --rank auto, each layer's rank grows as long as that saves bytes per token.
    """
    from pi2.cli.progress import ProgressBar
    from pi2.predictors.fitting import Recipe
    from pi2.predictors.training import train_predictors
    from pi2.statistics.texts import read_texts

    with ProgressBar() as progress:
        training = train_predictors(
            plan.path,
            read_texts(files),
            output,
            overrides=plan.overrides,
            recipe=Recipe(recall=recall, passes=passes),
            rank=parse_rank(rank),
            context=context,
            windows=windows,
            progress=progress,
        )
    if as_json:
        click.echo(json.dumps(describe_training(training), indent=2))
    else:
        click.echo(write_report(training))


def parse_rank(text: str) -> int | None:
    """Parse a rank: a number, or None for ``auto``."""
    if text == "auto":
        return None
    if not text.isdigit() or not 1 <= int(text) <= 65536:
        raise click.BadParameter(f"{text!r} is neither auto nor 1 to 65536", param_hint="--rank")
    return int(text)


def describe_training(training: Training) -> dict[str, Any]:
    """Everything about a training, for programs."""
    from pi2.evaluation.report import describe_evaluation

    return {
        "plan": str(training.plan),
        "layers": [
            {
                "rank": fit.rank,
                "recall": fit.recall,
                "predicted": fit.predicted,
                "active": fit.active,
                "curve": [list(point) for point in fit.curve],
            }
            for fit in training.fits
        ],
        "evaluation": describe_evaluation(training.evaluation),
    }


def write_report(training: Training) -> str:
    """What was trained, and what it costs, for people."""
    from pi2.evaluation.report import write_markdown

    ranks = ", ".join(str(fit.rank) for fit in training.fits)
    curves = [dict(fit.curve) for fit in training.fits if fit.curve]
    lines = [f"ranks by layer: {ranks}"]
    if curves:
        points = [
            f"{recall:.1%} for {sum(curve[recall] for curve in curves) / len(curves):.1%}"
            for recall in curves[0]
        ]
        lines.append(f"recall for neurons computed: {', '.join(points)}")
    lines += ["", write_markdown(training.evaluation), ""]
    lines.append(f"try it: pi2 run {training.plan}")
    return "\n".join(lines)
