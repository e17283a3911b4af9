"""Predict what plans do: simulate one, sweep over many, compare two."""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from pi2.authoring.difference import (
    Change,
    LayerChange,
    SegmentChange,
    compare_documents,
    compare_layers,
    compare_plans,
    compare_segments,
)
from pi2.cli.documents import find_document_path
from pi2.cli.options import (
    COUNT,
    FILE,
    JSON,
    ChosenPlan,
    add_json_option,
    find_form,
    measure_host,
    option,
    print_found,
    read_device,
    read_model,
    read_sound,
    suggest_devices,
    suggest_models,
    suggest_plans,
    take_options,
    take_plan,
    write_file,
)
from pi2.diagnostics import UserError
from pi2.fitting.check import Report
from pi2.plan.arithmetic.resolved import ResolvedLayer, ResolvedPlan
from pi2.plan.arithmetic.sizes import describe_computed
from pi2.plan.documents.quantities import (
    BYTE_UNITS,
    QuantityError,
    approximate_bytes,
    approximate_number,
    parse_quantity,
)
from pi2.plan.reading.references import list_shipped
from pi2.plan.toml.source import Kind
from pi2.plan.toml.text import write_value
from pi2.progress import ProgressBar
from pi2.tracing import check_form, make_chrome_trace
from pi2.weights.file_reading import find_kind

if TYPE_CHECKING:
    from pi2.costs.cost import Description


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
    from pi2.simulate import draw_run, read_inputs, simulate

    tokens = fit_context(given.prompt, given.tokens, plan.resolved.plan.kv.context)
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

    recorder = trace_decode(inputs, prompt_tokens=prompt_tokens, tokens=TRACED_TOKENS, seed=seed)
    notes = {"simulated": "true", "plan": inputs.name, "plan_digest": inputs.digest}
    process = "pi2 simulate (simulated, not measured)"
    document = make_chrome_trace(recorder, notes, process=process, category="simulated")
    write_file(path, json.dumps(document).encode())


COMPARED_TOKENS = 256


@dataclass(frozen=True)
class Speed:
    """Simulated rates of one plan, or why there are none."""

    decode_tokens_s: float | None = None
    prefill_tokens_s: float | None = None
    layers_s: tuple[float, ...] = ()
    reason: str | None = None


@dataclass(frozen=True)
class Difference:
    """What two documents differ in; only of plans more than ``changes``."""

    changes: list[Change]
    layers: Sequence[LayerChange] = ()
    segments: Sequence[SegmentChange] = ()
    speeds: Sequence[Speed] = ()

    @property
    def is_none(self) -> bool:
        return not self.changes and not self.layers


@click.command("diff")
@click.argument("before", metavar="A", shell_complete=suggest_plans)
@click.argument("after", metavar="B", shell_complete=suggest_plans)
@click.option("--simulate/--no-simulate", default=True, help="Simulate the speed of both plans.")
@add_json_option
@click.option("--exit-code", is_flag=True, help="Exit with 1 if there are differences.")
def diff_command(before: str, after: str, simulate: bool, as_json: bool, exit_code: bool) -> int:
    """Compare two plans, devices or models, A and B, with everything resolved.

    For plans, this includes the need of each memory segment and the resident neurons by layer. If
    the device has the figures, it includes the speed: simulated, not measured."""
    paths = [find_document_path(Path(name)) for name in (before, after)]
    kind, other_kind = map(find_kind, paths)
    if kind and other_kind and kind != other_kind:
        message = f"{before} is a {kind} and {after} is a {other_kind}"
        raise UserError.of("P014", message, help="compare documents of the same kind")
    reports = [read_sound(path) for path in paths]
    assert kind is not None, "a document without a kind is not sound"
    first, second = (report.resolved for report in reports)
    if first is None or second is None:
        one, two = (report.document for report in reports)
        assert one is not None and two is not None
        found = Difference(compare_documents(kind, one, two))
    else:
        found = Difference(
            compare_plans(first, second),
            compare_layers(first, second),
            compare_segments(first, second),
        )
        if simulate and not found.is_none:
            device = measure_host(first.device)
            other = device if first.device == second.device else measure_host(second.device)
            measured = replace(first, device=device), replace(second, device=other)
            found = replace(found, speeds=list(map(simulate_speed, measured)))
    lines = [f"A  {before}", f"B  {after}", *_write_difference(found)]
    print_found(_describe_difference(reports, found), "\n".join(lines), as_json)
    return 1 if exit_code and not found.is_none else 0


def simulate_speed(plan: ResolvedPlan) -> Speed:
    from pi2.simulate import read_inputs, simulate, simulate_layers

    try:
        inputs = read_inputs(plan)
    except UserError as error:
        return Speed(reason=error.diagnostics[0].message)
    result = simulate(inputs, tokens=COMPARED_TOKENS)
    return Speed(
        decode_tokens_s=result.tokens_s,
        prefill_tokens_s=None if result.prefill is None else result.prefill.tokens_s,
        layers_s=simulate_layers(inputs),
    )


