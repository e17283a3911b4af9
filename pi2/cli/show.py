"""Print a document with everything resolved."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from pi2.cli.main import print_diagnostics
from pi2.cli.named_plans import find_document_path
from pi2.cli.options import ChosenPlan, add_memory_option, add_set_option, parse_changes
from pi2.cli.suggestions import suggest_plans

GROUP = "Author"


@click.command("show")
@click.argument("plan", metavar="FILE", shell_complete=suggest_plans)
@click.option("--resolved", is_flag=True, hidden=True)
@click.option("--origins", is_flag=True, help="Show where each value comes from.")
@click.option(
    "--document",
    type=click.Choice(["plan", "device", "model"]),
    default="plan",
    help="Print the plan's device or model instead of the plan.",
)
@add_memory_option
@add_set_option
def command(
    plan: str,
    resolved: bool,
    origins: bool,
    document: str,
    memory: str | None,
    settings: tuple[str, ...],
) -> None:
    """Print FILE with everything resolved, and a plan's digest.

    FILE is a plan, device or model.  The output is a valid document: saved next to the original, it
    resolves to the same digest.
    """
    from pi2.diagnostics import UserError
    from pi2.plan.authoring.writing import write_document, write_plan
    from pi2.plan.checking.check import check_file
    from pi2.plan.toml.source import detect_kind, display_path
    from pi2.sharing.resolver import LockedReferences

    del resolved  # this is what it does
    path = find_document_path(Path(plan))
    kind = detect_kind(path.name) or "plan"
    if kind != "plan":
        if settings or memory or document not in ("plan", kind):
            options = "--set, --memory and --document"
            raise UserError.of("P016", f"{options} are for plans, this is a {kind}")
        resolver = LockedReferences(path.parent)
        report = check_file(path, name=display_path(path), resolver=resolver)
        if report.document is None or not report.is_sound:
            raise report.make_error()
        print_diagnostics(report.diagnostics, report.sources)
        sys.stdout.write(write_document(report.document, report.files[kind] if origins else None))
        return
    chosen = ChosenPlan(Path(plan), path, *parse_changes(settings, memory))
    found, report = chosen.resolved, chosen.fitted.report
    print_diagnostics(report.diagnostics, report.sources)
    if document == "device":
        text = write_document(found.device, report.files["device"] if origins else None)
    elif document == "model":
        text = write_document(found.model, report.files["model"] if origins else None)
    else:
        text = write_plan(found, report.files["plan"] if origins else None)
    sys.stdout.write(text)
