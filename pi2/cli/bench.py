"""Measure plans and models: speed, perplexity, timelines, and caches of experts."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from pi2.cli.options import (
    FILE,
    JSON,
    MEMORY,
    SET,
    ChosenPlan,
    TextOptions,
    choose_plan,
    find_form,
    option,
    print_found,
    suggest_plans,
    take_options,
    take_plan,
    write_file,
)
from pi2.diagnostics import UserError
from pi2.plan.documents.quantities import (
    BYTE_UNITS,
    QuantityError,
    approximate_bytes,
    parse_quantity,
    write_table,
)
from pi2.progress import ProgressBar
from pi2.tracing import (
    add_legend,
    check_form,
    make_chrome_trace,
    make_figure,
    pick_styles,
    save_figure,
)

if TYPE_CHECKING:
    from pi2.measuring.routing import Replay, RoutingTrace
    from pi2.measuring.session import Outcome


WORDS = ("reference", "gate", "low-rank", "llama.cpp")


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(TextOptions):
    stride: int | None = option(type=click.IntRange(min=1))
    against: tuple[str, ...] = option(metavar="WHAT")
    as_json: bool = JSON()


@click.command("evaluate")
@take_options(EvaluateOptions)
@take_plan()
def evaluate_command(plan: ChosenPlan, given: EvaluateOptions) -> None:
    """Measure the perplexity of PLAN's model on texts.

    The text is scored densely (every neuron is computed), then sparsely (only neurons that the
    plan's predictor selects), and both are compared token by token.  The recall of low-rank
    predictors is counted layer by layer.  Each token is scored once, with at least CONTEXT - STRIDE
    tokens before it."""
    from pi2.measuring.evaluation import evaluate_plan, write_markdown

    with ProgressBar() as progress:
        evaluation = evaluate_plan(
            plan.fitted,
            given.read_passages(stride=given.stride),
            against=[item if item in WORDS else name_other(item) for item in given.against],
            progress=progress,
        )
    print_found(asdict(evaluation), write_markdown(evaluation), given.as_json)


def name_other(name: str) -> str:
    """The path of another plan; UserError P663 for a name that nothing has."""
    from pi2.cli.documents import find_plan_path

    try:
        return str(find_plan_path(Path(name)))
    except UserError as error:
        (found,) = error.diagnostics
        help_text = f"use reference, gate, low-rank, or another plan; {found.help}"
        raise UserError.of("P663", f"cannot compare with {name!r}", help=help_text) from None


def parse_lengths(ctx: click.Context, option: click.Parameter, text: str) -> tuple[int, ...]:
    """``"128,512"`` becomes (128, 512)."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise click.BadParameter(f"expected whole numbers such as 128,512, not {text!r}")
    return tuple(int(part) for part in parts)


def parse_counts(
    ctx: click.Context, option: click.Parameter, text: str | None
) -> tuple[int, ...] | None:
    """``"1,4"`` becomes (1, 4)."""
    if text is None:
        return None
    counts = parse_lengths(ctx, option, text)
    if 0 in counts:
        raise click.BadParameter("expected at least one sequence")
    return counts


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    prompt: str | None = option("-p", "--prompt", metavar="TEXT")
    prompt_tokens: tuple[int, ...] = option(
        callback=parse_lengths, metavar="N,...", default="128,512"
    )
    max_tokens: tuple[int, ...] = option(
        "-n", "--max-tokens", callback=parse_lengths, metavar="N,...", default="64"
    )
    depth: tuple[int, ...] = option(
        "-d", "--depth", callback=parse_lengths, metavar="N,...", default="0"
    )
    sequences: tuple[int, ...] | None = option(callback=parse_counts, metavar="N,...")
    repetitions: int = option("-r", "--repetitions", type=click.IntRange(min=1), default=5)
    form: Literal["md", "json", "csv"] = option("--format", default="md")
    output: Path | None = option("-o", "--output", type=FILE, metavar="FILE")
    with_profile: bool = option("--profile")
    text: Path | None = None
    memory: str | None = MEMORY()
    settings: tuple[str, ...] = SET()


@click.command("bench")
@click.argument(
    "plans",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path),
    metavar="PLAN...",
    shell_complete=suggest_plans,
)
@take_options(BenchOptions)
def bench_command(plans: tuple[Path, ...], given: BenchOptions) -> None:
    """Measure how fast each PLAN processes prompts and generates tokens.

    Each test runs once as a warm-up, then repeatedly; results go to standard output.  The memory's
    read bandwidth is measured in the same run, and the bytes that a token must read are counted.
    The results show the distance to that limit."""
    from pi2.measuring import report
    from pi2.measuring.report import describe_conditions, list_workloads
    from pi2.measuring.session import Course, measure_plan

    form: str = given.form
    output, prompts, text = given.output, given.prompt_tokens, given.prompt
    if str(output) in ("md", "json", "csv"):
        click.echo(f"warning: -o names a file: write --format {output}", err=True)
        form, output = str(output), None
    if text is not None and re.fullmatch(r"\d+(,\d+)*", text):
        click.echo(f"warning: -p is the prompt's text: write --prompt-tokens {text}", err=True)
        prompts, text = tuple(map(int, text.split(","))), None
    name = None if text is None else "--prompt"
    if given.text is not None:
        name, text = given.text.name, read_text(given.text)
    chosen = [choose_plan(plan, given.settings, given.memory) for plan in plans]
    counts = prompts, given.max_tokens, given.depth
    workloads = list_workloads(*counts, given.sequences or (None,))
    if not workloads:
        raise click.UsageError("nothing to measure: give --prompt-tokens or --max-tokens")
    if given.sequences is not None:
        longest = max(own.depth + own.tokens for own in workloads)
        chosen = [change_sequences(plan, max(given.sequences), longest) for plan in chosen]
    conditions = describe_conditions(name)
    outcomes: list[Outcome] = []
    course = Course(
        workloads=workloads,
        repetitions=given.repetitions,
        with_profile=given.with_profile,
        text=text,
    )
    for plan in chosen:
        with ProgressBar() as progress:
            outcomes += measure_plan(plan.fitted, course, progress=progress)
    write = {"md": report.write_markdown, "json": report.write_json, "csv": report.write_csv}
    write_results(write[form](conditions, outcomes), output)


