"""The program ``pi2``. Exit codes: 0 fine, 1 findings, 2 cannot run, 3 bug, 128 + n on signal n."""

import errno
import gc
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TextIO

import click

from pi2.caches import find_state_folder
from pi2.cli.commands import (
    LazyGroup,
    PipeClosed,
    discard_output,
    make_verbose_option,
    open_streams,
    show_any_text,
)
from pi2.diagnostics import Diagnostic, UserError

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

    finders: tuple[Callable[[], Path], ...] = (
        lambda: find_state_folder(os.environ),
        lambda: Path(tempfile.gettempdir()),
    )
    for find in finders:
        try:
            folder = find()
            folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix="pi2-crash-", suffix=".log", dir=folder)
            with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as stream:
                stream.write(text)
            return Path(name)
        except OSError:
            continue
    return None


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


def wants_colour(stream: TextIO) -> bool:
    """Colours are for terminals only, and not for those who set NO_COLOR."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


if __name__ == "__main__":
    main()
