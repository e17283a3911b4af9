"""Write a valid starter document: a device, model or plan."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pi2.cli.main import Subcommands, is_guided
from pi2.cli.options import (
    COUNT,
    FORCE,
    ChosenPlan,
    check_output,
    option,
    read_device,
    read_model,
    read_texts,
    refer,
    suggest_devices,
    suggest_models,
    take_options,
    take_plan,
    write_checked,
)

if TYPE_CHECKING:
    from pi2.plan.toml.source import Kind


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    output: Path | None = option("-o", "--output", metavar="FILE")
    force: bool = FORCE()

    def choose(self, name: str, kind: Kind) -> Path:
        """The file of a document called ``name``; UserError P009 or P027."""
        path = self.output or Path(f"{name}.{kind}.toml")
        check_output(path, kind, self.force)
        return path


@click.group("model", cls=Subcommands)
def model_command() -> None:
    """Write model documents."""


@model_command.command("new")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@take_options(OutputOptions)
def new(checkpoint: Path, given: OutputOptions) -> None:
    """Write the model document of CHECKPOINT: a Hugging Face folder or GGUF file.

    It is derived from the checkpoint's configuration or metadata, and every number is checked
    against the tensors."""
    from pi2.importing.new_model import describe_checkpoint
    from pi2.sharing.fetching import write_atomically

    name = None if given.output is None else check_output(given.output, "model", given.force)
    made = describe_checkpoint(checkpoint, name)
    path = given.choose(made.model.id, "model")
    write_atomically(path, made.text.encode())
    click.echo(f"{path}: written; `pi2 show {path}` shows every value", err=True)


@click.group("new", cls=Subcommands)
def new_command() -> None:
    """Write a valid starter document: a device, model or plan.

    On a terminal, missing values are asked for; elsewhere they are an error.  The document passes
    `pi2 validate`; existing files are only overwritten with --force."""


@dataclass(frozen=True, kw_only=True)
class NewPlanOptions(OutputOptions):
    device: str | None = option(metavar="DEVICE", shell_complete=suggest_devices)
    model: str | None = option(metavar="MODEL", shell_complete=suggest_models)
    memory: str | None = option(metavar="SIZE")
    context: int | None = option(type=COUNT)
    store: str | None = None
    modelfile: Path | None = option(metavar="FILE")


@new_command.command("plan")
@take_options(NewPlanOptions)
def new_plan(given: NewPlanOptions) -> None:
    """Write a plan whose segments fit the model and the memory."""
    from pi2.authoring.drafting import Wish, draft_plan
    from pi2.plan.documents.quantities import parse_size

    if given.modelfile is not None:
        _convert_modelfile(given.modelfile, given)
        return
    device = _ask("--device", given.device, "Device", default="host", known="device")
    model = _ask("--model", given.model, "Model", default="pi2-demo", known="model")
    machine, network = read_device(device), read_model(model)
    memory = _ask("--memory", given.memory, "Memory for the whole process", default="4 GiB")
    budget = parse_size(memory, code="P105")
    path = given.choose(f"{network.id}-on-{machine.id}", "plan")
    wish = Wish(
        device=refer(device, path.parent),
        model=refer(model, path.parent),
        store=given.store or f"stores/{network.id}",
        budget_bytes=budget,
        context=given.context,
        name=f"{network.name or network.id} on {machine.name or machine.id}"[:120],
    )
    _write(path, draft_plan(wish, machine, network))


def _convert_modelfile(file: Path, given: NewPlanOptions) -> None:
    from pi2.engine.generation import read_prompt
    from pi2.found_models import OLLAMA, Modelfile, find_found

    found = Modelfile.parse(read_prompt(file), str(file))
    path = given.choose(file.resolve().parent.name, "plan")
    weights = file.parent / found.weights
    if not weights.is_file():
        other = find_found(f"{OLLAMA}{found.weights}")
        assert other is not None, "the name has a prefix"
        weights = other.file
    text, left = found.write_plan(os.path.relpath(weights, path.parent))
    for item in left:
        click.echo(f"note: {item}: left out", err=True)
    _write(path, text)


@new_command.command("modelfile")
@take_plan()
def new_modelfile(plan: ChosenPlan) -> None:
    """Print a Modelfile with which ollama runs the GGUF file of PLAN."""
    from pi2.found_models import write_modelfile

    click.echo(write_modelfile(plan.resolved), nl=False)


@new_command.command("llama-swap")
@take_plan()
def new_llama_swap(plan: ChosenPlan) -> None:
    """Print the entry of llama-swap's config.yaml that serves PLAN."""
    from pi2.found_models import write_llama_swap

    click.echo(write_llama_swap(plan.resolved, plan.path.name.split(".")[0]), nl=False)


