"""Record which neurons fire on a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pi2.cli.options import (
    ChosenPlan,
    add_json_option,
    add_path_option,
    add_text_options,
    take_plan,
)
from pi2.diagnostics import UserError

if TYPE_CHECKING:
    from pi2.statistics.recording import Statistics
    from pi2.statistics.routing import RoutingTrace

GROUP = "More commands"


@click.command("activations")
@add_text_options("UTF-8 text; repeatable.")
@add_path_option(
    "-o",
    "--output",
    required=True,
    metavar="STATS",
    text="Output folder of the statistics.",
)
@click.option(
    "--largest",
    type=click.FloatRange(0, 1, min_open=True),
    metavar="SHARE",
    help=(
        "For SiLU and GELU: count this share of a token's neurons, those of "
        "largest magnitude, as active."
    ),
)
@click.option(
    "--samples",
    type=click.IntRange(min=0, max=4096),
    default=256,
    show_default=True,
    help="Neurons per layer whose co-activation is counted; 0 for none.",
)
@click.option(
    "--moments",
    is_flag=True,
    help="Also record second moments of the inputs of weights, for `pi2 convert --quantizer`.",
)
@click.option(
    "--routing",
    is_flag=True,
    help="For mixtures: record only which experts compute each token, for `pi2 replay`.",
)
@add_path_option(
    "--plot",
    dir_okay=False,
    text="Write a plot (needs the extra `plot`).",
)
@click.option(
    "--force", "--replace", "replace", is_flag=True, help="Overwrite the statistics of another run."
)
@take_plan()
@add_json_option
def command(
    plan: ChosenPlan,
    files: tuple[Path, ...],
    output: Path,
    context: int | None,
    windows: int | None,
    largest: float | None,
    samples: int,
    moments: bool,
    routing: bool,
    plot: Path | None,
    replace: bool,
    as_json: bool,
) -> None:
    """Run PLAN's model on texts and record in STATS how often each neuron fires.

    STATS gets activations.parquet (for `pi2 convert --activations`), coactivations.parquet and
    statistics.json.  After Ctrl-C the same command resumes.  With --routing STATS gets
    routing.parquet alone: the experts of each token, with their weights.
    """
    from pi2.cli.progress import ProgressBar
    from pi2.pictures import check_form
    from pi2.statistics.recording import RecordingOptions, record_activations
    from pi2.statistics.texts import read_texts

    if routing:
        write_routing(plan, read_texts(files), output, context, windows, replace)
        return
    if plot is not None:
        check_form(find_form(plot))
    options = RecordingOptions(
        context=context, windows=windows, largest=largest, samples=samples, moments=moments
    )
    with ProgressBar() as progress:
        statistics = record_activations(
            plan.path,
            read_texts(files),
            output,
            overrides=plan.overrides,
            options=options,
            replace=replace,
            progress=progress,
        )
    if plot is not None:
        write_plot(plot, output, statistics)
    click.echo(write_json(statistics) if as_json else write_table(statistics))


def write_routing(
    plan: ChosenPlan,
    texts: list[str],
    folder: Path,
    context: int | None,
    windows: int | None,
    replace: bool,
) -> None:
    """Record routing, and say how it repeats itself; UserError P664 if there is a recording and
    ``replace`` is not said, P666 if it cannot be written."""
    from pi2.cli.progress import ProgressBar
    from pi2.statistics.routing import ROUTING, encode_trace, record_routing

    path = folder / ROUTING
    if path.exists() and not replace:
        raise UserError.of(
            "P664", f"{path} is there already", help="choose another folder, or use --force"
        )
    with ProgressBar() as progress:
        trace, notes = record_routing(
            plan.path,
            texts,
            overrides=plan.overrides,
            context=context,
            windows=windows,
            progress=progress,
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".part")
        temporary.write_bytes(encode_trace(trace, notes))
        temporary.replace(path)
    except OSError as error:
        raise UserError.of("P666", f"cannot write {path}: {error.strerror}") from None
    click.echo(describe_routing(trace))


def describe_routing(trace: RoutingTrace) -> str:
    """How routing repeats itself, as Markdown."""
    from pi2.statistics.routing import DISTANCES, measure_locality

    tokens, layers, chosen = trace.chosen.shape
    titles = " | ".join(f"chosen again within {distance}" for distance in DISTANCES)
    lines = [
        f"{tokens} tokens, {layers} layers, {chosen} of {trace.experts} experts",
        "",
        f"| layer | experts for 80 % | touched | {titles} | tokens shuffled |",
        "|---|---|---|" + "---|" * (len(DISTANCES) + 1),
    ]
    for layer in (*range(layers), None):
        found = measure_locality(trace, layer)
        shares = (found.popular, found.touched, *found.reuse.values())
        mixed = " / ".join(f"{share:.1%}" for share in found.shuffled.values())
        name = "mean" if layer is None else str(layer)
        lines.append(f"| {name} | {' | '.join(f'{x:.1%}' for x in shares)} | {mixed} |")
    return "\n".join(lines)


def write_plot(path: Path, folder: Path, statistics: Statistics) -> None:
    """Write a picture; UserError P631 if it cannot be written, P632 without matplotlib."""
    from pi2.statistics.plot import draw_activations

    data = draw_activations(folder, statistics, find_form(path))
    try:
        path.write_bytes(data)
    except OSError as error:
        raise UserError.of("P631", f"cannot write {path}: {error.strerror}") from None


def find_form(path: Path) -> str:
    """Type of a picture, by its file's name."""
    return path.suffix.lstrip(".").lower() or "png"


def write_json(statistics: Statistics) -> str:
    """The summary for programs."""
    from dataclasses import asdict

    return json.dumps(asdict(statistics), indent=2)


def write_table(statistics: Statistics) -> str:
    """The summary for people, as Markdown."""
    lines = [
        f"{statistics.model}: {statistics.tokens} tokens",
        "",
        "| layer | active | of 2 tokens | of 3 | of 4 | neurons for 80 % | never active |",
        "|---|---|---|---|---|---|---|",
    ]
    for number, layer in enumerate(statistics.layers):
        shares = (layer.active, *layer.batches[1:], layer.skew, layer.never)
        lines.append(f"| {number} | {' | '.join(f'{share:.1%}' for share in shares)} |")
    lines.append("")
    if any(layer.active != layer.batches[0] for layer in statistics.layers):
        lines += ["active: of the experts that compute a token; all else: of the whole layer", ""]
    lines.append(f"mean: active {statistics.active:.1%}, neurons for 80 % {statistics.skew:.1%}")
    return "\n".join(lines)
