"""Record what a plan does, for Chrome's and Perfetto's viewers."""

from __future__ import annotations

import json
from pathlib import Path

import click

from pi2.cli.options import add_set_option
from pi2.plan.composing.overrides import parse_assignments


@click.command("trace")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("trace.json"),
    show_default=True,
    help="File of the trace.",
)
@click.option("-p", "--prompt", default="The", show_default=True, help="Text to begin with.")
@click.option(
    "-n",
    "--tokens",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    help="Tokens to generate while everything is recorded.",
)
@click.option(
    "--warm-up",
    type=click.IntRange(min=0),
    default=8,
    show_default=True,
    help="Tokens between the prompt and those, so that the cache is as it usually is.",
)
@add_set_option
def command(
    plan: Path, output: Path, prompt: str, tokens: int, warm_up: int, settings: tuple[str, ...]
) -> None:
    """Run PLAN for a few tokens and write what happened when.

    The trace has a lane for every compute thread and every thread or queue that reads, arrows from
    reads to what waited for them, and counters of the neuron cache.  Open it at ui.perfetto.dev or
    chrome://tracing.  Where the time went is printed.
    """
    from pi2.benchmarks.recording import record_run
    from pi2.cli.progress import ProgressBar
    from pi2.orchestrator import load
    from pi2.sharing.files import write_report
    from pi2.tracing import make_chrome_trace

    with ProgressBar() as bar, load(plan, set=parse_assignments(settings), progress=bar) as model:
        ids = model.encode(prompt)
        recorder, summary = record_run(model, ids, tokens, warm_up=warm_up)
        notes = {"plan": str(plan), "plan_digest": model.plan.digest, "summary": summary.describe()}
    document = make_chrome_trace(recorder, notes, process="pi2 (measured)", category="measured")
    write_report(output, json.dumps(document))
    click.echo(f"{output}: {summary.describe()}")