def _describe_difference(reports: list[Report], found: Difference) -> dict[str, Any]:
    speeds = found.speeds
    return {
        "digests": [item.resolved.digest if item.resolved else None for item in reports],
        "changes": [
            {"key": item.name, "before": item.before, "after": item.after} for item in found.changes
        ],
        "layers": [
            {
                "first": item.first,
                "last": item.last,
                "split": [dict(item.before.split), dict(item.after.split)],
                "hot": [item.before.hot, item.after.hot],
                "dense": [_describe_dense(item.before), _describe_dense(item.after)],
                "hot_neurons": [item.before.hot_neurons, item.after.hot_neurons],
                "hot_bytes": list(item.hot_bytes),
                "simulated_s": [_find_time(speed, item.first) for speed in speeds] or None,
            }
            for item in found.layers
        ],
        "memory": {
            item.name: {"size_bytes": list(item.sizes), "needed_bytes": list(item.needs)}
            for item in found.segments
        },
        "speed": {
            "simulated": True,
            "decode_tokens_s": [item.decode_tokens_s for item in speeds],
            "prefill_tokens_s": [item.prefill_tokens_s for item in speeds],
            "missing": [item.reason for item in speeds],
        }
        if speeds
        else None,
    }


def _describe_dense(layer: ResolvedLayer) -> dict[str, Any] | None:
    if layer.dense is None:
        return None
    return {"unit": layer.dense.unit, "neurons": list(layer.dense.by_sequences)}


def _show_dense(layer: ResolvedLayer) -> str:
    if layer.dense is None:
        return "(none)"
    return f"{layer.dense.unit} with {describe_computed(layer.dense)}"


def _find_time(speed: Speed, layer: int) -> float | None:
    return speed.layers_s[layer] if layer < len(speed.layers_s) else None


def _write_difference(found: Difference) -> Iterator[str]:
    if found.is_none:
        yield "no differences"
        return
    if found.changes:
        yield "values"
        width = min(44, max(len(item.name) for item in found.changes))
        for change in found.changes:
            values = f"{_show(change.before)} -> {_show(change.after)}"
            yield f"  {change.name:{width}}  {values}"
    if found.layers:
        yield "layers"
        for item in found.layers:
            yield f"  {_write_layer(item, found.speeds)}"
    if found.segments:
        yield "memory needed"
        yield from _write_segments(found.segments)
    if found.speeds:
        yield "speed, SIMULATED and not measured"
        yield from _write_speeds(found.speeds)


def _show(value: Any) -> str:
    if value is None:
        return "(nothing)"
    text = write_value(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _write_layer(item: LayerChange, speeds: Sequence[Speed]) -> str:
    parts = []
    if dict(item.before.split) != dict(item.after.split):
        parts.append(f"split {_show(dict(item.before.split))} -> {_show(dict(item.after.split))}")
    if item.before.dense != item.after.dense:
        parts.append(f"dense unit {_show_dense(item.before)} -> {_show_dense(item.after)}")
    if item.before.hot != item.after.hot or item.before.hot_neurons != item.after.hot_neurons:
        neurons = f"{item.before.hot_neurons} -> {item.after.hot_neurons} neurons"
        parts.append(f"hot {item.before.hot:g} -> {item.after.hot:g}, {neurons}")
    each = " each" if item.last > item.first else ""
    parts.append(f"memory {_show_difference(*item.hot_bytes)}{each}")
    times = [_find_time(speed, item.first) for speed in speeds]
    if len(times) == 2 and times[0] is not None and times[1] is not None:
        shown = f"{approximate_number(times[0] * 1e3)} -> {approximate_number(times[1] * 1e3)} ms"
        parts.append(f"{shown}{each} (simulated)")
    return f"{item.name}: {'; '.join(parts)}"


def _show_difference(before: int, after: int) -> str:
    if before == after:
        return "the same"
    sign = "+" if after > before else "-"
    return f"{sign}{approximate_bytes(abs(after - before))}"


def _write_segments(segments: Sequence[SegmentChange]) -> Iterator[str]:
    rows = [(item.name, item.needs, item.sizes) for item in segments]
    main = [item for item in segments if item.is_main]
    needs = tuple(sum(item.needs[side] for item in main) for side in (0, 1))
    sizes = tuple(sum(item.sizes[side] for item in main) for side in (0, 1))
    rows.append(("all", (needs[0], needs[1]), (sizes[0], sizes[1])))
    for name, (old, new), (size, other) in rows:
        shown = f"{approximate_bytes(old)} -> {approximate_bytes(new)}"
        reserved = "" if size == other else f", reserved {_show_difference(size, other)}"
        yield f"  {name:9}  {shown:24} {_show_difference(old, new)}{reserved}"


def _write_speeds(speeds: Sequence[Speed]) -> Iterator[str]:
    for name, side in zip("AB", speeds, strict=True):
        if side.reason is not None:
            yield f"  {name}: not simulated: {side.reason}"
    rates = {
        "decode": [item.decode_tokens_s for item in speeds],
        "prefill": [item.prefill_tokens_s for item in speeds],
    }
    for name, (old, new) in rates.items():
        if old is not None and new is not None:
            yield (
                f"  {name:9}  {approximate_number(old)} -> {approximate_number(new)} tokens/s "
                f"({new / old - 1:+z.1%})"
            )
