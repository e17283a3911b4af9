"""Models and files that pi2 keeps: list, pull, remove, cache."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

import click

from pi2.cli.main import Subcommands
from pi2.cli.options import MIB, add_json_option, option, take_options
from pi2.diagnostics import UserError
from pi2.formats import name_packings
from pi2.model_folders import fetch_model
from pi2.progress import ProgressBar
from pi2.pulled_models import (
    KINDS,
    NAME,
    ONLY_NAMED,
    CachedThing,
    LocalSource,
    find_kind_folder,
    list_cached,
    list_models,
    remove_model,
    remove_thing,
)


@click.command("list")
@click.option("--found", is_flag=True, help="List GGUF files that other programs fetched instead.")
def list_command(found: bool) -> None:
    """List pulled models, and models converted to be run: name, size and origin.

    With --found, models of ollama, LM Studio, llama.cpp and the hub's cache: every command takes
    their names, and nothing is copied."""
    if found:
        from pi2.found_models import list_found

        for other in list_found():
            click.echo(f"{other.name:60}  {other.size_bytes / MIB:10,.1f} MiB  {other.file}")
        return
    models = list_models()
    if not models:
        click.echo(
            "no model was pulled yet: pi2 pull hf:ORG/NAME; pi2 run FILE.gguf needs none", err=True
        )
        return
    width = max(len(model.name) for model in models)
    for model in models:
        source = model.source
        asked = "" if isinstance(source, LocalSource) else f" ({source.revision})"
        click.echo(
            f"{model.name:{width}}  {model.measure_bytes() / MIB:10,.1f} MiB  {source.name}{asked}"
        )


@dataclass(frozen=True, kw_only=True)
class PullOptions:
    quantization: str | None = option(type=click.Choice(name_packings("tables")))
    file: str | None = option(metavar="FILE")
    name: str | None = option(metavar="NAME")
    replace: bool = option("--force")


@click.command("pull")
@click.argument("model", metavar="[hf:]ORG/NAME[@REV][/FILE.gguf]|PLAN")
@take_options(PullOptions)
def pull_command(model: str, given: PullOptions) -> None:
    """Fetch a model from the hub, convert it, and write a plan for this machine.

    A GGUF file that runs as it is stays as it is; of several, name one by FILE.gguf or --file.
    A safetensors file is fetched when the conversion needs it, and deleted once it is converted. A
    checkpoint in many files is never whole on the disk. After Ctrl-C or a failure the same command
    goes on with the first incomplete file. HF_ENDPOINT, HF_TOKEN (or `hf auth login`) and
    HF_HUB_OFFLINE are respected. Files in the Hugging Face cache are reused and left in place.

    With PLAN, the weights that it names by hf:ORG/NAME/FILE.gguf are fetched as they are, into the
    Hugging Face cache. pi2.lock pins their commit and SHA-256."""
    if model.endswith(".plan.toml"):
        pull_weights(Path(model))
        return
    if given.name is not None and not NAME.fullmatch(given.name):
        raise click.UsageError("--name takes letters, digits, '.', '_' and '-'")
    with ProgressBar() as progress:
        made = fetch_model(
            model,
            given.quantization,
            given.file,
            given.name,
            replace=given.replace,
            progress=progress,
        )
    if made.plan.exists():
        click.echo(f"next: pi2 run {made.name} --prompt 'Hello', or pi2 chat {made.name}", err=True)


def pull_weights(plan: Path) -> None:
    """Fetch and pin the weights that the plan at a path names; `UserError` P760 if it names none of
    the hub, and as `fetch_hub_file`."""
    from pi2.plan.toml.source import read_source
    from pi2.weights.file_reading import HUB, fetch_hub_file

    source = read_source(plan, str(plan))
    if isinstance(source, list):
        raise UserError(source, exit_code=2)
    weights = source.values.get("weights")
    if not isinstance(weights, str) or not weights.startswith(HUB):
        raise UserError.of(
            "P760",
            "the plan names no weights of the hub",
            help='write weights = "hf:ORG/NAME/FILE.gguf"',
            file=str(plan),
        )
    with ProgressBar() as progress:
        path = fetch_hub_file(weights, plan, progress)
    click.echo(f"{path}: pinned in pi2.lock; next: pi2 run {plan}", err=True)


@click.command("remove")
@click.argument("name")
def remove_command(name: str) -> None:
    """Delete the model NAME that was pulled, or converted to be run, or what an interrupted pull
    has left of it."""
    folder = remove_model(name)
    click.echo(f"{folder} was removed", err=True)


_UNITS = {"h": 3600, "d": 86400, "w": 7 * 86400}


def parse_age(ctx: click.Context, option: click.Parameter, text: str | None) -> int | None:
    """A time such as 30d, in seconds."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,5})([hdw])", text)
    if match is None:
        raise click.BadParameter(f"{text!r} is no age: write 12h, 30d or 8w")
    return int(match[1]) * _UNITS[match[2]]


