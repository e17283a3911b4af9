"""Fetch, lock, verify and publish device descriptions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pi2.cli.main import Subcommands, print_diagnostics
from pi2.cli.options import add_json_option

if TYPE_CHECKING:
    from pi2.sharing.lock import Source
    from pi2.sharing.project import Outcome, Project


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
        before = "" if item.before is None else f"{_describe(item.before)} -> "
        click.echo(f"{item.state:9}  {item.source.reference}  {before}{_describe(item.source)}")
    if any(item.state in ("added", "updated") for item in outcomes):
        click.echo(f"{display_path(project.lock_path)}: written; commit it", err=True)
    if not outcomes:
        click.echo("nothing is locked here", err=True)


def _describe(source: Source) -> str:
    revision = f"{source.revision[:12]} " if source.revision else ""
    return f"{revision}sha256 {source.sha256[:12]}"
