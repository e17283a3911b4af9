"""Fetch a model from the hub and convert it."""

from __future__ import annotations

import shutil
from dataclasses import replace as change

import click

from pi2.diagnostics import UserError
from pi2.pulled_models import LocalSource, Precision, PulledModel, Source

GROUP = "Run"


@click.command("pull")
@click.argument("model", metavar="[hf:]ORG/NAME[@REV]")
@click.option(
    "--quantization",
    type=click.Choice(["int4", "int8", "fp16"]),
    help="Weight precision.  [default: int4]",
)
@click.option("--file", metavar="FILE", help="Which of several GGUF models of the repository.")
@click.option("--name", metavar="NAME", help="Name of the model here.  [default: the repository's]")
@click.option(
    "--force", "--replace", "replace", is_flag=True, help="Replace the model that has the name."
)
def command(
    model: str,
    quantization: Precision | None,
    file: str | None,
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
    made = fetch_model(model, quantization, file, name, replace=replace)
    if made.plan.exists():
        click.echo(f"next: pi2 run {made.name} --prompt 'Hello', or pi2 chat {made.name}", err=True)


def fetch_model(
    model: str,
    quantization: Precision | None = None,
    file: str | None = None,
    name: str | None = None,
    *,
    replace: bool = False,
) -> PulledModel:
    """Fetch and convert a model that is not here yet."""
    from huggingface_hub import is_offline_mode

    from pi2.caches import find_cache_folder
    from pi2.cli.checkpoint_models import make_model
    from pi2.cli.progress import ProgressBar
    from pi2.importing.hub import find_repository, hold_folder, parse_reference
    from pi2.importing.hub_shards import open_repository
    from pi2.pulled_models import NAME, find_model, find_models_folder

    reference = parse_reference(model if ":" in model else f"hf:{model}")
    chosen = reference.repository.partition("/")[2] if name is None else name
    if not NAME.fullmatch(chosen):
        raise click.UsageError("--name takes letters, digits, '.', '_' and '-'")
    there = find_model(chosen)
    if there is not None and not replace and is_offline_mode():
        own = there.source
        asked = (reference.repository, reference.revision, file, quantization)
        if isinstance(own, Source) and asked in (
            (own.repository, revision, own.file, own.quantization)
            for revision in (own.revision, own.commit)
        ):
            click.echo(f"{chosen} is there already, at commit {own.commit[:12]}", err=True)
            return there
    repository = find_repository(reference, file)
    source = Source(
        repository=repository.name,
        revision=reference.revision,
        commit=repository.commit,
        quantization=quantization,
        file=file,
    )
    if there is not None and not replace:
        check_same(there, source)
        click.echo(f"{chosen} is there already, at commit {source.commit[:12]}", err=True)
        return there
    owner = repository.name.replace("/", "--")
    work = find_cache_folder("downloads") / owner / repository.commit
    with hold_folder(work), ProgressBar() as progress:
        checkpoint = open_repository(repository, work, progress)
        output = find_models_folder() / chosen
        make_model(
            checkpoint,
            source,
            output,
            progress,
            title=repository.name.partition("/")[2],
            origin=source.name,
            quantization=quantization,
            replace=replace,
        )
        shutil.rmtree(work, ignore_errors=True)
    made = find_model(chosen)
    assert made is not None
    return made


def check_same(model: PulledModel, source: Source) -> None:
    """`UserError` P765 if ``model`` was not made from ``source``."""
    own = model.source
    if isinstance(own, LocalSource) or change(own, revision="") != change(source, revision=""):
        raise UserError.of(
            "P765",
            f"{model.name} is {own.name}, {own.quantization or 'as it is by default'}",
            help="choose another name with --name, or replace it with --force",
        )
