"""Neurons: record which fire, calibrate thresholds, and train predictors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from pi2.caches import replace_file
from pi2.cli.main import Subcommands
from pi2.cli.options import (
    FILE,
    FORCE,
    JSON,
    ChosenPlan,
    TextOptions,
    check_output,
    find_form,
    option,
    print_found,
    take_options,
    take_plan,
    write_file,
)
from pi2.diagnostics import UserError
from pi2.plan.documents.quantities import write_table
from pi2.progress import ProgressBar
from pi2.tracing import check_form

if TYPE_CHECKING:
    from pi2.measuring.activations import Statistics
    from pi2.measuring.calibration import Calibration, Goal, Trial
    from pi2.measuring.routing import RoutingTrace
    from pi2.measuring.training import Training


@click.group("predictor", cls=Subcommands)
def predictor_command() -> None:
    """Train a model's activation predictors."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(TextOptions):
    output: Path = option("-o", "--output", required=True, metavar="FOLDER")
    rank: str = "auto"
    recall: float = option(type=click.FloatRange(0, 1, min_open=True, max_open=True), default=0.97)
    passes: float | None = option(type=click.FloatRange(0, 1000, min_open=True))
    as_json: bool = JSON()


@predictor_command.command("train")
@take_options(TrainOptions)
@take_plan()
def train(plan: ChosenPlan, given: TrainOptions) -> None:
    """Train low-rank predictors for PLAN's model on its activations for a text.

    FOLDER gets a store with the predictors, which shares the old store's neurons, a model document
    and a plan. Existing files are not changed. With --rank auto, each layer's rank grows as long as
    that saves bytes per token."""
    from pi2.measuring.predictors import Recipe
    from pi2.measuring.training import train_predictors

    plan.refuse_file()
    with ProgressBar() as progress:
        training = train_predictors(
            plan.path,
            given.read_passages(),
            given.output,
            overrides=plan.overrides,
            recipe=Recipe(recall=given.recall, passes=given.passes),
            rank=parse_rank(given.rank),
            progress=progress,
        )
    print_found(describe_training(training), write_training(training), given.as_json)


