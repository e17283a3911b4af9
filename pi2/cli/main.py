"""The program ``pi2``: its streams, its commands, which are imported when they run, and its end.

Exit codes: 0 fine, 1 findings, 2 cannot run, 3 bug, 128 + n on signal n."""

from __future__ import annotations

import errno
import gc
import importlib
import io
import os
import sys
import tomllib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TextIO

import click

from pi2.caches import find_common
from pi2.diagnostics import Diagnostic, UserError
from pi2.logging import configure_logging, wants_colour


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


def is_guided() -> bool:
    """Whether questions can be asked: on a terminal."""
    return sys.stdin.isatty() and sys.stderr.isatty()


_TABLE = tomllib.loads(Path(__file__).with_name("commands.toml").read_text("utf-8"))
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
        configure_logging(count)


CANNOT_RUN, BUG, INTERRUPTED, PIPE_CLOSED = 2, 3, 130, 141

EPILOG = (
    "Exit codes: 0 fine, 1 findings, 2 cannot run, 3 a bug of pi2, 130 interrupted.  "
    "PLAN is a *.plan.toml file, a model that was pulled or converted, a plan that comes with pi2, "
    "such as demo, a GGUF file, or the folder of a checkpoint."
)


group = LazyGroup(
    "pi2",
    help="Run large language models that do not fit into memory, from plan files.",
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
click.version_option(package_name="pi2", message="pi2 %(version)s", help="Print the version.")(
    group
)
group.params.append(make_verbose_option())


def main() -> NoReturn:
    open_streams()
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = PIPE_CLOSED
    except UserError as error:
        if code == 0:
            print_diagnostics(error.diagnostics)
        code = code or error.exit_code
        discard_output()
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code == PIPE_CLOSED:
        discard_output()
    gc.freeze()  # at its end, Python would look through everything that is about to go: 0.03 s
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    show_any_text()
    try:
        result = group.main(list(arguments), prog_name="pi2", standalone_mode=False)
        return result if type(result) is int else 0
    except UserError as error:
        print_diagnostics(error.diagnostics, error.sources)
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return CANNOT_RUN
    except (KeyboardInterrupt, click.Abort):
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except PipeClosed:
        return PIPE_CLOSED
    except MemoryError:
        print("error[P690]: this machine has not enough free memory", file=sys.stderr)
        return CANNOT_RUN
    except (SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a library's panic is no Exception
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            wrong = UserError.of("P003", "the name is too long", file=str(error.filename))
            print_diagnostics(wrong.diagnostics)
            return CANNOT_RUN
        report_crash(error, next((item for item in arguments if item[:1] != "-"), ""))
        return BUG


def print_diagnostics(
    diagnostics: Sequence[Diagnostic], sources: Mapping[str, str] | None = None
) -> None:
    if diagnostics:
        from pi2.diagnostics import texts

        colour = wants_colour(sys.stderr)
        sys.stderr.write(texts.render_full(diagnostics, colour=colour, sources=sources))


_LIBRARIES = ("apache-tvm", "apache-tvm-ffi", "click", "numpy", "pyarrow", "pydantic", "tomli")


def report_crash(error: BaseException, command: str) -> None:
    """Write the log and say on stderr where it is; arguments may hold prompts and stay out."""
    text = describe_crash(error, command)
    place = write_log(text)
    reason = traceback.format_exception_only(error)[-1].strip()
    lines = [f"error[P900]: pi2 has a bug: {reason}"]
    if place is None:
        lines.append(text)
    else:
        lines.append(f"   = help: please report it with the log {place}")
    print("\n".join(lines), file=sys.stderr)


def describe_crash(error: BaseException, command: str) -> str:
    import platform

    lines = [f"pi2 {find_version('pi2')}, command {command!r}"]
    lines.append(f"Python {platform.python_version()} on {platform.platform()}")
    lines += [f"{name} {find_version(name)}" for name in _LIBRARIES]
    trace = "".join(traceback.format_exception(error))
    return "\n".join([*lines, "", trace])


def find_version(name: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def write_log(text: str) -> Path | None:
    """Write ``text`` to a new file in the user's state folder, else in the temporary one."""
    import tempfile

    find_state = partial(find_common, "XDG_STATE_HOME", ".local/state", os.environ)
    for find in (find_state, tempfile.gettempdir):
        try:
            folder = Path(find())
            folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix="pi2-crash-", suffix=".log", dir=folder)
            with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as stream:
                stream.write(text)
            return Path(name)
        except OSError:
            continue
    return None
