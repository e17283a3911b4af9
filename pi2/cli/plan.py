"""Find the fastest plan for a memory limit, or one for a speed."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from pi2.caches import is_gguf
from pi2.cli.options import (
    COUNT,
    FILE,
    FORCE,
    ChosenPlan,
    check_output,
    choose_plan,
    find_form,
    measure_host,
    option,
    read_device,
    read_model,
    refer,
    refer_path,
    suggest_devices,
    suggest_models,
    suggest_plans,
    take_options,
    write_checked,
    write_file,
)
from pi2.diagnostics import UserError
from pi2.plan.documents.quantities import format_bytes, parse_size
from pi2.progress import ProgressBar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pi2.plan.documents.device import Device
    from pi2.planning.planner import PlannedPlan
    from pi2.planning.wish import Wish


SUFFIX = ".plan.toml"
POINTS = 9
MOST_SEQUENCES = 64
FOR_FILES = ("device", "model", "memory", "batch", "context", "exact", "output", "force")
"""Options for GGUF files that run as they are."""


@dataclass(frozen=True, kw_only=True)
class PlanningOptions:
    device: str = option(metavar="DEVICE", default="", shell_complete=suggest_devices)
    model: str = option(metavar="MODEL", default="", shell_complete=suggest_models)
    memory: str | None = option(metavar="SIZE")
    unit_memory: tuple[str, ...] = option(metavar="UNIT=SIZE")
    speed: str | None = option(metavar="RATE")
    objective: Literal["speed", "memory", "energy"] = "speed"
    batch: str = option(default="1", metavar="N|N-M")
    context: int | None = option(type=COUNT)
    exact: bool = False
    store: Path | None = None
    thresholds: Path | None = option(metavar="FILE")
    leave_out: float = option(type=click.FloatRange(0.0, 0.5), metavar="SHARE", default=0.0)
    output: Path | None = option("-o", "--output")
    force: bool = FORCE()
    pareto: bool = False
    plot: Path | None = option(type=FILE)


@click.command("plan")
@click.argument(
    "wishes",
    metavar="[PLAN]",
    required=False,
    type=click.Path(path_type=Path),
    shell_complete=suggest_plans,
)
@take_options(PlanningOptions)
def plan_command(wishes: Path | None, given: PlanningOptions) -> None:
    """Find the fastest plan for a memory limit, or the smallest for a speed.

    With PLAN, its device, model, weights, budget, context, batch, speed and quality count unless an
    option says otherwise. A GGUF file that runs as it is, or a PLAN of one, is never converted:
    --memory, --device, --context, --batch N, --exact and -o are for it.

    The choices, the reasons and the expected speed go to standard output, and into the plan as
    comments.  If a request cannot be met, the reason and the nearest request that can be met are
    printed.  With --batch 1-4, four plans are written: NAME.batch-1.plan.toml and so on."""
    if wishes is None and is_gguf(Path(given.model)):
        wishes = Path(given.model)
    if wishes is not None:
        chosen = choose_plan(wishes)
        if chosen.runs_file:
            _plan_file(chosen, given)
            return
        given = _take_wishes(chosen, given)
    if not (given.device and given.model):
        raise click.UsageError("give --device and --model, or a PLAN that has them")
    if given.pareto == (given.memory is not None or given.speed is not None):
        raise click.UsageError("give --memory, --speed or both; or only --pareto")
    batches = parse_batches(given.batch)
    outputs = {number: _name_output(given.output, number, batches) for number in batches}
    for path in outputs.values():
        if path is not None:
            check_output(path, "plan", given.force)
    wish = _make_wish(given)
    wish = replace(wish, unit_memory=_parse_unit_memory(given.unit_memory, wish.device))
    if given.leave_out:
        wish = _add_leave_out(wish, given.leave_out)
    if given.thresholds is not None:
        if given.exact or given.pareto:
            raise click.UsageError("--thresholds leaves neurons out: not with --exact or --pareto")
        wish = _add_thresholds(wish, given.thresholds, given.output)
    if given.pareto:
        if len(batches) > 1:
            raise click.UsageError("--pareto is for one --batch")
        _show_pareto(replace(wish, batch=batches[0]), given.plot)
        return
    from pi2.planning.planner import choose_thresholds, plan
    from pi2.planning.text import describe_choices, write_batches

    with ProgressBar() as progress:
        found = [choose_thresholds(plan(replace(wish, batch=n), progress)) for n in batches]
    for planned in found:
        click.echo("\n".join([*describe_choices(planned), *_describe_file(planned, given)]))
        path = outputs[planned.wish.batch]
        if path is not None:
            _write(path, planned, given)
    if len(found) > 1:
        click.echo("\n".join(("", *write_batches(found))))


def _plan_file(chosen: ChosenPlan, given: PlanningOptions) -> None:
    """Describe the plan of a GGUF file that runs as it is, and write it."""
    from pi2.cli.documents import write_fitted
    from pi2.planning.text import describe_file_plan

    batches = parse_batches(given.batch)
    usual = {**vars(given), **dict.fromkeys(FOR_FILES), "objective": given.objective != "speed"}
    odd = [f"--{name.replace('_', '-')}" for name, value in usual.items() if value]
    odd += ["a range of --batch"] * (len(batches) > 1)
    if odd:
        raise click.UsageError(
            f"{' and '.join(odd)}: only for neuron stores, which `pi2 convert` makes; "
            f"{chosen.given} runs a GGUF file as it is, and takes --memory, --device, --context, "
            "--batch N and --exact"
        )
    if given.output is not None:
        check_output(given.output, "plan", given.force)
    wanted = {
        "device": refer(given.device, chosen.path.parent),
        "kv.context": given.context,
        "decode.batch": batches[0] if given.batch != "1" else None,
        "quality": "exact" if given.exact else None,
    }
    chosen = replace(
        chosen.change({key: value for key, value in wanted.items() if value}),
        memory_bytes=None if given.memory is None else parse_size(given.memory, code="P105"),
    )
    measured = chosen.measured
    assert measured.file is not None
    lines = list(describe_file_plan(measured, measured.file))
    click.echo("\n".join(lines))
    if given.output is not None:
        write_fitted(chosen, given.output, lines, given.device)


def _take_wishes(chosen: ChosenPlan, given: PlanningOptions) -> PlanningOptions:
    from pi2.plan.reading.references import is_path

    resolved = chosen.resolved
    plan, folder = resolved.plan, resolved.path.parent

    def place(reference: str) -> str:
        return str(folder / reference) if is_path(reference) else reference

    return replace(
        given,
        device=given.device or place(plan.device),
        model=given.model or place(plan.model),
        memory=given.memory or (None if given.pareto else format_bytes(plan.memory.budget)),
        speed=given.speed or (None if plan.speed is None else f"{plan.speed:g}tok/s"),
        batch=given.batch if given.batch != "1" else str(plan.decode.batch),
        context=given.context or plan.kv.context,
        exact=given.exact or plan.quality == "exact",
        leave_out=given.leave_out or plan.decode.leave_out or 0.0,
        store=given.store or resolved.store_path,
    )


def parse_batches(text: str) -> range:
    """``"3"`` or ``"1-4"``; UserError P105 for anything else, and above MOST_SEQUENCES."""
    match = re.fullmatch(r"([0-9]{1,3})(?:-([0-9]{1,3}))?", text.strip())
    if match is not None:
        first, last = int(match[1]), int(match[2] or match[1])
        if 1 <= first <= last <= MOST_SEQUENCES:
            return range(first, last + 1)
    raise UserError.of(
        "P105",
        f"--batch {text!r} is not a number of sequences from 1 to {MOST_SEQUENCES}",
        help="for example --batch 4, or --batch 1-4 for four plans",
    )


def _name_output(output: Path | None, number: int, batches: range) -> Path | None:
    if output is None or len(batches) == 1 or not output.name.endswith(SUFFIX):
        return output
    return output.with_name(f"{output.name.removesuffix(SUFFIX)}.batch-{number}{SUFFIX}")


def _make_wish(given: PlanningOptions) -> Wish:
    from pi2.planning.wish import Wish

    device, model = measure_host(read_device(given.device)), read_model(given.model)
    return Wish(
        device=device,
        model=model,
        memory_bytes=None if given.memory is None else parse_size(given.memory, code="P105"),
        tokens_s=None if given.speed is None else _parse_speed(given.speed),
        objective=given.objective,
        context=given.context or min(model.shape.context, 4096),
        exact=given.exact,
        store=given.store,
    )


def _add_thresholds(wish: Wish, file: Path, output: Path | None) -> Wish:
    """The wish with thresholds; UserError P258 for another model's, and errors of reading."""
    from pi2.plan.reading.thresholds import read_thresholds

    found = read_thresholds(file)
    if wish.model.moe is None or not found.fits(wish.model):
        mixture = "" if wish.model.moe is not None else ", which is no MoE model"
        raise UserError.of(
            "P258",
            f"{file} has thresholds of the model `{found.model}`, not of {wish.model.id}{mixture}",
            help="make some with `pi2 sparsity calibrate`; models without experts need none here: "
            "it also writes their plan",
        )
    name = str(file) if output is None else refer_path(file, output.parent)
    return replace(wish, thresholds=found, thresholds_file=name)


