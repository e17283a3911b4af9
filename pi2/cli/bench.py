"""Measure a plan's speed, and its model's perplexity."""

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
    option,
    print_found,
    suggest_plans,
    take_options,
    take_plan,
)
from pi2.diagnostics import UserError
from pi2.progress import ProgressBar

if TYPE_CHECKING:
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