def check_kinds(
    ctx: click.Context, argument: click.Parameter, names: tuple[str, ...]
) -> tuple[str, ...]:
    for name in names:
        if name not in KINDS:
            raise click.BadParameter(f"{name!r} is no kind: known are {', '.join(KINDS)}")
    return names


@click.group("cache", cls=Subcommands, invoke_without_command=True)
@add_json_option
@click.pass_context
def cache_command(ctx: click.Context, as_json: bool) -> None:
    """List what pi2 keeps on this machine, and clear it.

    Without a command: every kind of thing with its number, size, last use and folder."""
    if ctx.invoked_subcommand is not None:
        return
    found = {kind: list_cached(kind) for kind in KINDS}
    if as_json:
        things = [thing for kind in found.values() for thing in kind]
        click.echo(json.dumps([_describe(thing) for thing in things], indent=1))
        return
    total = 0
    for kind, things in found.items():
        size = sum(thing.size_bytes for thing in things)
        total += size
        used = _write_age(max((thing.used_s for thing in things), default=None))
        numbers = f"{kind:10} {len(things):5} {size / MIB:10,.1f} MiB  {used:>8}"
        click.echo(f"{numbers}  {find_kind_folder(kind)}")
    click.echo(f"{'all':16} {total / MIB:10,.1f} MiB")
    click.echo("`pi2 cache list KIND` lists them, `pi2 cache clear KIND` removes them", err=True)


@cache_command.command("list")
@click.argument("kinds", nargs=-1, callback=check_kinds, metavar="[KIND]...")
def list_things(kinds: tuple[str, ...]) -> None:
    """List the things of each KIND, or all: size, last use and path."""
    for kind in kinds or KINDS:
        for thing in list_cached(kind):
            click.echo(_write_thing(thing))


@dataclass(frozen=True, kw_only=True)
class ClearOptions:
    older_than: int | None = option(callback=parse_age, metavar="AGE")
    dry_run: bool = option("-n", "--dry-run")


@cache_command.command("clear")
@click.argument("kinds", nargs=-1, callback=check_kinds, metavar="[KIND]...")
@take_options(ClearOptions)
def clear(kinds: tuple[str, ...], given: ClearOptions) -> None:
    """Remove the things of each KIND; without one, all that pi2 makes again by itself.

    Models and chat history are removed only if `models`, `stores` or `history` is named."""
    before = None if given.older_than is None else time.time() - given.older_than
    chosen = kinds or tuple(kind for kind in KINDS if kind not in ONLY_NAMED)
    things = [thing for kind in dict.fromkeys(chosen) for thing in list_cached(kind)]
    things = [thing for thing in things if before is None or thing.used_s < before]
    gone = 0
    for thing in things:
        if given.dry_run:
            click.echo(_write_thing(thing))
        elif not remove_thing(thing):
            click.echo(f"{thing.path} is in use by another process and stays", err=True)
            continue
        gone += thing.size_bytes
    word = "would be removed" if given.dry_run else "were removed"
    click.echo(f"{gone / MIB:,.1f} MiB {word}", err=True)
    if given.dry_run:
        return
    for kind in dict.fromkeys(thing.kind for thing in things):
        click.echo(f"{kind}: {KINDS[kind]}", err=True)


def _write_thing(thing: CachedThing) -> str:
    age = _write_age(thing.used_s)
    return f"{thing.kind:10} {thing.size_bytes / MIB:10,.1f} MiB  {age:>8}  {thing.path}"


def _write_age(used_s: float | None) -> str:
    if used_s is None:
        return "-"
    hours = max(0, int(time.time() - used_s)) // 3600
    if hours < 48:
        return f"{hours} h ago"
    return f"{hours // 24} d ago"


def _describe(thing: CachedThing) -> dict[str, object]:
    return {
        "kind": thing.kind,
        "path": str(thing.path),
        "bytes": thing.size_bytes,
        "used_s": round(thing.used_s),
    }
