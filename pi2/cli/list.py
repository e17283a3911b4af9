"""List models that were pulled or converted."""

from __future__ import annotations

import click

GROUP = "Run"
MIB = 1024 * 1024


@click.command("list")
def command() -> None:
    """List models that were pulled, or converted to be run: name, size, and what each was made
    from."""
    from pi2.pulled_models import LocalSource, list_models

    models = list_models()
    if not models:
        click.echo("no model is there yet: pi2 pull hf:ORG/NAME, or pi2 run FILE.gguf", err=True)
        return
    width = max(len(model.name) for model in models)
    for model in models:
        source = model.source
        asked = "" if isinstance(source, LocalSource) else f" ({source.revision})"
        click.echo(
            f"{model.name:{width}}  {model.measure_bytes() / MIB:10,.1f} MiB  {source.name}{asked}"
        )
