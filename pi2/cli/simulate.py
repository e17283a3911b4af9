"""Predict what plans do: simulate one, or sweep over many."""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pi2.cli.commands import in_help
from pi2.cli.options import ChosenPlan, add_json_option, suggest_devices, suggest_models, take_plan
from pi2.diagnostics import UserError

if TYPE_CHECKING:
    from pi2.costs.description import Description
    from pi2.plan.documents.device import Device
    from pi2.plan.documents.model import Model
    from pi2.plan.toml.source import Kind
    from pi2.planning.sweep import Place
    from pi2.simulate import SimulationResult


MOST_CELLS = 100_000


@in_help("More commands", "Plan and simulate many devices, models and memory limits.")
@click.command("sweep")
@click.option(
    "--devices",
    metavar="DEVICE",
    multiple=True,
    required=True,
    shell_complete=suggest_devices,
    help=("Devices: short name, path, or quoted pattern."),
)
@click.option(
    "--models",
    metavar="MODEL",
    multiple=True,
    required=True,
    shell_complete=suggest_models,
    help=("Models: short name, path, or quoted pattern."),
)
@click.option(
    "--memory",
    metavar="FIRST:LAST:STEP",
    required=True,
    help="Memory limits, such as 4GiB:24GiB:1GiB.",
)
@click.option(
    "--context",
    type=click.IntRange(1, 2**31 - 1),
    default=2048,
    show_default=True,
    help="Context length in tokens.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Tokens to simulate per cell.",
)
@click.option(
    "--jobs", type=click.IntRange(1, 1024), help=("Number of workers.  [default: one per core]")
)
@click.option(
    "--on",
    type=click.Choice(["processes", "ray"]),
    default="processes",
    show_default=True,
    help=(
        "Where workers run: processes on this machine, or a Ray cluster (needs the extra `ray`)."
    ),
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help=("Output file, Parquet.")
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Plot speed against memory (needs the extra `plot`).",
)
@click.option(
    "--matrix",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Plot which device runs which model how fast (needs the extra `plot`).",
)
def sweep_command(
    devices: tuple[str, ...],
    models: tuple[str, ...],
    memory: str,
    context: int,
    tokens: int,
    jobs: int | None,
    on: Place,
    output: Path,
    plot: Path | None,
    matrix: Path | None,
) -> None:
    """Find and simulate the fastest plan for every device, model and memory limit.

    An interrupted sweep resumes.  Devices that lack figures and requests that cannot be met are
    recorded as results. --on ray uses the cluster that RAY_ADDRESS names, or starts one on this
    machine; cells of lost workers are run again.
    """
    from pi2.cli.commands import ProgressBar
    from pi2.planning.sweep import (
        draw_matrix,
        draw_summary,
        list_cells,
        run_sweep,
        write_matrix,
        write_summary,
    )
    from pi2.sharing.fetching import write_atomically
    from pi2.tracing import check_form

    for path in (plot, matrix):
        if path is not None:
            check_form(path.suffix.lstrip(".") or "png")
    cells = list_cells(
        list(_read_devices(devices)),
        list(_read_models(models)),
        parse_range(memory),
        context=context,
        tokens=tokens,
    )
    if not 0 < len(cells) <= MOST_CELLS:
        raise UserError.of(
            "P105", f"a grid of {len(cells)} cells", help="the devices have less memory, or more"
        )
    with ProgressBar() as progress:
        found = run_sweep(cells, output, jobs=jobs, progress=progress, on=on)
    click.echo("\n".join((*write_summary(found), "", *write_matrix(found))))
    for path, draw in ((plot, draw_summary), (matrix, draw_matrix)):
        if path is not None:
            write_atomically(path, draw(found, path.suffix.lstrip(".") or "png"))
    click.echo(f"{output}: {len(found)} cells", err=True)


def parse_range(text: str) -> list[int]:
    """Sizes of ``FIRST:LAST:STEP``, both ends included, or of one size; UserError P105."""
    from pi2.plan.documents.quantities import BYTE_UNITS, QuantityError, parse_quantity

    try:
        parts = [int(parse_quantity(part, BYTE_UNITS)) for part in text.split(":")]
    except QuantityError as error:
        raise UserError.of(
            "P105",
            f"--memory {text!r}: {error}",
            help="FIRST:LAST:STEP, for example --memory 4GiB:24GiB:1GiB",
        ) from None
    if len(parts) == 1:
        parts = [parts[0], parts[0], 1]
    if len(parts) != 3 or min(parts) <= 0 or parts[1] < parts[0]:
        raise UserError.of(
            "P105", f"--memory {text!r} is no range", help="for example --memory 4GiB:24GiB:1GiB"
        )
    first, last, step = parts
    if (last - first) // step > MOST_CELLS:
        raise UserError.of("P105", f"--memory {text!r} has too many steps")
    return list(range(first, last + 1, step))


def _read_devices(references: tuple[str, ...]) -> Iterator[Device]:
    from pi2.plan.documents.device import Device
    from pi2.planning.wish import read_document

    for reference in expand_references(references, "device"):
        document = read_document(reference, "device").document
        assert isinstance(document, Device)
        yield document


def _read_models(references: tuple[str, ...]) -> Iterator[Model]:
    from pi2.plan.documents.model import Model
    from pi2.planning.wish import read_document

    for reference in expand_references(references, "model"):
        document = read_document(reference, "model").document
        assert isinstance(document, Model)
        yield document


def expand_references(references: tuple[str, ...], kind: Kind) -> Iterator[str]:
    """Paths of patterns, else short names, sorted; UserError P015 for what means nothing."""
    from pi2.plan.reading.references import list_shipped

    for reference in references:
        if not any(sign in reference for sign in "*?["):
            yield reference
            continue
        found = [
            path if os.path.isabs(path) else os.path.join(".", path)
            for path in sorted(glob(reference))
        ]
        found = found or sorted(fnmatch.filter(list_shipped(kind), reference))
        if not found:
            raise UserError.of("P015", f"no {kind} is called {reference!r}")
        yield from found


TRACED_TOKENS = 2
"""Tokens in a trace: more make files that viewers cannot open."""


@in_help("More commands", "Predict what a plan does on its device, without the device.")
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
def simulate_command(
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
    from pi2.cli.commands import ProgressBar
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
    from pi2.simulate import draw_run

    _write(path, draw_run(result, path.suffix.lstrip(".") or "png"))


def _write(path: Path, data: bytes) -> None:
    from pi2.diagnostics import UserError

    try:
        path.write_bytes(data)
    except OSError as error:
        raise UserError.of("P631", f"cannot write {path}: {error.strerror}") from None
