"""Fit a plan to another memory budget, context or batch."""

from __future__ import annotations

import os
from pathlib import Path

import click

from pi2.cli.options import ChosenPlan, add_path_option, take_plan
from pi2.cli.outputs import check_output, force_option, write_checked

GROUP = "More commands"


@click.command("fit")
@take_plan(has_files=True)
@add_path_option("-o", "--output", dir_okay=False, text="Output file, NAME.plan.toml.")
@force_option
def command(plan: ChosenPlan, output: Path | None, force: bool) -> None:
    """Fit PLAN to --memory, and to values of --set such as kv.context=8192 or decode.batch=4.

    Segments, shares of hot neurons and splits are worked out again; the changes go to standard
    error.  The new plan extends PLAN and states what differs.  Without -o it goes to standard
    output.
    """
    from pi2.plan.authoring.overlay import refer_from, write_overlay
    from pi2.plan.documents.quantities import format_bytes
    from pi2.plan.reading.references import list_shipped

    if plan.memory_bytes is None and not plan.settings:
        raise click.UsageError("give --memory, --set or both")
    target = output or Path("fitted.plan.toml")
    if output is not None:
        check_output(output, "plan", force)
        if os.path.realpath(output) == os.path.realpath(plan.path):
            raise click.UsageError("-o names PLAN itself: choose another file, which extends it")
    shipped = {path.resolve(): name for name, path in list_shipped("plan").items()}
    base = shipped.get(plan.path.resolve()) or refer_from(plan.path, target)
    values = _state_arrays(plan)
    need = format_bytes(plan.resolved.plan.memory.budget)
    remark = f"Fitted by `pi2 fit`: {need} for the whole process."
    is_plan = plan.path.name.endswith(".toml")
    text = write_overlay(base, values, [remark], "extends" if is_plan else "weights")
    if output is None:
        click.echo(text, nl=False)
    else:
        write_checked(output, text, f"`pi2 diff {plan.given} {output}` compares the two")


def _state_arrays(plan: ChosenPlan) -> dict[str, object]:
    """The overrides of a plan; an array with one changed item is stated as a whole."""
    values: dict[str, object] = {}
    document = plan.resolved.plan.model_dump(mode="json", exclude_none=True, exclude_unset=True)
    for key, value in plan.overrides.items():
        parts = key.split(".")
        number = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
        if number is None:
            values[key] = value
            continue
        found = document
        for part in parts[:number]:
            found = found[part]
        values[".".join(parts[:number])] = found
    return values
