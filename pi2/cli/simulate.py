"""Predict what plans do: simulate one, or sweep over many."""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from pi2.cli.options import (
    COUNT,
    FILE,
    JSON,
    ChosenPlan,
    find_form,
    option,
    print_found,
    read_device,
    read_model,
    suggest_devices,
    suggest_models,
    take_options,
    take_plan,
    write_file,
)
from pi2.diagnostics import UserError
from pi2.progress import ProgressBar

if TYPE_CHECKING:
    from pi2.costs.cost import Description
    from pi2.plan.toml.source import Kind


MOST_CELLS = 100_000


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    devices: tuple[str, ...] = option(
        metavar="DEVICE", required=True, shell_complete=suggest_devices
    )
    models: tuple[str, ...] = option(metavar="MODEL", required=True, shell_complete=suggest_models)
    memory: str = option(metavar="FIRST:LAST:STEP", required=True)
    context: int = option(type=COUNT, default=2048)
    tokens: int = option(type=click.IntRange(min=1), default=64)
    jobs: int | None = option(type=click.IntRange(1, 1024))
    on: Literal["processes", "ray"] = "processes"
    output: Path = option("-o", "--output", required=True)
    plot: Path | None = option(type=FILE)
    matrix: Path | None = option(type=FILE)


@click.command("sweep")
@take_options(SweepOptions)
def sweep_command(given: SweepOptions) -> None:
    """Find and simulate the fastest plan for every device, model and memory limit.

    An interrupted sweep resumes.  Devices that lack figures and requests that cannot be met are
    recorded as results. --on ray uses the cluster that RAY_ADDRESS names, or starts one on this
    machine; cells of lost workers are run again."""
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

    for path in (given.plot, given.matrix):
        if path is not None:
            check_form(find_form(path))
    cells = list_cells(
        [read_device(item) for item in expand_references(given.devices, "device")],
        [read_model(item) for item in expand_references(given.models, "model")],
        parse_range(given.memory),
        context=given.context,
        tokens=given.tokens,
    )
    if not 0 < len(cells) <= MOST_CELLS:
        raise UserError.of(
            "P105", f"a grid of {len(cells)} cells", help="the devices have less memory, or more"
        )
    with ProgressBar() as progress:
        found = run_sweep(cells, given.output, jobs=given.jobs, progress=progress, on=given.on)
    click.echo("\n".join((*write_summary(found), "", *write_matrix(found))))
    for path, draw in ((given.plot, draw_summary), (given.matrix, draw_matrix)):
        if path is not None:
            write_atomically(path, draw(found, find_form(path)))
    click.echo(f"{given.output}: {len(found)} cells", err=True)


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


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    tokens: int = option(type=click.IntRange(min=1), default=1024)
    prompt: int = option(type=click.IntRange(min=1), default=64)
    seed: int = option(type=click.IntRange(min=0), default=0)
    trace: Path | None = option(type=FILE)
    plot: Path | None = option(type=FILE)
    as_json: bool = JSON()


@click.command("simulate")
@take_options(SimulateOptions)
@take_plan()
def simulate_command(plan: ChosenPlan, given: SimulateOptions) -> None:
    """Simulate PLAN on the device that it names.

    All results are simulated, never measured; the last line shows where the figures of the device
    and the model come from."""
    tokens = given.tokens
    from pi2.simulate import draw_run, read_inputs, simulate

    tokens = fit_context(given.prompt, tokens, plan.resolved.plan.kv.context)
    inputs = read_inputs(plan.measured)
    with ProgressBar() as bar:
        result = simulate(
            inputs,
            prompt_tokens=given.prompt,
            tokens=tokens,
            seed=given.seed,
            progress=lambda share: bar("simulating", share),
        )
    if given.trace is not None:
        write_trace(given.trace, inputs, given.prompt, given.seed)
    if given.plot is not None:
        write_file(given.plot, draw_run(result, find_form(given.plot)))
    print_found(result.describe(), result.summarise(), given.as_json)


def fit_context(prompt: int, tokens: int, context: int) -> int:
    """Tokens that fit behind the prompt; UserError P601 if none do."""
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
    from pi2.simulate import trace_decode
    from pi2.tracing import make_chrome_trace

    recorder = trace_decode(inputs, prompt_tokens=prompt_tokens, tokens=TRACED_TOKENS, seed=seed)
    notes = {"simulated": "true", "plan": inputs.name, "plan_digest": inputs.digest}
    process = "pi2 simulate (simulated, not measured)"
    document = make_chrome_trace(recorder, notes, process=process, category="simulated")
    write_file(path, json.dumps(document).encode())
