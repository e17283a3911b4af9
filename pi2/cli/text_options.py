"""Options of the commands that run a model over texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., object])


def add_text_options(text_help: str) -> Callable[[Command], Command]:
    """``--text`` (argument ``files``), ``--context`` and ``--windows``."""
    options = (
        click.option(
            "--text",
            "files",
            required=True,
            multiple=True,
            type=click.Path(path_type=Path),
            help=text_help,
        ),
        click.option(
            "--context",
            type=click.IntRange(min=2),
            help="Tokens of a window; default: kv.context, at most 512.",
        ),
        click.option(
            "--windows",
            type=click.IntRange(min=1),
            help="Windows to run, spread over the text; default: all.",
        ),
    )

    def add(command: Command) -> Command:
        # Decorators nest: the last one stands first.
        for option in reversed(options):
            command = option(command)
        return command

    return add
