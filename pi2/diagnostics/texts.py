"""Findings as text: in full, a line each, or as JSON; and pages about codes."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from pi2.diagnostics.diagnostic import Diagnostic, Span, label_note


def list_formats() -> list[str]:
    return ["concise", "full", "github", "gitlab", "json", "junit", "sarif"]


def render(
    name: str,
    diagnostics: Sequence[Diagnostic],
    *,
    colour: bool = False,
    sources: Mapping[str, str] | None = None,
    find_page: FindPage | None = None,
) -> str:
    """Diagnostics in the format ``name``, ending with a newline unless empty.

    ``sources``: texts by file name; ``find_page`` looks up what there is to say about a code."""

    match name:
        case "full":
            return render_full(diagnostics, colour=colour, sources=sources)
        case "concise":
            return render_concise(diagnostics, colour=colour)
        case "json":
            return render_json(diagnostics)

    from pi2.diagnostics import reports

    match name:
        case "github":
            return reports.render_github(diagnostics)
        case "gitlab":
            return reports.render_gitlab(diagnostics, sources or {})
        case "junit":
            return reports.render_junit(diagnostics, sources or {})
    return reports.render_sarif(diagnostics, sources or {}, find_page)


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
    """Make control characters visible: a file must not command the terminal."""
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
    """``line`` as shown, and the column of each character and of the end; tabs become blanks."""
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


SECTIONS = ("Why", "Example", "Fix")


@dataclass(frozen=True, kw_only=True)
class Page:
    """What there is to say about one code; texts are Markdown, a line per paragraph."""

    code: str
    what: str
    """One sentence, with a full stop."""
    why: str
    example: str
    fix: str

    @property
    def sections(self) -> tuple[tuple[str, str], ...]:
        """Headings and texts after the first sentence."""
        return tuple(zip(SECTIONS, (self.why, self.example, self.fix), strict=True))


FindPage = Callable[[str], Page | None]
"""Looks up the page of a code."""


def begin_sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


MAX_COLUMNS = 110
"""Longer source lines are cut around the place."""
MAX_READ = 1 << 21
"""Longest file that is read to show a line of it, in bytes."""


def render_full(
    diagnostics: Sequence[Diagnostic],
    *,
    colour: bool = False,
    sources: Mapping[str, str] | None = None,
) -> str:
    """Write every diagnostic with its source line; files missing in ``sources`` are read."""
    texts = _Texts(sources or {})
    return "\n".join(_render_one(item, texts, colour) for item in diagnostics)


class _Texts:
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


def render_concise(diagnostics: Sequence[Diagnostic], *, colour: bool = False) -> str:
    lines = []
    for item in diagnostics:
        place = f"{paint(escape_controls(str(item.span)), 'place', colour)}: " if item.span else ""
        head = paint(f"{item.severity}[{item.code}]", item.severity, colour)
        text = escape_controls(item.message)
        if item.help:
            text += f" ({escape_controls(item.help)})"
        lines.append(f"{place}{head} {text}\n")
    return "".join(lines)


def render_json(diagnostics: Sequence[Diagnostic]) -> str:
    """Write an array, empty if there is nothing to report."""
    return json.dumps([asdict(item) for item in diagnostics], indent=2, ensure_ascii=False) + "\n"
