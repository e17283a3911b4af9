"""Write a valid starter document: a device, model or plan."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pi2.cli.commands import Subcommands, in_help
from pi2.cli.options import (
    check_output,
    force_option,
    make_folder,
    refer,
    suggest_devices,
    suggest_models,
    write_checked,
)
from pi2.diagnostics import UserError

if TYPE_CHECKING:
    from pi2.plan.authoring.drafting import MachineFacts
    from pi2.plan.checking.check import Report
    from pi2.plan.toml.source import Kind


SUFFIX = ".model.toml"


@in_help("More commands", "Write the model document of a checkpoint.")
@click.group("model", cls=Subcommands)
def model_command() -> None:
    """Write model documents."""


@model_command.command("new")
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
    from pi2.sharing.fetching import write_atomically

    name = None if output is None else check_output(output, "model", force)
    made = describe_checkpoint(checkpoint, name)
    path = output or Path(f"{made.model.id}{SUFFIX}")
    check_output(path, "model", force)
    make_folder(path)
    write_atomically(path, made.text.encode())
    click.echo(f"{path}: written; `pi2 show {path}` shows every value", err=True)


_SHAPE = {
    "layers": "Transformer blocks.",
    "hidden": "Width of the residual stream.",
    "ffn": "FFN neurons of a layer.",
    "heads": "Query heads.",
    "kv_heads": "Key and value heads.",
    "head_dim": "Width of a head.",
    "vocab": "Tokens of the vocabulary.",
    "context": "Longest sequence, in tokens.",
}


@in_help("Author", "Write a valid starter document: a device, model or plan.")
@click.group("new", cls=Subcommands)
def new_command() -> None:
    """Write a valid starter document: a device, model or plan.

    On a terminal, missing values are asked for; elsewhere they are an error.  The document passes
    `pi2 validate`; existing files are only overwritten with --force.
    """


def _output(function: Callable[..., None]) -> Callable[..., None]:
    function = force_option(function)
    text = "Output file, NAME.KIND.toml."
    return click.option("-o", "--output", type=click.Path(path_type=Path), help=text)(function)


@new_command.command("plan")
@click.option(
    "--device",
    metavar="DEVICE",
    shell_complete=suggest_devices,
    help="Device: a short name, path or reference.",
)
@click.option(
    "--model",
    metavar="MODEL",
    shell_complete=suggest_models,
    help="Model: a short name, path or reference.",
)
@click.option(
    "--memory", metavar="SIZE", help="Memory budget of the whole process, such as '4 GiB'."
)
@click.option(
    "--context",
    type=click.IntRange(1, 2**31 - 1),
    help=("Context length in tokens, prompt and answer together."),
)
@click.option("--store", help="Folder of the neuron store.  [default: stores/MODEL]")
@_output
def new_plan(
    device: str | None,
    model: str | None,
    memory: str | None,
    context: int | None,
    store: str | None,
    output: Path | None,
    force: bool,
) -> None:
    """Write a plan whose segments fit the model and the memory."""
    from pi2.plan.authoring.drafting import Wish, draft_plan
    from pi2.plan.documents.device import Device
    from pi2.plan.documents.model import Model
    from pi2.plan.documents.quantities import parse_size
    from pi2.planning.wish import read_document

    device = _ask("--device", device, "Device", default="host", known=_list_shipped("device"))
    model = _ask("--model", model, "Model", default="pi2-demo", known=_list_shipped("model"))
    device_report = read_document(device, "device")
    model_report = read_document(model, "model")
    assert isinstance(device_report.document, Device)
    assert isinstance(model_report.document, Model)
    memory = _ask("--memory", memory, "Memory for the whole process", default="4 GiB")
    budget = parse_size(memory, code="P105")
    name = f"{model_report.document.id}-on-{device_report.document.id}"
    path = _choose_output(output, f"{name}.plan.toml", "plan", force)
    wish = Wish(
        device=refer(device, path.parent),
        model=refer(model, path.parent),
        store=store or f"stores/{model_report.document.id}",
        budget_bytes=budget,
        context=context,
        name=f"{_name(model_report)} on {_name(device_report)}"[:120],
    )
    _write(path, draft_plan(wish, device_report.document, model_report.document))


@new_command.command("device")
@click.argument("name", required=False)
@click.option(
    "--like",
    shell_complete=suggest_devices,
    help="Start from this device instead of this machine.",
)
@_output
def new_device(name: str | None, like: str | None, output: Path | None, force: bool) -> None:
    """Write the device NAME, describing this machine or starting from another device."""
    from pi2.plan.authoring.drafting import draft_device, draft_like
    from pi2.planning.wish import read_document

    name = _ask("NAME", name, "Name of the device, such as acme-12")
    path = _choose_output(output, f"{name}.device.toml", "device", force)
    if like is not None:
        read_document(like, "device")
        _write(path, draft_like(_take_name(path), refer(like, path.parent)))
    else:
        _write(path, draft_device(_take_name(path), _look_at_machine()))


@new_command.command("model")
@click.argument("name", required=False)
@click.option("--like", shell_complete=suggest_models, help="Start from this model.")
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    help="Describe this checkpoint, as `pi2 model new` does.",
)
@click.option("--activation", help="Activation function of the FFN, such as relu or silu.")
@_output
def new_model(
    name: str | None,
    like: str | None,
    checkpoint: Path | None,
    activation: str | None,
    output: Path | None,
    force: bool,
    **sizes: int | None,
) -> None:
    """Write the model NAME from a checkpoint, another model, or its dimensions."""
    from pi2.plan.authoring.drafting import draft_like, draft_model
    from pi2.planning.wish import read_document

    name = _ask("NAME", name, "Name of the model, such as acme-7b")
    path = _choose_output(output, f"{name}.model.toml", "model", force)
    if like is not None:
        read_document(like, "model")
        _write(path, draft_like(_take_name(path), refer(like, path.parent)))
        return
    if checkpoint is not None:
        from pi2.importing.new_model import describe_checkpoint

        _write(path, describe_checkpoint(checkpoint, _take_name(path)).text)
        return
    shape: dict[str, int] = {}
    for key, text in _SHAPE.items():
        given = None if sizes[key] is None else str(sizes[key])
        answer = _ask(f"--{key.replace('_', '-')}", given, text.rstrip("."))
        shape[key] = _parse_count(answer, key)
    activation = _ask("--activation", activation, "Activation", default="silu")
    _write(path, draft_model(_take_name(path), shape, activation))


for _key, _text in _SHAPE.items():
    _option = click.Option(
        [f"--{_key.replace('_', '-')}"], type=click.IntRange(1, 2**31 - 1), help=_text
    )
    new_model.params.append(_option)


def _is_guided() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _ask(
    flag: str,
    given: str | None,
    question: str,
    *,
    default: str | None = None,
    known: Sequence[str] = (),
) -> str:
    """The value that was given, or an answer; elsewhere than on a terminal, a usage error."""
    if given is not None:
        return given
    if not _is_guided():
        raise click.UsageError(f"{flag} is missing.")
    if known:
        click.echo(f"Known: {', '.join(known)}", err=True)
    answer: str = click.prompt(question, default=default, err=True)
    return answer


def _list_shipped(kind: Kind) -> list[str]:
    from pi2.plan.reading.references import list_shipped

    return list(list_shipped(kind)) if _is_guided() else []


def _name(report: Report) -> str:
    assert report.document is not None
    return report.document.name or str(getattr(report.document, "id", ""))


def _parse_count(text: str, name: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 0 < int(text[:10]) < 2**31:
        raise UserError.of("P104", f"{name} is a whole number above 0, got {text!r}")
    return int(text)


def _choose_output(output: Path | None, default: str, kind: Kind, force: bool) -> Path:
    path = Path(default) if output is None else output
    check_output(path, kind, force)
    return path


def _take_name(path: Path) -> str:
    return path.name.split(".device.toml")[0].split(".model.toml")[0]


def _look_at_machine() -> MachineFacts:
    from pi2.machine import detect_machine
    from pi2.machine.storage import inspect_storage
    from pi2.plan.authoring.drafting import MachineFacts

    machine = detect_machine()
    return MachineFacts(
        processor=machine.cpu.name,
        architecture=machine.architecture,
        features=tuple(machine.features),
        clusters=tuple((item.cores, item.max_hz, item.core) for item in machine.cpu.clusters),
        installed_bytes=machine.memory.installed_bytes,
        block_bytes=inspect_storage(Path()).block_bytes,
    )


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
