"""What happens when pi2 itself is at fault: a log file with what a bug report needs."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from pi2.caches import find_state_folder

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
    """Versions, platform, the command's name, and the traceback."""
    import platform

    lines = [f"pi2 {find_version('pi2')}, command {command!r}"]
    lines.append(f"Python {platform.python_version()} on {platform.platform()}")
    lines += [f"{name} {find_version(name)}" for name in _LIBRARIES]
    trace = "".join(traceback.format_exception(error))
    return "\n".join([*lines, "", trace])


def find_version(name: str) -> str:
    """Installed version of a distribution."""
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
