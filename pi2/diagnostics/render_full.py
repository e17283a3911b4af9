"""Full format: like a good compiler's, with the source line and a caret run under the place.

::

    error[P202]: segment kv has 2 MiB, 4 MiB are needed
      --> plans/demo.plan.toml:19:6
       |
    19 | kv = "2 MiB"
       |      ^^^^^^^
       = origin: plans/models/pi2-demo.model.toml:16:1: layers = 8
       = help: write kv = "4 MiB"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pi2.diagnostics.diagnostic import Diagnostic, Span, label_note
from pi2.diagnostics.text import escape_controls, paint, show_line

if TYPE_CHECKING:
    from pi2.diagnostics.page import FindPage

MAX_COLUMNS = 110
"""Longer source lines are cut around the place."""
MAX_READ = 1 << 21
"""Longest file that is read to show a line of it, in bytes."""


def render(
    diagnostics: Sequence[Diagnostic],
    *,
    colour: bool = False,
    sources: Mapping[str, str] | None = None,
    find_page: FindPage | None = None,
) -> str:
    """Write every diagnostic with its source line; files missing in ``sources`` are read."""
    del find_page
    texts = _Texts(sources or {})
    return "\n".join(_render_one(item, texts, colour) for item in diagnostics)


class _Texts:
    """Lines of files, read once."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.lines = {name: _split_lines(text) for name, text in sources.items()}

    def find_line(self, file: str, number: int) -> str | None:
        """Line ``number`` of ``file``; None where there is none to show."""
        if file not in self.lines:
            self.lines[file] = _split_lines(_read_text(file))
        lines = self.lines[file]
        return lines[number - 1] if number <= len(lines) else None


def _split_lines(text: str) -> list[str]:
    lines = text.split("\n")
    return [line.removesuffix("\r") for line in lines]


def _read_text(file: str) -> str:
    try:
        with open(file, "rb") as stream:
            return stream.read(MAX_READ).decode("utf-8", errors="replace")
    except (OSError, ValueError):
        return ""


def _render_one(item: Diagnostic, texts: _Texts, colour: bool) -> str:
    head = paint(f"{item.severity}[{item.code}]", item.severity, colour)
    lines = [f"{head}{paint(': ' + escape_controls(item.message), 'message', colour)}"]
    margin = " " * (2 if item.span is None else max(2, len(str(item.span.end_line))))
    if item.span is not None:
        lines += _render_place(item, item.span, texts, margin, colour)
    mark = paint("=", "frame", colour)
    for note in item.notes:
        lines.append(f"{margin} {mark} {escape_controls(label_note(note))}")
    if item.help is not None:
        word = paint("help", "help", colour)
        lines.append(f"{margin} {mark} {word}: {escape_controls(item.help)}")
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _render_place(
    item: Diagnostic, span: Span, texts: _Texts, margin: str, colour: bool
) -> list[str]:
    arrow = paint("-->", "frame", colour)
    lines = [f"{margin[1:]}{arrow} {escape_controls(span.place)}"]
    if span.is_whole_file:
        return lines
    line = texts.find_line(span.file, span.line)
    if line is None:
        return lines
    bar = paint("|", "frame", colour)
    number = paint(str(span.line).rjust(len(margin)), "frame", colour)
    shown, start, length = _cut(line, span)
    marks = paint("^" * length, item.severity, colour)
    lines.append(f"{margin} {bar}")
    lines.append(f"{number} {bar} {shown}")
    lines.append(f"{margin} {bar} {' ' * start}{marks}")
    if span.end_line > span.line and texts.find_line(span.file, span.end_line) is not None:
        last = paint(str(span.end_line).rjust(len(margin)), "frame", colour)
        lines.append(f"{margin} {bar} ... up to line {last}")
    return lines


def _cut(line: str, span: Span) -> tuple[str, int, int]:
    """The line as shown, the caret's offset in it and the number of carets."""
    first = min(span.column - 1, len(line))
    last = len(line) if span.end_line > span.line else min(span.end_column - 1, len(line))
    # Only the surroundings are measured: a line may be a whole file.
    origin = max(0, first - 2 * MAX_COLUMNS)
    end = first + 4 * MAX_COLUMNS
    more = end < len(line)
    line, first, last = line[origin:end], first - origin, min(last, end) - origin
    shown, columns = show_line(line)
    start = columns[first]
    length = max(1, columns[last] - start)
    if columns[-1] <= MAX_COLUMNS and origin == 0:
        return shown, start, length
    begin = 0 if start < MAX_COLUMNS // 2 else start - MAX_COLUMNS // 4
    left = next(index for index, column in enumerate(columns) if column >= begin)
    right = max(i for i, column in enumerate(columns) if column <= columns[left] + MAX_COLUMNS)
    piece, _ = show_line(line[left:right])
    before = "..." if origin + left else ""
    after = "..." if more or right < len(line) else ""
    offset = start - columns[left] + len(before)
    return before + piece + after, offset, min(length, max(1, columns[right] - start))
