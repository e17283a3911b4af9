"""Delete a pulled model."""

from __future__ import annotations

import click

GROUP = "Run"


@click.command("remove")
@click.argument("name")
def command(name: str) -> None:
    """Delete the pulled model NAME from this machine."""
    from pi2.pulled_models import remove_model

    model = remove_model(name)
    click.echo(f"{model.folder} was removed", err=True)
