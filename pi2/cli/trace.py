"""Record a timeline of a run, for Perfetto and Chrome."""

from __future__ import annotations

import json
from pathlib import Path

import click

from pi2.cli.options import ChosenPlan, take_plan

GROUP = "More commands"


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
def command(plan: ChosenPlan, output: Path, prompt: str, tokens: int, warm_up: int) -> None:
    """Run PLAN for a few tokens and record a timeline.

    The trace has a lane for each compute thread, each unit beside the CPU, and each thread or queue
    that reads, arrows from reads to the kernels that waited for them, and counters of the neuron
    cache.  Open it at ui.perfetto.dev or chrome://tracing.  A summary of where the time went, and
    of how long units worked at the same time, is printed.
    """
    from pi2.benchmarks.recording import record_run
    from pi2.cli.progress import ProgressBar
    from pi2.sharing.files import write_report
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
