"""Fetch a model from the hub and convert it."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Literal

import click

from pi2.diagnostics import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from pi2.importing.checkpoint import Checkpoint
    from pi2.progress import Progress
    from pi2.pulled_models import PulledModel, Source

GROUP = "Run"
MIB = 1024 * 1024


@click.command("pull")
@click.argument("model", metavar="hf:ORG/NAME[@REV]")
@click.option(
    "--quantization",
    type=click.Choice(["int4", "int8", "fp16"]),
    help="Weight precision.  [default: int4]",
)
@click.option("--name", metavar="NAME", help="Name of the model here.  [default: the repository's]")
@click.option("--replace", is_flag=True, help="Replace the model that has the name.")
def command(
    model: str,
    quantization: Literal["int4", "int8", "fp16"] | None,
    name: str | None,
    replace: bool,
) -> None:
    """Fetch a model from the hub, convert it, and write a plan for this machine.

    A safetensors file is fetched when the conversion needs it, and deleted when nothing in it is
    left to convert, so that a checkpoint in many files never lies whole on the disk.  After Ctrl-C
    or a failure the same command goes on with the first file that is not whole.  HF_ENDPOINT,
    HF_TOKEN (or `hf auth login`) and HF_HUB_OFFLINE hold; what the hub's own cache has is not
    fetched again, nor deleted.
    """
    from huggingface_hub import is_offline_mode

    from pi2.caches import find_cache_folder
    from pi2.cli.progress import ProgressBar
    from pi2.importing.hub import find_repository, hold_folder, parse_reference
    from pi2.importing.hub_shards import open_repository
    from pi2.pulled_models import NAME, Source, find_model, find_models_folder

    reference = parse_reference(model)
    chosen = reference.repository.partition("/")[2] if name is None else name
    if not NAME.fullmatch(chosen):
        raise click.UsageError("--name takes letters, digits, '.', '_' and '-'")
    there = find_model(chosen)
    if there is not None and not replace and is_offline_mode():
        own = there.source
        asked = (reference.repository, reference.revision, quantization)
        if asked in (
            (own.repository, revision, own.quantization) for revision in (own.revision, own.commit)
        ):
            click.echo(f"{chosen} is there already, at commit {own.commit[:12]}", err=True)
            announce(chosen, there.plan)
            return
    repository = find_repository(reference)
    source = Source(
        repository=repository.name,
        revision=reference.revision,
        commit=repository.commit,
        quantization=quantization,
    )
    if there is not None and not replace:
        check_same(there, source)
        click.echo(f"{chosen} is there already, at commit {source.commit[:12]}", err=True)
        announce(chosen, there.plan)
        return
    owner = repository.name.replace("/", "--")
    work = find_cache_folder("downloads") / owner / repository.commit
    with hold_folder(work), ProgressBar() as progress:
        checkpoint = open_repository(repository, work, progress)
        output = find_models_folder() / chosen
        plan = convert(checkpoint, source, output, progress, replace=replace)
        shutil.rmtree(work, ignore_errors=True)
    announce(chosen, plan)


def check_same(model: PulledModel, source: Source) -> None:
    """`UserError` P765 if ``model`` was not made from ``source``."""
    own = model.source
    mine = (own.repository, own.commit, own.quantization)
    if mine != (source.repository, source.commit, source.quantization):
        raise UserError.of(
            "P765",
            f"{model.name} is {own.repository} at {own.commit[:12]}, {own.quantization or 'int4'}",
            help="choose another name with --name, or replace it with --replace",
        )


def convert(
    checkpoint: Checkpoint, source: Source, output: Path, progress: Progress, *, replace: bool
) -> Path:
    """Make the store ``output``; returns the path of its plan, which may not exist."""
    from pi2.cli.convert import choose_precision, write_notes
    from pi2.importing.convert import convert_checkpoint
    from pi2.importing.new_model import describe_checkpoint, make_id
    from pi2.pulled_models import PLAN, RECORD

    name = source.repository.partition("/")[2]
    document = describe_checkpoint(checkpoint, make_id(name)).model
    # Many checkpoints do not say what they are called.
    document = document.model_copy(update={"name": name[:120]})
    if source.quantization is not None:
        document = choose_precision(document, source.quantization)
    origin = f"{source.repository} at {source.commit}"
    notes, refusal = write_notes(checkpoint, document, origin)
    notes[RECORD] = source.write()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError.of("P764", f"cannot make {output.parent}: {error.strerror}") from None
    manifest = convert_checkpoint(
        checkpoint, document, output, notes=notes, replace=replace, progress=progress
    )
    size_mib = sum(entry.bytes for entry in manifest.files) / MIB
    click.echo(f"{output}: {source.repository}@{source.commit[:12]}, {size_mib:.1f} MiB", err=True)
    if PLAN not in notes:
        click.echo(f"no plan was written for this machine: {refusal}", err=True)
    return output / PLAN


def announce(name: str, plan: Path) -> None:
    """Print the next command."""
    if plan.exists():
        click.echo(f"next: pi2 run {name} --prompt 'Hello', or pi2 chat {name}", err=True)