@new_command.command("presets")
@click.argument("plans", type=click.Path(path_type=Path), nargs=-1, required=True)
def new_presets(plans: tuple[Path, ...]) -> None:
    """Print presets (INI) with which llama-server runs the GGUF files of PLANS."""
    from pi2.cli.options import choose_plan
    from pi2.serving.presets import write_presets

    chosen = [choose_plan(plan) for plan in plans]
    listed = [(plan.path.name.split(".")[0], plan.resolved) for plan in chosen]
    click.echo(write_presets(listed), nl=False)


@dataclass(frozen=True, kw_only=True)
class NewDeviceOptions(OutputOptions):
    like: str | None = option(shell_complete=suggest_devices)


@new_command.command("device")
@click.argument("name", required=False)
@take_options(NewDeviceOptions)
def new_device(name: str | None, given: NewDeviceOptions) -> None:
    """Write the device NAME, describing this machine or starting from another device."""
    from pi2.authoring.drafting import draft_device, draft_like

    name = _ask("NAME", name, "Name of the device, such as acme-12")
    path = given.choose(name, "device")
    if given.like is not None:
        read_device(given.like)
        _write(path, draft_like(_take_name(path), refer(given.like, path.parent)))
    else:
        _write(path, draft_device(_take_name(path)))


@dataclass(frozen=True, kw_only=True)
class ShapeOptions:
    layers: int | None = option(type=COUNT)
    hidden: int | None = option(type=COUNT)
    ffn: int | None = option(type=COUNT)
    heads: int | None = option(type=COUNT)
    kv_heads: int | None = option(type=COUNT)
    head_dim: int | None = option(type=COUNT)
    vocab: int | None = option(type=COUNT)
    context: int | None = option(type=COUNT)


@dataclass(frozen=True, kw_only=True)
class NewModelOptions(ShapeOptions, OutputOptions):
    like: str | None = option(shell_complete=suggest_models)
    checkpoint: Path | None = None
    activation: str | None = None


@new_command.command("model")
@click.argument("name", required=False)
@take_options(NewModelOptions)
def new_model(name: str | None, given: NewModelOptions) -> None:
    """Write the model NAME from a checkpoint, another model, or its dimensions."""
    from pi2.authoring.drafting import draft_like, draft_model

    name = _ask("NAME", name, "Name of the model, such as acme-7b")
    path = given.choose(name, "model")
    if given.like is not None:
        read_model(given.like)
        _write(path, draft_like(_take_name(path), refer(given.like, path.parent)))
        return
    if given.checkpoint is not None:
        from pi2.importing.new_model import describe_checkpoint

        _write(path, describe_checkpoint(given.checkpoint, _take_name(path)).text)
        return
    shape: dict[str, int] = {}
    for key, text in read_texts(ShapeOptions).items():
        flag = f"--{key.replace('_', '-')}"
        shape[key] = _ask(flag, getattr(given, key), text.rstrip("."), kind=COUNT)
    activation = _ask("--activation", given.activation, "Activation", default="silu")
    _write(path, draft_model(_take_name(path), shape, activation))


def _ask(
    flag: str,
    given: Any,
    question: str,
    *,
    kind: click.IntRange | None = None,
    default: str | None = None,
    known: Kind | None = None,
) -> Any:
    """The value that was given, or an answer of some ``kind``; elsewhere than on a terminal, a
    usage error.  Shipped documents of the kind ``known`` are listed before."""
    if given is not None:
        return given
    if not is_guided():
        raise click.UsageError(f"{flag} is missing.")
    if known is not None:
        from pi2.plan.reading.references import list_shipped

        click.echo(f"Known: {', '.join(list_shipped(known))}", err=True)
    return click.prompt(question, default=default, type=kind, err=True)


def _take_name(path: Path) -> str:
    return path.name.split(".device.toml")[0].split(".model.toml")[0]


def _write(path: Path, text: str) -> None:
    write_checked(path, _find_schema(path) + text, f"`pi2 show {path}` shows every value")


def _find_schema(path: Path) -> str:
    """The first line of a document in a project that has the schemas; else nothing."""
    kind = path.name.removesuffix(".toml").rpartition(".")[2]
    folder = path.parent.resolve()
    for parent in (folder, *folder.parents[:4]):
        schema = parent / "schemas" / f"{kind}.schema.json"
        if schema.is_file():
            return f"#:schema {Path(os.path.relpath(schema, folder)).as_posix()}\n"
    return ""
