"""Standard input, output and error of the program, also where they are closed or cannot take more.

Output that nobody can read is the user's mistake (P631), such as a full disk behind ``>``, and
messages that cannot be shown change nothing.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO

from pi2.diagnostics import UserError


class _Output(io.FileIO):
    """Standard output."""

    def write(self, data: bytes) -> int | None:  # type: ignore[override]
        """Write ``data``; UserError P631 where it cannot be, but for a pipe that nobody reads."""
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise UserError.of(
                "P631",
                f"cannot write standard output: {error.strerror}",
                help="redirect it to where there is room, or leave it to the terminal",
            ) from None


class _Errors(io.FileIO):
    """Standard error."""

    def write(self, data: bytes) -> int | None:  # type: ignore[override]
        """Write ``data`` where it can be."""
        try:
            return super().write(data)
        except OSError:
            return len(data)


def open_streams() -> None:
    """Put streams that can be relied on in the place of Python's."""
    # Files that are opened later must not get the numbers of closed streams.  Nothing can be
    # written to this standard output either, and nothing comes from this standard input.
    for number, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = _wrap(_Output(1, "wb", closefd=False), sys.stdout)
    sys.stderr = _wrap(_Errors(2, "wb", closefd=False), sys.stderr, at_once=True)


def _wrap(raw: io.FileIO, old: TextIO | None, *, at_once: bool = False) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=getattr(old, "encoding", None) or "utf-8",
        # A file name or a terminal without UTF-8 is no reason to fail.
        errors="backslashreplace",
        line_buffering=at_once or raw.isatty(),
    )


def show_any_text() -> None:
    """Let streams show names that are not UTF-8, also those of a program that pi2 is part of."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def discard_output() -> None:
    """Forget what standard output still holds: Python flushes it once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
