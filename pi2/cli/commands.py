"""The commands of ``pi2``: modules of this folder with a ``command``, imported when called.

``pi2 --help`` reads the first line of each module's docstring and its ``GROUP``, the section of the
help that the command stands in, and imports none of them.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import click

_FOLDER = Path(__file__).parent
_COMMAND = re.compile(r"^(?:def command\(|command(?:: [\w.]+)? = )", re.MULTILINE)
_SUMMARY = re.compile(r'\A"""(?P<line>[^\n"]+)')
_GROUP = re.compile(r'^GROUP = "(?P<name>[\w ]+)"$', re.MULTILINE)

GROUPS = ("Run", "Author", "Plan", "Convert", "More commands")
"""Sections of the help, in order; a command without a ``GROUP`` stands in the last one."""


def list_commands() -> dict[str, str]:
    """Help lines of the commands by name."""
    return {name: line for name, (_, line) in _read_commands().items()}


def list_groups() -> dict[str, dict[str, str]]:
    """Help lines of the commands by name, in the sections of the help."""
    groups: dict[str, dict[str, str]] = {group: {} for group in GROUPS}
    for name, (group, line) in _read_commands().items():
        groups.setdefault(group, {})[name] = line
    return {group: commands for group, commands in groups.items() if commands}


def _read_commands() -> dict[str, tuple[str, str]]:
    """Group and help line of each command by name, as the modules' texts have them."""
    found = {}
    for path in sorted(_FOLDER.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if _COMMAND.search(text) is not None:
            summary, group = _SUMMARY.match(text), _GROUP.search(text)
            found[path.stem.replace("_", "-")] = (
                group["name"] if group else GROUPS[-1],
                summary["line"].rstrip(".") if summary else "",
            )
    return found


class PipeClosed(Exception):
    """Nobody reads the standard output any more."""


class LazyGroup(click.Group):
    """A group whose commands are modules, found by file name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(list_commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in list_commands():
            return None
        module = importlib.import_module(f"pi2.cli.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        if not any(item.name == "verbose" for item in command.params):
            command.params.append(make_verbose_option())
        name_numbers(command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            ctx.fail(describe_unknown(name))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups = list_groups()
        width = max(len(name) for commands in groups.values() for name in commands)
        for group, commands in groups.items():
            with formatter.section(group):
                formatter.write_dl([(name.ljust(width), line) for name, line in commands.items()])

    def invoke(self, ctx: click.Context) -> Any:
        # click would end the process with 1, which means findings here.
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise PipeClosed from error


class Subcommands(click.Group):
    """A group that says of its commands what they do without cutting sentences."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            assert command is not None
            rows.append((name, command.get_short_help_str(limit=1000).rstrip(".")))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def name_numbers(command: click.Command) -> None:
    """Let the help call the numbers of options N and X instead of by their types."""
    for option in command.params:
        if isinstance(option, click.Option) and option.metavar is None and not option.is_flag:
            if isinstance(option.type, click.types.IntParamType):
                option.metavar = "N"
            elif isinstance(option.type, click.types.FloatParamType):
                option.metavar = "X"
    if isinstance(command, click.Group):
        for own in command.commands.values():
            name_numbers(own)


def describe_unknown(name: str) -> str:
    """What to say of a command that does not exist."""
    import difflib

    near = difflib.get_close_matches(name, list_commands(), n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    if not near and name.endswith(".plan.toml"):
        hint = f" To run a plan, write `pi2 run {name}`."
    return f"There is no command {name!r}.{hint}"


def make_verbose_option() -> click.Option:
    """The option ``-v``: verbose; repeated: debug output."""
    return click.Option(
        ["-v", "--verbose"],
        count=True,
        expose_value=False,
        callback=_set_verbosity,
        help="Verbose; repeat for debug output.",
    )


def _set_verbosity(ctx: click.Context, option: click.Parameter, count: int) -> None:
    if count:
        from pi2.logging import configure_logging

        configure_logging(count)
