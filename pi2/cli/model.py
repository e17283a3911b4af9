"""Write the model document of a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import click

from pi2.cli.commands import Subcommands
from pi2.diagnostics import UserError

GROUP = "Convert"

SUFFIX = ".model.toml"


@click.group("model", cls=Subcommands)
def command() -> None:
    """Write model documents."""


@command.command("new")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Output file, NAME.model.toml.  [default: MODEL.model.toml in this folder]",
)
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def new(checkpoint: Path, output: Path | None, force: bool) -> None:
    """Write the model document of CHECKPOINT: a Hugging Face folder, GGUF file or MLC-LLM folder.

    It is derived from the checkpoint's configuration or metadata, and every number is checked
    against the tensors.
    """
    from pi2.importing.new_model import describe_checkpoint
    from pi2.sharing.files import write_atomically

    name = None
    if output is not None:
        name = output.name.removesuffix(SUFFIX)
        if name == output.name or not name:
            raise UserError.of(
                "P009", f"expected a file name that ends in {SUFFIX}", file=str(output)
            )
    made = describe_checkpoint(checkpoint, name)
    path = output or Path(f"{made.model.id}{SUFFIX}")
    if os.path.lexists(path) and not force:
        raise UserError.of(
            "P027",
            "the file exists already",
            file=str(path),
            help=("use --force to overwrite it"),
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"cannot be written: {error.strerror}"
        raise UserError.of("P003", message, file=str(path)) from None
    write_atomically(path, made.text.encode())
    click.echo(f"{path}: written; `pi2 show {path}` shows every value", err=True)
