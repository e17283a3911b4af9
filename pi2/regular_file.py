"""Files that are files: FIFOs and devices have names too, and reading them may never end.

Stores and checkpoints come from strangers.  Where such a place stands in a file's, opening it is an
`OSError` like any other, whose ``strerror`` says what it is.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from io import FileIO
from pathlib import Path

_KINDS = (
    (stat.S_ISDIR, "it is a folder"),
    (stat.S_ISFIFO, "it is a FIFO, not a file"),
    (stat.S_ISSOCK, "it is a socket, not a file"),
    (stat.S_ISCHR, "it is a device, not a file"),
    (stat.S_ISBLK, "it is a device, not a file"),
)

GGUF_MAGICS = {b"GGUF": False, b"PWRI": True}
"""How GGUF files begin.  PowerInfer's have a magic of their own; nothing else differs."""


def check_regular(path: Path) -> os.stat_result:
    """What is known of the file ``path``; `OSError` if it is none."""
    found = os.stat(path)
    _check(path, found.st_mode)
    return found


def open_regular(path: Path, flags: int = 0) -> int:
    """Open a file for reading, with further ``flags`` of the system; returns the descriptor."""
    check_regular(path)
    # It may be another by now: O_NONBLOCK waits for nobody.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | flags)
    try:
        _check(path, os.fstat(descriptor).st_mode)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_stream(path: Path) -> FileIO:
    """Open a regular file as a stream without a buffer."""
    return FileIO(open_regular(path), "rb")


def is_gguf(path: Path) -> bool:
    """Whether a file is a GGUF file, whatever its name is, or is called one."""
    try:
        with open_stream(path) as file:
            return has_gguf_suffix(path) or file.read(4) in GGUF_MAGICS
    except (OSError, ValueError):  # it cannot be read, or no file can have the name
        return False


def has_gguf_suffix(path: Path) -> bool:
    """Whether a file is called a GGUF file."""
    return path.suffix.lower() == ".gguf"


def show_path(path: Path) -> str:
    """The path as text that can be written anywhere: bytes that are not UTF-8 are ``\\xff``."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def read_regular(path: Path) -> bytes:
    """The file's contents."""
    with open_stream(path) as file:
        return file.read()


def _check(path: Path, mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    problem = next((text for test, text in _KINDS if test(mode)), "it is not a file")
    code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    raise OSError(code, problem, str(path))
