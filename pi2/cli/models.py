"""What pi2 fetches and keeps: models, caches, device descriptions."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pi2.cli.main import Subcommands, print_diagnostics
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

if TYPE_CHECKING:
    from pi2.sharing.lock import Source
    from pi2.sharing.project import Outcome, Project


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
        click.echo(json.dumps([_describe_thing(thing) for thing in things], indent=1))
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


def _describe_thing(thing: CachedThing) -> dict[str, object]:
    return {
        "kind": thing.kind,
        "path": str(thing.path),
        "bytes": thing.size_bytes,
        "used_s": round(thing.used_s),
    }


@click.group("profile", cls=Subcommands)
def profile_command() -> None:
    """Fetch, lock, verify and publish device descriptions.

    References look like gh:owner/repo//devices/acme-12.device.toml@v1, git+https:…, git+file:…,
    https:… or file:….  pi2.lock pins the exact bytes of each reference; only these commands fetch,
    and plans use locked files."""


_offline = click.option("--offline", is_flag=True, help="Do not use the network.")
_locked = click.option("--locked", is_flag=True, help="Fail where pi2.lock would have to change.")


@profile_command.command("add")
@click.argument("references", nargs=-1, metavar="[REFERENCE]...")
@_offline
@_locked
def add(references: tuple[str, ...], offline: bool, locked: bool) -> None:
    """Fetch each REFERENCE, check it, and write it into pi2.lock.

    Without a REFERENCE, fetch what pi2.lock pins and is missing here, and change nothing."""
    project = _open_project(offline=offline, locked=locked)
    outcomes = project.add(references)
    _print_outcomes(outcomes, project)
    if references:
        first = outcomes[0].source
        key = "model" if first.file_name.endswith(".model.toml") else "device"
        if first.file_name.endswith(".plan.toml"):
            click.echo(f'use it: extends = ["{first.reference}"]')
        else:
            click.echo(f'use it: {key} = "{first.reference}"')


@profile_command.command("update")
@click.argument("references", nargs=-1, metavar="[REFERENCE]...")
@click.option(
    "--accept-moved-tags", is_flag=True, help=("Accept tags that now point to another commit.")
)
@_offline
@_locked
def update(
    references: tuple[str, ...], accept_moved_tags: bool, offline: bool, locked: bool
) -> None:
    """Update pi2.lock to what each REFERENCE (default: all) points to now.

    Branches and files may change; a tag that points to another commit than before is refused."""
    project = _open_project(offline=offline, locked=locked)
    _print_outcomes(project.update(references, accept_moved=accept_moved_tags), project)


@profile_command.command("list")
@add_json_option
def list_sources(as_json: bool) -> None:
    """List the entries of pi2.lock and where their files are."""
    from pi2.diagnostics import UserError
    from pi2.sharing.lock import find_copy

    project = _open_project()
    lock = project.read_lock()
    rows = []
    for source in lock.sources:
        try:
            state = "missing" if find_copy(source, project.cache) is None else "cached"
        except UserError:
            state = "damaged"
        rows.append({**source.model_dump(mode="json"), "state": state})
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        revision = row["revision"][:12] or "-"
        click.echo(f"{row['state']:8}  {revision:12}  {row['sha256'][:12]}  {row['reference']}")
    if not rows:
        click.echo("nothing is locked here", err=True)


@profile_command.command("verify")
@_offline
@add_json_option
def verify(offline: bool, as_json: bool) -> int:
    """Check every file in pi2.lock, here and at its source.

    Here: its bytes, its content, and that lock and reference agree.  At its source (not with
    --offline): that tags point to the same commit and web files have the same bytes.  Exits with 1
    if a check fails."""
    project = _open_project(offline=offline)
    found = project.verify()
    for _, error in found:
        if error is not None and not as_json:
            print_diagnostics(error.diagnostics, error.sources)
    bad = sum(error is not None for _, error in found)
    if as_json:
        rows = [
            {
                "reference": source.reference,
                "sha256": source.sha256,
                "findings": [] if error is None else [x.message for x in error.diagnostics],
                "codes": [] if error is None else [x.code for x in error.diagnostics],
            }
            for source, error in found
        ]
        click.echo(json.dumps(rows, indent=2))
    else:
        click.echo(f"{len(found)} locked, {bad} with findings" if bad else f"{len(found)} verified")
    return 1 if bad else 0


@profile_command.command("publish")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--into",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Your clone of the repository to publish to.",
)
@click.option("--force", "replace", is_flag=True, help="Overwrite a profile of the same name.")
def publish(file: Path, into: Path, replace: bool) -> None:
    """Prepare the device FILE for a pull request.

    Checks it, removes serial numbers, account names and home folders, and writes it to
    devices/ID.device.toml in a clone.  Prints its SHA-256 and the next steps."""
    from pi2.plan.toml.source import display_path
    from pi2.sharing.project import prepare_profile, write_profile

    prepared = prepare_profile(file)
    for line in prepared.stripped:
        click.echo(f"removed: {line}", err=True)
    written = write_profile(prepared, into, replace=replace)
    click.echo(f"{display_path(written.path)}")
    click.echo(f"sha256 {prepared.sha256}, {len(prepared.data)} bytes")
    for line in written.next_steps:
        click.echo(f"next: {line}")


def _open_project(*, offline: bool = False, locked: bool = False) -> Project:
    from pi2.sharing.fetching import read_settings
    from pi2.sharing.project import Project

    return Project(folder=Path.cwd(), settings=read_settings(), offline=offline, locked=locked)


def _print_outcomes(outcomes: list[Outcome], project: Project) -> None:
    from pi2.plan.toml.source import display_path

    for item in outcomes:
        before = "" if item.before is None else f"{_describe_source(item.before)} -> "
        click.echo(
            f"{item.state:9}  {item.source.reference}  {before}{_describe_source(item.source)}"
        )
    if any(item.state in ("added", "updated") for item in outcomes):
        click.echo(f"{display_path(project.lock_path)}: written; commit it", err=True)
    if not outcomes:
        click.echo("nothing is locked here", err=True)


def _describe_source(source: Source) -> str:
    revision = f"{source.revision[:12]} " if source.revision else ""
    return f"{revision}sha256 {source.sha256[:12]}"
