"""Delete a model that was pulled or converted."""

from __future__ import annotations

import click

GROUP = "Run"


@click.command("remove")
@click.argument("name")
def command(name: str) -> None:
    """Delete the model NAME that was pulled, or converted to be run, or what an interrupted pull
    has left of it."""
    from pi2.pulled_models import remove_model

    folder = remove_model(name)
    click.echo(f"{folder} was removed", err=True)
