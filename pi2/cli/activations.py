"""Record activations and timelines, and replay routing."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pi2.cli.commands import in_help
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
    from pi2.statistics.routing import Replay, RoutingTrace


SHARES = ("5%", "10%", "20%", "30%", "50%", "70%")


@in_help("More commands", "Replay recorded routing through caches of experts.")
@click.command("replay")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice(["lru", "lfu", "lru-layer", "lfu-layer", "belady", "belady-layer"]),
    help="Cache policy, repeatable: for all layers together, or one cache by layer. Default: all.",
)
@click.option(
    "--memory",
    "sizes",
    multiple=True,
    metavar="SIZE",
    help="Size of the cache, repeatable: '4 GiB', or a share of all experts such as '30%'.",
)
@click.option(
    "--skip",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="First tokens that fill the cache and are not counted, such as a prompt's.",
)
@add_path_option("--plot", dir_okay=False, text="Write a plot (needs the extra `plot`).")
@add_json_option
def replay_command(
    trace: Path,
    policies: tuple[str, ...],
    sizes: tuple[str, ...],
    skip: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Take the experts of TRACE (routing.parquet of `pi2 activations --routing`) through caches.

    belady knows what comes: no policy can be better.
    """
    from pi2.statistics.routing import POLICIES, ROUTING, read_trace, replay_trace
    from pi2.tracing import check_form

    if plot is not None:
        check_form(find_form(plot))
    found = read_trace(trace / ROUTING if trace.is_dir() else trace)
    if skip >= len(found.chosen):
        raise click.BadParameter(f"the trace has {len(found.chosen)} tokens", param_hint="--skip")
    slots = [count_slots(size, found) for size in sizes or SHARES]
    chosen = [policy for policy in POLICIES if not policies or policy in policies]
    rows = [[replay_trace(found, policy, count, skip=skip) for count in slots] for policy in chosen]
    if plot is not None:
        write_hits_plot(plot, rows)
    if as_json:
        click.echo(json.dumps([asdict(item) for row in rows for item in row], indent=2))
    else:
        click.echo(write_hits(found, rows, slots))


def count_slots(size: str, trace: RoutingTrace) -> int:
    """Experts that a size has room for; UserError P552 for one that cannot be read, or that has no
    room for one token's."""
    from pi2.plan.documents.quantities import BYTE_UNITS, QuantityError, parse_quantity

    layers, chosen = trace.chosen.shape[1:]
    every = layers * trace.experts
    try:
        if size.strip().endswith("%"):
            count = round(float(size.strip()[:-1]) / 100 * every)
        else:
            size_bytes = int(parse_quantity(size, BYTE_UNITS))
            if not trace.expert_bytes:
                raise QuantityError("the trace does not say how large an expert is")
            count = size_bytes // trace.expert_bytes
    except (QuantityError, ValueError) as error:
        raise UserError.of("P552", f"{size!r}: {error}", help="write '4 GiB' or '30%'") from None
    if count < chosen:
        raise UserError.of(
            "P552",
            f"{size} holds {count} experts, and a layer needs {chosen} for a token",
            help="give a larger --memory",
        )
    return int(min(count, every))


def write_hits(trace: RoutingTrace, rows: list[list[Replay]], slots: list[int]) -> str:
    """Hit rates by policy and size, as Markdown, and what a token reads."""
    from pi2.plan.documents.quantities import approximate_bytes

    tokens, layers, chosen = trace.chosen.shape
    demand = layers * chosen
    every = layers * trace.experts
    size = trace.expert_bytes

    def name(count: int) -> str:
        share = f"{count / every:.1%}"
        return f"{approximate_bytes(count * size)} ({share})" if size else share

    lines = [
        f"{tokens} tokens; a token needs {layers} layers x {chosen} experts = {demand} experts"
        + (f", {approximate_bytes(demand * size)}" if size else ""),
        "",
        f"| hits | {' | '.join(map(name, slots))} |",
        "|---|" + "---|" * len(slots),
    ]
    lines += [
        f"| {row[0].policy} | {' | '.join(f'{item.hit_rate:.1%}' for item in row)} |"
        for row in rows
    ]
    small = [name(count) for count in slots if count < demand]
    if small:
        lines += ["", f"Smaller than one token's demand: {', '.join(small)}."]
    if size and rows:
        best = [min(row[place].reads_token for row in rows) for place in range(len(slots))]
        parts = [approximate_bytes(round(count * size)) for count in best]
        lines += ["", f"Least that a token reads: {', '.join(parts)}."]
    return "\n".join(lines)


def write_hits_plot(path: Path, rows: list[list[Replay]]) -> None:
    """Draw hit rates over sizes; UserError P631 if the file cannot be written."""
    from pi2.tracing import add_legend, make_figure, pick_styles, save_figure

    figure = make_figure(7, 4)
    axes = figure.subplots()
    for row, style in zip(rows, pick_styles(len(rows)), strict=True):
        shares = [100 * item.share for item in row]
        axes.plot(shares, [100 * item.hit_rate for item in row], label=row[0].policy, **style)
    axes.set_xlabel("cache, % of all experts")
    axes.set_ylabel("experts found in memory, %")
    axes.set_ylim(0, 100)
    add_legend(axes)
    try:
        path.write_bytes(save_figure(figure, find_form(path)))
    except OSError as error:
        raise UserError.of("P631", f"cannot write {path}: {error.strerror}") from None


@in_help("More commands", "Record a timeline of a run, for Perfetto and Chrome.")
@click.command("trace")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("trace.json"),
    show_default=True,
    help="Output file of the trace.",
)
@click.option("-p", "--prompt", default="The", show_default=True, help="Prompt.")
@click.option(
    "-n",
    "--tokens",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    help="Tokens to record.",
)
@click.option(
    "--warm-up",
    type=click.IntRange(min=0),
    default=8,
    show_default=True,
    help="Tokens to generate before recording, so that the neuron cache is warm.",
)
@take_plan()
def trace_command(plan: ChosenPlan, output: Path, prompt: str, tokens: int, warm_up: int) -> None:
    """Run PLAN for a few tokens and record a timeline.

    The trace has a lane for each compute thread, each unit beside the CPU, and each thread or queue
    that reads, arrows from reads to the kernels that waited for them, and counters of the neuron
    cache.  Open it at ui.perfetto.dev or chrome://tracing.  A summary of where the time went, and
    of how long units worked at the same time, is printed.
    """
    from pi2.benchmarks.recording import record_run
    from pi2.cli.commands import ProgressBar
    from pi2.sharing.fetching import write_report
    from pi2.tracing import make_chrome_trace

    with ProgressBar() as bar, plan.load(bar) as model:
        ids = model.encode(prompt)
        recorder, summary = record_run(model, ids, tokens, warm_up=warm_up)
        notes = {
            "plan": str(plan.path),
            "plan_digest": model.plan.digest,
            "summary": summary.describe(),
        }
    document = make_chrome_trace(recorder, notes, process="pi2 (measured)", category="measured")
    write_report(output, json.dumps(document))
    click.echo(f"{output}: {summary.describe()}")


@in_help("More commands", "Record which neurons fire on a text.")
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
def activations_command(
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
    from pi2.cli.commands import ProgressBar
    from pi2.statistics.recording import RecordingOptions, record_activations
    from pi2.statistics.texts import read_texts
    from pi2.tracing import check_form

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
    from pi2.cli.commands import ProgressBar
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
    from pi2.statistics.prediction import draw_activations

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
