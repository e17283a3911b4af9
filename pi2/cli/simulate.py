"""Predict what a plan does on its device, without the device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pi2.cli.options import ChosenPlan, add_json_option, take_plan

if TYPE_CHECKING:
    from pi2.costs.description import Description
    from pi2.simulate import SimulationResult

GROUP = "More commands"

TRACED_TOKENS = 2
"""Tokens in a trace: more make files that viewers cannot open."""


@click.command("simulate")
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    help="Tokens to generate.",
)
@click.option(
    "--prompt",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Prompt length in tokens.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Random seed.",
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False),
    help=f"Write {TRACED_TOKENS} tokens as a Chrome or Perfetto trace.",
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Plot the times between tokens (needs the extra `plot`).",
)
@take_plan()
@add_json_option
def command(
    plan: ChosenPlan,
    tokens: int,
    prompt: int,
    seed: int,
    trace: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Simulate PLAN on the device that it names.

    All results are simulated, never measured; the last line shows where the figures of the device
    and the model come from.
    """
    from pi2.cli.progress import ProgressBar
    from pi2.simulate import read_inputs, simulate

    tokens = fit_context(prompt, tokens, plan.resolved.plan.kv.context)
    inputs = read_inputs(plan.resolved)
    with ProgressBar() as bar:
        result = simulate(
            inputs,
            prompt_tokens=prompt,
            tokens=tokens,
            seed=seed,
            progress=lambda share: bar("simulating", share),
        )
    if trace is not None:
        write_trace(trace, inputs, prompt, seed)
    if plot is not None:
        write_plot(plot, result)
    click.echo(json.dumps(result.describe(), indent=2) if as_json else result.summarise())


def fit_context(prompt: int, tokens: int, context: int) -> int:
    """Tokens that fit behind a prompt; UserError P601 where the prompt leaves no room, as in a
    run."""
    from pi2.diagnostics import UserError

    room = context - prompt
    if room < 1:
        raise UserError.of(
            "P601",
            f"{prompt} tokens of prompt leave no room in the plan's context of {context}",
            help=f"--prompt {context - 1} is the most, or raise kv.context",
        )
    if tokens > room:
        click.echo(f"note: the plan's context ends after {room} tokens", err=True)
    return min(tokens, room)


def write_trace(path: Path, inputs: Description, prompt_tokens: int, seed: int) -> None:
    """Write the first tokens as a trace; UserError P631 if it cannot be written."""
    from pi2.simulate.decode import trace_decode
    from pi2.tracing import make_chrome_trace

    recorder = trace_decode(inputs, prompt_tokens=prompt_tokens, tokens=TRACED_TOKENS, seed=seed)
    notes = {"simulated": "true", "plan": inputs.name, "plan_digest": inputs.digest}
    process = "pi2 simulate (simulated, not measured)"
    document = make_chrome_trace(recorder, notes, process=process, category="simulated")
    _write(path, json.dumps(document).encode())


def write_plot(path: Path, result: SimulationResult) -> None:
    """Write a picture; UserError P632 without matplotlib."""
    from pi2.simulate.plot import draw_run

    _write(path, draw_run(result, path.suffix.lstrip(".") or "png"))


def _write(path: Path, data: bytes) -> None:
    from pi2.diagnostics import UserError

    try:
        path.write_bytes(data)
    except OSError as error:
        raise UserError.of("P631", f"cannot write {path}: {error.strerror}") from None
