"""Text that a model has written, as a terminal may show it."""

from __future__ import annotations

import sys


def write_text(text: str) -> None:
    """Write generated text to standard output at once: as it is where that is a file or a pipe,
    without characters that command a terminal where it is one."""
    sys.stdout.write(show_controls(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def show_controls(text: str) -> str:
    """The text without characters that command a terminal: a model may write what moves the cursor,
    or puts something on the clipboard."""
    return "".join("\ufffd" if is_control(letter) else letter for letter in text)


def is_control(letter: str) -> bool:
    """Whether a terminal would obey it: C0 and C1 but for new lines and tabs, and what turns the
    direction of writing."""
    code = ord(letter)
    is_turning = 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069
    return (code < 32 and letter not in "\n\t") or 127 <= code < 160 or is_turning
