"""List the pulled models."""

from __future__ import annotations

import click

GROUP = "Run"
MIB = 1024 * 1024


@click.command("list")
def command() -> None:
    """List the pulled models: name, size, and the revision they were made from."""
    from pi2.pulled_models import list_models

    models = list_models()
    if not models:
        click.echo("no model was pulled yet: pi2 pull hf:ORG/NAME", err=True)
        return
    width = max(len(model.name) for model in models)
    for model in models:
        source = model.source
        revision = "" if source.revision == source.commit else f" ({source.revision})"
        click.echo(
            f"{model.name:{width}}  {model.measure_bytes() / MIB:10,.1f} MiB  "
            f"{source.repository}@{source.commit[:12]}{revision}"
        )
