"""Turn a checkpoint into a neuron store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pi2.diagnostics import UserError

if TYPE_CHECKING:
    from pi2.plan.model import Model

MIB = 1024 * 1024


@click.command("convert")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--model", required=True, metavar="FILE", help="Model document, or a short name.")
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="STORE",
    type=click.Path(path_type=Path),
    help="Folder of the new neuron store.",
)
@click.option(
    "--predictors",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Safetensors file of the activation predictors, if the checkpoint has none.",
)
@click.option(
    "--activations",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Parquet file of activation counts: neurons are stored most active first.",
)
@click.option("--replace", is_flag=True, help="Replace a neuron store that exists.")
def command(
    checkpoint: Path,
    model: str,
    output: Path,
    predictors: Path | None,
    activations: Path | None,
    replace: bool,
) -> None:
    """Turn the Hugging Face folder CHECKPOINT into the neuron store STORE.

    The folder needs config.json, safetensors files and tokenizer.json.  Nothing is left behind
    if it fails; after Ctrl-C the same command goes on where it was.
    """
    from pi2.cli.progress import ProgressBar
    from pi2.importing.convert import convert_checkpoint

    document = read_model(model)
    with ProgressBar() as progress:
        manifest = convert_checkpoint(
            checkpoint,
            document,
            output,
            predictors=predictors,
            activations=activations,
            replace=replace,
            progress=progress,
        )
    size_mib = sum(entry.bytes for entry in manifest.files) / MIB
    click.echo(f"{output}: {len(manifest.files)} files, {size_mib:.1f} MiB", err=True)


def read_model(reference: str) -> Model:
    """Read a model document by path or short name; UserError with all findings."""
    from pi2.plan.check import check_file
    from pi2.plan.model import Model
    from pi2.plan.references import UnknownName, locate_document
    from pi2.plan.resolve import make_error
    from pi2.sharing.resolver import LockedReferences

    resolver = LockedReferences(Path.cwd())
    try:
        found = locate_document(reference, "model", Path.cwd(), resolver=resolver)
    except UnknownName as error:
        raise UserError.of("P015", str(error), help=error.hint) from None
    report = check_file(found.path, name=found.name, resolver=resolver, reference=found.reference)
    if not report.is_sound:
        raise make_error(report)
    if not isinstance(report.document, Model):
        raise UserError.of(
            "P014",
            f"{reference} is not a model document",
            help="a model's file name ends in .model.toml",
        )
    return report.document