def _add_leave_out(wish: Wish, share: float) -> Wish:
    """The wish with a share of scores to leave out; UserError P292 for a model without them."""
    if wish.exact:
        raise click.UsageError("--leave-out leaves neurons out: not with --exact")
    if wish.model.predictor is None:
        raise UserError.of(
            "P292",
            f"--leave-out {share:g}: the model {wish.model.id!r} has no predictor, whose scores "
            "could be left out",
            help="leave --leave-out out",
        )
    return replace(wish, leave_out=share)


def _parse_unit_memory(texts: Sequence[str], device: Device) -> dict[str, int]:
    """``["gpu=8GiB"]``; UserError P105 for units without memory of their own, or too much."""
    found = {}
    for text in texts:
        name, _, size = text.partition("=")
        memory = device.units[name].memory if name in device.units else None
        if memory is None:
            able = [key for key, unit in device.units.items() if unit.memory is not None]
            raise UserError.of(
                "P105",
                f"--unit-memory {text!r}: the device {device.id!r} has no unit {name!r} with "
                "memory of its own",
                help=f"units that have: {', '.join(able) or 'none'}",
            )
        found[name] = parse_size(size, "--unit-memory", "P105")
        if memory.capacity is not None and found[name] > memory.capacity:
            raise UserError.of(
                "P105",
                f"--unit-memory {text!r}: {name} has {memory.capacity >> 20} MiB",
                help=f"--unit-memory '{name}={memory.capacity >> 20} MiB' is the most",
            )
    return found


