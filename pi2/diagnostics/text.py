"""Text for terminals: colours, control characters, and the width of characters."""

from __future__ import annotations

import unicodedata

TAB_WIDTH = 4

_STYLES = {
    "error": "1;31",
    "warning": "1;33",
    "note": "1;36",
    "help": "1;36",
    "place": "1",
    "frame": "34",
    "message": "1",
}


def paint(text: str, style: str, colour: bool) -> str:
    """Wrap ``text`` in the style's terminal colour if ``colour``."""
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if colour else text


def escape_controls(text: str) -> str:
    """Make control characters visible, so that a file cannot speak to the terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def _escape(char: str) -> str:
    code = ord(char)
    if char == "\n":
        return "\\n"
    if char == "\t":
        return "\\t"
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def measure_width(char: str) -> int:
    """Columns that a printable character takes on a terminal: 0, 1 or 2."""
    if unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in ("W", "F") else 1


def show_line(line: str) -> tuple[str, list[int]]:
    """Return ``line`` as shown and, for each character and the end, the column where it begins.

    Tabs become blanks up to the next stop, other control characters a visible escape.
    """
    shown: list[str] = []
    columns: list[int] = []
    column = 0
    for char in line:
        columns.append(column)
        if char == "\t":
            text = " " * (TAB_WIDTH - column % TAB_WIDTH)
        elif char.isprintable():
            text = char
        else:
            text = _escape(char)
        shown.append(text)
        column += len(text) if text != char else measure_width(char)
    columns.append(column)
    return "".join(shown), columns