def parse_rank(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdigit() or not 1 <= int(text) <= 65536:
        raise click.BadParameter(f"{text!r} is neither auto nor 1 to 65536", param_hint="--rank")
    return int(text)


def describe_training(training: Training) -> dict[str, Any]:
    return {
        "plan": str(training.plan),
        "layers": [
            {
                **{key: getattr(fit, key) for key in ("rank", "recall", "predicted", "active")},
                "curve": fit.curve,
            }
            for fit in training.fits
        ],
        "evaluation": asdict(training.evaluation),
    }


def write_training(training: Training) -> str:
    from pi2.measuring.evaluation import write_markdown

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


@click.group("sparsity", cls=Subcommands)
def sparsity_command() -> None:
    """Calibrate which neurons of a SiLU or GELU model can be skipped."""


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(TextOptions):
    target: float | None = option(
        type=click.FloatRange(0, 1, min_open=True, max_open=True), metavar="SHARE"
    )
    loss: str | None = option(metavar="SHARE")
    method: Literal["cats", "cats-teal"] | None = None
    output: Path | None = option("-o", "--output", type=FILE, metavar="FILE")
    new_plan: Path | None = option("--plan", type=FILE, metavar="FILE")
    evaluated: int = option(type=click.IntRange(min=1), default=16)
    error: str | None = option(metavar="SHARE")
    force: bool = FORCE()
    as_json: bool = JSON()


@sparsity_command.command("calibrate")
@take_options(CalibrateOptions)
@take_plan(fitted=False)
def calibrate(plan: ChosenPlan, given: CalibrateOptions) -> None:
    """Find thresholds below which the neurons of PLAN's model count as zero.

    The model runs on the texts densely; each layer's threshold is the quantile of its gates at the
    target share.  Then perplexity is compared with and without thresholds.  With --loss, the
    largest share that keeps to it is searched.  Without --target and --loss, PLAN's [sparsity]
    states the target."""
    from pi2.authoring.drafting import refer_from, write_changes, write_overlay
    from pi2.authoring.writing import write_document
    from pi2.measuring.calibration import calibrate_thresholds, describe_changes
    from pi2.sharing.fetching import write_atomically

    plan.refuse_file()
    goal = parse_goal(given.target, given.loss, given.method)
    named = find_output(plan.path, plan.settings, given.output)
    check_output(named, None, given.force)
    if given.new_plan is not None:
        check_output(given.new_plan, "plan", given.force)
    partial = named.with_name(f"{named.name}.partial")
    try:
        with ProgressBar() as progress:
            calibration = calibrate_thresholds(
                plan.path,
                given.read_passages(held_out=given.evaluated),
                goal=goal,
                overrides=plan.settings,
                max_error=None if given.error is None else parse_share(given.error, "--error"),
                unfinished=partial,
                progress=progress,
            )
    except KeyboardInterrupt:
        if partial.exists():
            click.echo(f"{partial} has the results so far: the same command goes on", err=True)
        raise
    thresholds = calibration.chosen.thresholds
    write_atomically(named, write_document(thresholds).encode())
    user = given.new_plan or plan.path
    changes = describe_changes(
        calibration.resolved, thresholds, os.path.relpath(named.resolve(), user.resolve().parent)
    )
    if given.new_plan is not None:
        text = write_overlay(refer_from(plan.path, given.new_plan), changes)
        write_atomically(given.new_plan, text.encode())
    if given.as_json:
        click.echo(json.dumps(describe_calibration(calibration, named, changes), indent=2))
        return
    click.echo(write_report(calibration))
    click.echo(f"\n{named}: thresholds of {len(thresholds.layers)} layers", err=True)
    if given.new_plan is not None:
        click.echo(f"next: pi2 run {given.new_plan} --prompt 'Hello'")
    elif calibration.resolved.plan.sparsity is None:
        click.echo(f"\nto use them, write into {plan.path}:\n\n{write_changes(changes)}", err=True)


def find_output(plan: Path, overrides: Mapping[str, object], output: Path | None) -> Path:
    """File of the thresholds; UserError P668 if nothing says where."""
    if output is not None:
        return output
    from pi2.refit import read_plan

    dense = {**overrides, "decode.predictor": "none", "decode.look_ahead": "none"}
    sparsity = read_plan(plan, overrides=dense, thresholds="none").resolved.plan.sparsity
    if sparsity is None or sparsity.thresholds is None:
        raise UserError.of(
            "P668",
            f"{plan} has no [sparsity] that names a file of thresholds",
            help="say where to write them: -o NAME.thresholds.toml",
        )
    return plan.parent / sparsity.thresholds


def parse_goal(target: float | None, loss: str | None, method: str | None) -> Goal | None:
    """What the options ask for; None if nothing."""
    from pi2.measuring.calibration import Goal

    if target is not None and loss is not None:
        raise click.UsageError("--target and --loss are two goals: give one")
    if target is None and loss is None:
        if method is not None:
            raise click.UsageError("--method needs --target or --loss")
        return None
    chosen: Any = method or "cats"
    increase = None if loss is None else parse_share(loss)
    return Goal(method=chosen, target=target, max_increase=increase)


def parse_share(text: str, option: str = "--loss") -> float:
    """Parse a share: ``2%`` or ``0.02``."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 < share < 100:
        raise click.BadParameter(f"{text!r} is no share such as 2% or 0.02", param_hint=option)
    return share


_OF_TRIALS = ("perplexity", "increase", "error", "agreement", "computed", "active")


def describe_calibration(
    calibration: Calibration, file: Path, changes: dict[str, object]
) -> dict[str, Any]:
    return {
        "thresholds": str(file),
        "method": calibration.goal.method,
        "target": calibration.chosen.thresholds.target,
        "max_perplexity_increase": calibration.goal.max_increase,
        "perplexity_before": calibration.chosen.dense_perplexity,
        "scored_tokens": calibration.chosen.scored,
        "tokens_per_s": {
            "dense": calibration.dense_tokens_per_s,
            "thresholds": calibration.chosen.tokens_per_s,
        },
        "calibration_tokens": calibration.chosen.thresholds.tokens,
        "trials": [
            {
                "target": trial.thresholds.target,
                **{key: getattr(trial, key) for key in _OF_TRIALS},
                "scored_tokens": trial.scored,
                "tokens_per_s": trial.tokens_per_s,
            }
            for trial in calibration.trials
        ],
        "layers": [layer.model_dump() for layer in calibration.chosen.thresholds.layers],
        "plan": changes,
    }


def write_report(calibration: Calibration) -> str:
    best = calibration.chosen
    chosen, dense_speed = best.thresholds, f"{calibration.dense_tokens_per_s:.1f}"
    rows = [("0.0 %", f"{best.dense_perplexity:.3f}", "-", *["100.0 %"] * 3, dense_speed)]
    rows += map(list_figures, calibration.trials)
    lines = [
        f"{chosen.model}: {calibration.goal.method}, thresholds from {chosen.tokens} tokens, "
        f"perplexity over up to {max(trial.scored for trial in calibration.trials)} others",
        "",
        *write_table(
            "left out | perplexity | change | same top token | up read | down read | tokens/s", rows
        ),
    ]
    if len(calibration.trials) > 1:
        lines += ["", f"chosen: {chosen.target:.1%}"]
    slower = 1 - best.tokens_per_s / calibration.dense_tokens_per_s
    if slower > 0:
        lines += [
            "",
            f"slower: with thresholds {best.tokens_per_s:.1f} tokens/s, without "
            f"{dense_speed}, in the memory of these plans on this machine. "
            "Keep the dense plan; if neurons come from flash, more memory helps (`--memory`)",
        ]
    return "\n".join(lines)


def list_figures(trial: Trial) -> tuple[str, ...]:
    shares = (trial.agreement, trial.computed, trial.active)
    return (
        f"{trial.thresholds.target * 100:.1f} %",
        f"{trial.perplexity:.3f}",
        f"{trial.increase:+.2%} ± {trial.error:.2%}",
        *(f"{share * 100:.1f} %" for share in shares),
        f"{trial.tokens_per_s:.1f}",
    )


@dataclass(frozen=True, kw_only=True)
class ActivationsOptions(TextOptions):
    output: Path = option("-o", "--output", required=True, metavar="STATS")
    largest: float | None = option(type=click.FloatRange(0, 1, min_open=True), metavar="SHARE")
    samples: int = option(type=click.IntRange(min=0, max=4096), default=256)
    moments: bool = False
    routing: bool = False
    plot: Path | None = option(type=FILE, metavar="FILE")
    replace: bool = option("--force")
    as_json: bool = JSON()


@click.command("activations")
@take_options(ActivationsOptions)
@take_plan()
def activations_command(plan: ChosenPlan, given: ActivationsOptions) -> None:
    """Run PLAN's model on texts and record in STATS how often each neuron fires.

    STATS gets activations.parquet (for `pi2 convert --activations`), coactivations.parquet and
    statistics.json. After Ctrl-C the same command resumes. With --routing STATS gets only
    routing.parquet: the experts of each token, with their weights."""
    from pi2.measuring.activations import RecordingOptions, draw_activations, record_activations

    if given.routing:
        write_routing(plan, given)
        return
    plan.refuse_file()
    if given.plot is not None:
        check_form(find_form(given.plot))
    options = RecordingOptions(largest=given.largest, samples=given.samples, moments=given.moments)
    with ProgressBar() as progress:
        statistics = record_activations(
            plan.path,
            given.read_passages(),
            given.output,
            overrides=plan.overrides,
            options=options,
            replace=given.replace,
            progress=progress,
        )
    if given.plot is not None:
        picture = draw_activations(given.output, statistics, find_form(given.plot))
        write_file(given.plot, picture)
    print_found(asdict(statistics), describe_statistics(statistics), given.as_json)


def write_routing(plan: ChosenPlan, given: ActivationsOptions) -> None:
    """Record and describe routing; UserError P664 if a recording exists, P666 without room."""
    from pi2.measuring.routing import ROUTING, encode_trace, observe_routing

    path = given.output / ROUTING
    if path.exists() and not given.replace:
        raise UserError.of(
            "P664", f"{path} exists already", help="choose another folder, or use --force"
        )
    passages = given.read_passages()
    with ProgressBar() as progress, plan.load(progress) as model:
        trace = observe_routing(model, passages.cut(model), progress)
    try:
        replace_file(path, encode_trace(trace, {"pi2.model": model.plan.model.id}))
    except OSError as error:
        raise UserError.of("P666", f"cannot write {path}: {error.strerror}") from None
    click.echo(describe_routing(trace))


def describe_routing(trace: RoutingTrace) -> str:
    from pi2.measuring.routing import DISTANCES, measure_locality

    tokens, layers, chosen = trace.chosen.shape
    again = " | ".join(f"chosen again within {distance}" for distance in DISTANCES)
    titles = f"layer | experts for 80 % | touched | {again} | tokens shuffled"
    rows = []
    for layer in (*range(layers), None):
        found = measure_locality(trace, layer)
        shares = (found.popular, found.touched, *found.reuse.values())
        mixed = " / ".join(f"{share:.1%}" for share in found.shuffled.values())
        name = "mean" if layer is None else str(layer)
        rows.append((name, *(f"{share:.1%}" for share in shares), mixed))
    head = f"{tokens} tokens, {layers} layers, {chosen} of {trace.experts} experts"
    return "\n".join((head, "", *write_table(titles, rows)))


def describe_statistics(statistics: Statistics) -> str:
    titles = "layer | active | of 2 tokens | of 3 | of 4 | neurons for 80 % | never active"
    rows = [
        (layer.active, *layer.batches[1:], layer.skew, layer.never) for layer in statistics.layers
    ]
    shown = [(number, *(f"{share:.1%}" for share in row)) for number, row in enumerate(rows)]
    lines = [f"{statistics.model}: {statistics.tokens} tokens", "", *write_table(titles, shown), ""]
    if any(layer.active != layer.batches[0] for layer in statistics.layers):
        lines += ["active: of the experts that compute a token; all else: of the whole layer", ""]
    lines.append(f"mean: active {statistics.active:.1%}, neurons for 80 % {statistics.skew:.1%}")
    return "\n".join(lines)
