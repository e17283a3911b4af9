"""Commands of ``pi2``, imported when they run."""

from __future__ import annotations

import importlib
import io
import os
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Lock, Timer
from typing import TYPE_CHECKING, Any, Self, TextIO

import click

from pi2.diagnostics import UserError
from pi2.progress import COMPILING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class _Stream(io.FileIO):
    def write(self, data: bytes) -> int | None:  # type: ignore[override]
        """Write ``data``. If standard output takes none, UserError P631, unless a pipe has lost its
        reader; standard error need not be there."""
        try:
            return super().write(data)
        except OSError as error:
            if self.fileno() == 2:
                return len(data)
            if isinstance(error, BrokenPipeError):
                raise
            raise UserError.of(
                "P631",
                f"cannot write standard output: {error.strerror}",
                help="redirect it to where there is room, or leave it to the terminal",
            ) from None


def open_streams() -> None:
    # Files that are opened later must not get the numbers of closed streams.  Nothing can be
    # written to this standard output either, and nothing comes from this standard input.
    for number, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = _wrap(_Stream(1, "wb", closefd=False), sys.stdout)
    sys.stderr = _wrap(_Stream(2, "wb", closefd=False), sys.stderr, at_once=True)


def _wrap(raw: io.FileIO, old: TextIO | None, *, at_once: bool = False) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=getattr(old, "encoding", None) or "utf-8",
        # A file name or a terminal without UTF-8 is no reason to fail.
        errors="backslashreplace",
        line_buffering=at_once or raw.isatty(),
    )


def show_any_text() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def discard_output() -> None:
    """Forget what standard output still holds: Python flushes it once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def write_text(text: str) -> None:
    """Write generated text at once, without control characters if standard output is a terminal."""
    sys.stdout.write(show_controls(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def show_controls(text: str) -> str:
    """Text without control characters, which a model may write to command a terminal."""
    return "".join("\ufffd" if is_control(letter) else letter for letter in text)


def is_control(letter: str) -> bool:
    """Whether a terminal obeys it: C0 and C1 but new lines and tabs, and text direction marks."""
    code = ord(letter)
    is_turning = 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069
    return (code < 32 and letter not in "\n\t") or 127 <= code < 160 or is_turning


def is_guided() -> bool:
    """Whether questions can be asked: on a terminal."""
    return sys.stdin.isatty() and sys.stderr.isatty()


PATIENCE_S = 1.0


class ProgressBar:
    """Shows labels and shares of what takes long, if standard error is a terminal.  A context
    manager; any thread may call it."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._shown = sys.stderr.isatty()
        self._lock = Lock()
        self._shares: dict[str, tuple[str, float]] = {}
        """The last label and share, by the part of the label before its first comma."""
        self._timer: Timer | None = None
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._compiled_s = 0.0

    def __call__(self, label: str, share: float) -> None:
        if not self._shown:
            return
        name, passed_s = label.partition(",")[0], time.monotonic() - self._start
        if name == COMPILING and passed_s >= PATIENCE_S:
            self._compiled_s = passed_s
        with self._lock:
            self._shares[name] = label, share
            if self._timer is None:
                self._timer = Timer(max(0.0, PATIENCE_S - passed_s), self._open)
                self._timer.daemon = True
                self._timer.start()
            if self._bar is not None:
                self._update(self._bar)

    def _open(self) -> None:
        """Show what goes on, which may report nothing for long."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        with self._lock:
            if not self._shown:
                return
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=10),
                TextColumn("{task.percentage:>3.0f}%"),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._update(self._bar)
            self._bar.start()

    def _update(self, bar: Progress) -> None:
        for name, (label, share) in self._shares.items():
            if name not in self._tasks:
                self._tasks[name] = bar.add_task(label, total=1.0)
            bar.update(self._tasks[name], completed=share, description=label)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._shown = False
            if self._timer is not None:
                self._timer.cancel()
            if self._bar is not None:
                self._bar.stop()
        if self._compiled_s:
            text = f"note: kernels were compiled for {self._compiled_s:.0f} s and are cached"
            print(f"{text}: `pi2 cache`", file=sys.stderr)


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
OLD_SPELLINGS: Mapping[str, str] = _TABLE["spellings"]
"""Options that go on working with a warning, some of them of one command."""
COMMANDS: Mapping[str, Mapping[str, tuple[str, str]]] = _TABLE["sections"]
"""Modules and lines of help by the names of commands, in the sections of the help."""


def list_commands() -> dict[str, str]:
    commands = [item for group in COMMANDS.values() for item in group.items()]
    return {name: line for name, (_, line) in sorted(commands)}


class PipeClosed(Exception):
    """The reader of the standard output is gone."""


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(list_commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        place = next((group[cmd_name][0] for group in COMMANDS.values() if cmd_name in group), None)
        if place is None:
            return None
        module = importlib.import_module(f"pi2.cli.{place}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
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
        return super().resolve_command(ctx, list(respell(args, ctx.resilient_parsing)))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, list_commands()))
        for group, commands in COMMANDS.items():
            with formatter.section(group):
                rows = ((name.ljust(width), line) for name, (_, line) in commands.items())
                formatter.write_dl([*rows])

    def invoke(self, ctx: click.Context) -> Any:
        # click would end the process with 1, which means findings here.
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise PipeClosed from error
        except click.UsageError as error:
            if error.ctx is None or error.ctx.info_name != "run" or "extra" not in error.message:
                raise
            text = f"{error.message}: write it after --prompt or --chat"
            raise click.UsageError(text, error.ctx) from None


class Subcommands(click.Group):
    """A group that lists its commands with whole sentences."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        texts = {name: own.get_short_help_str(limit=1000) for name, own in self.commands.items()}
        with formatter.section("Commands"):
            formatter.write_dl([(name, texts[name].rstrip(".")) for name in sorted(texts)])


def respell(words: list[str], is_quiet: bool) -> Iterator[str]:
    """A command line with today's names of options; warns of others unless ``is_quiet``."""
    ends = words.index("--") if "--" in words else len(words)
    for place, word in enumerate(words):
        name, sign, value = word.partition("=")
        new = OLD_SPELLINGS.get(name) or OLD_SPELLINGS.get(f"{words[0]} {name}")
        if new is None or place > ends:
            yield word
            continue
        if not is_quiet:
            click.echo(f"warning: {name} is deprecated: write {new}", err=True)
        yield f"{new}{sign}{value}"


def name_numbers(command: click.Command) -> None:
    for option in command.params:
        if isinstance(option, click.Option) and option.metavar is None and not option.is_flag:
            kinds = (click.types.IntParamType, "N"), (click.types.FloatParamType, "X")
            option.metavar = next((n for kind, n in kinds if isinstance(option.type, kind)), None)
    for own in command.commands.values() if isinstance(command, click.Group) else ():
        name_numbers(own)


def describe_unknown(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, list_commands(), n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    is_file = name.endswith((".plan.toml", ".gguf"))
    hint = f" To run it, write `pi2 run {name}`." if is_file else hint
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


def is_verbose() -> bool:
    return bool(click.get_current_context().meta.get("verbose"))


def _set_verbosity(ctx: click.Context, option: click.Parameter, count: int) -> None:
    if count:
        ctx.meta["verbose"] = True
        from pi2.logging import configure_logging

        configure_logging(count)
