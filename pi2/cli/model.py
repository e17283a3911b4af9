"""Write the model document of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import click

from pi2.cli.commands import Subcommands
from pi2.cli.outputs import check_output, force_option, make_folder

GROUP = "More commands"

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
@force_option
def new(checkpoint: Path, output: Path | None, force: bool) -> None:
    """Write the model document of CHECKPOINT: a Hugging Face folder, GGUF file or MLC-LLM folder.

    It is derived from the checkpoint's configuration or metadata, and every number is checked
    against the tensors.
    """
    from pi2.importing.new_model import describe_checkpoint
    from pi2.sharing.files import write_atomically

    name = None if output is None else check_output(output, "model", force)
    made = describe_checkpoint(checkpoint, name)
    path = output or Path(f"{made.model.id}{SUFFIX}")
    check_output(path, "model", force)
    make_folder(path)
    write_atomically(path, made.text.encode())
    click.echo(f"{path}: written; `pi2 show {path}` shows every value", err=True)
