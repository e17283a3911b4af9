"""List what pi2 keeps on this machine, and clear it."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING

import click

from pi2.cli.commands import Subcommands

if TYPE_CHECKING:
    from pi2.cached_files import CachedThing

GROUP = "More commands"
MIB = 1024 * 1024
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
    """Kinds of cached things."""
    from pi2.cached_files import KINDS

    for name in names:
        if name not in KINDS:
            raise click.BadParameter(f"{name!r} is no kind: known are {', '.join(KINDS)}")
    return names


@click.group("cache", cls=Subcommands, invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """List what pi2 keeps on this machine, and clear it.

    Without a command: every kind of thing with its number, size, last use and folder.
    """
    if ctx.invoked_subcommand is not None:
        return
    from pi2.cached_files import KINDS, find_kind_folder, list_cached

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


@command.command("list")
@click.argument("kinds", nargs=-1, callback=check_kinds, metavar="[KIND]...")
def list_things(kinds: tuple[str, ...]) -> None:
    """List the things of each KIND, or all: size, last use and path."""
    from pi2.cached_files import KINDS, list_cached

    for kind in kinds or KINDS:
        for thing in list_cached(kind):
            click.echo(_write_thing(thing))


@command.command("clear")
@click.argument("kinds", nargs=-1, callback=check_kinds, metavar="[KIND]...")
@click.option(
    "--older-than",
    callback=parse_age,
    metavar="AGE",
    help="Keep what was used since; such as 12h, 30d or 8w.",
)
@click.option("-n", "--dry-run", is_flag=True, help="Remove nothing; say what would go.")
def clear(kinds: tuple[str, ...], older_than: int | None, dry_run: bool) -> None:
    """Remove the things of each KIND; without one, all that pi2 makes again by itself.

    Models and what was typed in chats go if `models`, `stores` or `history` is named.
    """
    from pi2.cached_files import KINDS, ONLY_NAMED, list_cached, remove_thing

    before = None if older_than is None else time.time() - older_than
    chosen = kinds or tuple(kind for kind in KINDS if kind not in ONLY_NAMED)
    things = [thing for kind in dict.fromkeys(chosen) for thing in list_cached(kind)]
    things = [thing for thing in things if before is None or thing.used_s < before]
    gone = 0
    for thing in things:
        if dry_run:
            click.echo(_write_thing(thing))
        elif not remove_thing(thing):
            click.echo(f"{thing.path} is in use by another process and stays", err=True)
            continue
        gone += thing.size_bytes
    word = "would be removed" if dry_run else "were removed"
    click.echo(f"{gone / MIB:,.1f} MiB {word}", err=True)
    if dry_run:
        return
    for kind in dict.fromkeys(thing.kind for thing in things):
        click.echo(f"{kind}: {KINDS[kind]}", err=True)


def _write_thing(thing: CachedThing) -> str:
    age = _write_age(thing.used_s)
    return f"{thing.kind:10} {thing.size_bytes / MIB:10,.1f} MiB  {age:>8}  {thing.path}"


def _write_age(used_s: float | None) -> str:
    """How long ago something was used."""
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