def _parse_speed(text: str) -> float:
    match = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(tok/s|tokens/s)?\s*", text)
    if match is None or float(match[1]) <= 0:
        raise UserError.of(
            "P105", f"--speed {text!r} is not a speed", help="for example --speed 10tok/s"
        )
    return float(match[1])


def _describe_file(planned: PlannedPlan, given: PlanningOptions) -> list[str]:
    """Which file runs instead of a store whose router chooses whole experts (P525)."""
    resolved, name = planned.resolved, planned.wish.model.id
    if given.store or not resolved.source.wants_file(resolved):
        return []
    return [
        f"It runs as a GGUF file: `pi2 convert CHECKPOINT -o {name}.gguf` makes it, and `pi2 plan "
        f"{name}.gguf` plans it; --store PATH plans a store, for predictions."
    ]


def _write(path: Path, planned: PlannedPlan, given: PlanningOptions) -> None:
    from pi2.planning.text import describe_choices, write_planned

    wish = planned.wish
    if remarks := _describe_file(planned, given):
        from pi2.authoring.drafting import write_overlay

        found, file = planned.resolved.plan, f"{wish.model.id}.gguf"
        values = {
            "device": refer(given.device, path.parent),
            "memory.budget": format_bytes(found.memory.budget),
            "kv.context": found.kv.context,
            "decode.batch": found.decode.batch,
            **({"quality": "exact"} if given.exact else {}),
        }
        remarks = [*describe_choices(planned)][:2] + remarks
        write_file(path, write_overlay(file, values, remarks, "weights").encode())
        click.echo(f"{path}: a plan of {file}, which goes into the same folder", err=True)
        return
    text = write_planned(
        planned,
        device=refer(given.device, path.parent),
        model=refer(given.model, path.parent),
        store=f"stores/{wish.model.id}"
        if given.store is None
        else refer_path(given.store, path.parent),
        name=f"{wish.model.name or wish.model.id} on {wish.device.name or wish.device.id}"[:120],
    )
    own_memory = any(wish.device.units[name].memory for name in planned.resolved.dense_units)
    command = "explain --cost" if own_memory else "simulate"
    write_checked(path, text, f"`pi2 {command} {path}` predicts it in detail")


def _show_pareto(wish: Wish, plot: Path | None) -> None:
    from pi2.planning.planner import trace_pareto
    from pi2.planning.text import describe_curve, draw_curve
    from pi2.planning.wish import find_device_memory

    with ProgressBar() as progress:
        most = find_device_memory(wish.device)
        found = trace_pareto(wish, POINTS, most_bytes=most, progress=progress)
    click.echo("\n".join(describe_curve(found)))
    if plot is not None:
        write_file(plot, draw_curve(found, find_form(plot)))