def change_sequences(plan: ChosenPlan, count: int, context: int) -> ChosenPlan:
    """Let the plan run ``count`` sequences, in the context that tests need if it states none."""
    is_free = ("kv", "context") in plan.resolved.derived
    return plan.change({"decode.batch": count} | ({"kv.context": context} if is_free else {}))


def write_results(text: str, output: Path | None) -> None:
    if output is None:
        click.echo(text)
        return
    from pi2.sharing.fetching import write_report

    write_report(output, text if text.endswith("\n") else f"{text}\n")


def read_text(path: Path) -> str:
    """Text to take tokens from; UserError P641 if it cannot be read."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError.of("P641", f"cannot read the text {path}: {error}") from None


SHARES = ("5%", "10%", "20%", "30%", "50%", "70%")


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    policies: tuple[str, ...] = option(
        "--policy",
        type=click.Choice(["lru", "lfu", "lru-layer", "lfu-layer", "belady", "belady-layer"]),
    )
    sizes: tuple[str, ...] = option("--memory", metavar="SIZE")
    skip: int = option(type=click.IntRange(min=0), default=0)
    plot: Path | None = option(type=FILE, metavar="FILE")
    as_json: bool = JSON()


@click.command("replay")
@click.argument("trace", type=click.Path(path_type=Path))
@take_options(ReplayOptions)
def replay_command(trace: Path, given: ReplayOptions) -> None:
    """Take the experts of TRACE (routing.parquet of `pi2 activations --routing`) through caches.

    belady is the optimal policy, as an upper bound."""
    from pi2.measuring.routing import POLICIES, ROUTING, read_trace, replay_trace

    if given.plot is not None:
        check_form(find_form(given.plot))
    found = read_trace(trace / ROUTING if trace.is_dir() else trace)
    if given.skip >= len(found.chosen):
        raise click.BadParameter(f"the trace has {len(found.chosen)} tokens", param_hint="--skip")
    slots = [count_slots(size, found) for size in given.sizes or SHARES]
    chosen = [policy for policy in POLICIES if not given.policies or policy in given.policies]
    rows = [
        [replay_trace(found, policy, count, skip=given.skip) for count in slots]
        for policy in chosen
    ]
    if given.plot is not None:
        write_hits_plot(given.plot, rows)
    values = [asdict(item) for row in rows for item in row]
    print_found(values, write_hits(found, rows, slots), given.as_json)


def count_slots(size: str, trace: RoutingTrace) -> int:
    """Experts that fit into ``size``; UserError P552 if it is invalid or too small for a token."""
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
        *write_table(
            " | ".join(("hits", *map(name, slots))),
            ((row[0].policy, *(f"{item.hit_rate:.1%}" for item in row)) for row in rows),
        ),
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
    figure = make_figure(7, 4)
    axes = figure.subplots()
    for row, style in zip(rows, pick_styles(len(rows)), strict=True):
        shares = [100 * item.share for item in row]
        axes.plot(shares, [100 * item.hit_rate for item in row], label=row[0].policy, **style)
    axes.set_xlabel("cache, % of all experts")
    axes.set_ylabel("experts found in memory, %")
    axes.set_ylim(0, 100)
    add_legend(axes)
    write_file(path, save_figure(figure, find_form(path)))


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    output: Path = option("-o", "--output", type=FILE, default=Path("trace.json"))
    prompt: str = option("-p", "--prompt", default="The")
    tokens: int = option("-n", "--max-tokens", type=click.IntRange(1, 64), default=4)
    warm_up: int = option(type=click.IntRange(min=0), default=8)


@click.command("trace")
@take_options(TraceOptions)
@take_plan()
def trace_command(plan: ChosenPlan, given: TraceOptions) -> None:
    """Run PLAN for a few tokens and record a timeline.

    The trace has a lane for each compute thread, each other unit, and each reading thread or queue.
    Arrows lead from reads to the kernels that waited for them, and counters show the neuron cache.
    Open it at ui.perfetto.dev or chrome://tracing. A summary of the time, and of units that worked
    at the same time, is printed."""
    from pi2.measuring.timeline import record_run
    from pi2.sharing.fetching import write_report

    with ProgressBar() as bar, plan.load(bar) as model:
        ids = model.encode(given.prompt)
        recorder, summary = record_run(model, ids, given.tokens, warm_up=given.warm_up)
        notes = {
            "plan": str(plan.path),
            "plan_digest": model.plan.digest,
            "summary": summary.describe(),
        }
    document = make_chrome_trace(recorder, notes, process="pi2 (measured)", category="measured")
    write_report(given.output, json.dumps(document))
    click.echo(f"{given.output}: {summary.describe()}")
