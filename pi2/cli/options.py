"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from pi2.cli.suggestions import suggest_settings

Command = TypeVar("Command", bound=Callable[..., object])

add_set_option = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    shell_complete=suggest_settings,
    help="Override a value of the plan; repeatable.",
)
"""The option ``--set`` (argument ``settings``)."""

add_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
"""The option ``--json`` (argument ``as_json``)."""


def add_path_option(
    *names: str, text: str, metavar: str = "FILE", dir_okay: bool = True, **settings: Any
) -> Callable[[Command], Command]:
    """An option that takes the path of a file or a folder; ``text`` is its help."""
    kind = click.Path(path_type=Path, dir_okay=dir_okay)
    return click.option(*names, metavar=metavar, type=kind, help=text, **settings)


def add_text_options(text_help: str) -> Callable[[Command], Command]:
    """Add the options ``--text`` (argument ``files``), ``--context`` and ``--windows``."""
    options = (
        add_path_option("--text", "files", required=True, multiple=True, text=text_help),
        click.option(
            "--context",
            type=click.IntRange(min=2),
            help="Window length in tokens; default: kv.context, at most 512.",
        ),
        click.option(
            "--windows",
            type=click.IntRange(min=1),
            help="Number of windows, spread over the text; default: all.",
        ),
    )

    def add(command: Command) -> Command:
        # Decorators nest: the last one stands first.
        for option in reversed(options):
            command = option(command)
        return command

    return add
