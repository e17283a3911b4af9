"""Print a plan with everything resolved, and its digest."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command("show")
@click.argument("plan")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Replace a value.")
def command(plan: str, settings: tuple[str, ...]) -> None:
    """Print PLAN with everything resolved, and its digest.

    The output is a plan again: written beside the original, it resolves to the same digest.
    """
    from pi2.cli.main import print_diagnostics
    from pi2.plan.overrides import parse_assignments
    from pi2.plan.resolve import load_plan
    from pi2.plan.writing import write_plan

    resolved = load_plan(Path(plan), overrides=parse_assignments(settings))
    print_diagnostics(resolved.warnings)
    sys.stdout.write(write_plan(resolved))
