"""Pages of the site from outside of docs: the README and its like, and the help of all commands.

A hook of MkDocs, which ``mkdocs.yml`` names.  Links of the files lead to pages of the site.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from pi2.cli.main import LazyGroup

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages of the site by the files that they are made from."""

COMMANDS = "reference/cli.md"
"""Page of the site with the help of all commands."""

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages to those of docs."""
    for name, page in PAGES.items():
        text = adapt_links((ROOT / name).read_text("utf-8"))
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, COMMANDS, content=write_commands()))
    return files


def write_commands() -> str:
    """The help of every command, as a terminal of 80 columns shows it."""
    parts = ["# Commands\n"]
    group = LazyGroup()
    around = click.Context(group)
    for name in group.list_commands(around):
        found = group.get_command(around, name)
        assert found is not None
        for path, command in walk_commands(name, found):
            context = click.Context(command, info_name=f"pi2 {path}", max_content_width=80)
            parts.append(f"## pi2 {path}\n\n```text\n{command.get_help(context)}\n```\n")
    return "\n".join(parts)


def walk_commands(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """A command and its subcommands with their words."""
    yield path, command
    if isinstance(command, click.Group):
        for name, item in sorted(command.commands.items()):
            yield from walk_commands(f"{path} {name}", item)


def adapt_links(text: str) -> str:
    """Links to docs and to other pages as the site has them; others become plain text."""

    def adapt(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        if target.startswith("docs/"):
            return f"{mark}[{label}]({target.removeprefix('docs/')})"
        if target in PAGES:
            return f"[{label}]({PAGES[target]})"
        return label

    return LINK.sub(adapt, text)
