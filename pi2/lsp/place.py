"""Places: offsets and spans of a text, and the lines and columns of the protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pi2.diagnostics import Span

Encoding = Literal["utf-8", "utf-16", "utf-32"]


@dataclass(frozen=True)
class Lines:
    """The lines of a text, with columns counted as an editor counts them."""

    text: str
    encoding: Encoding

    @property
    def lines(self) -> list[str]:
        """The lines without their ends."""
        return self.text.split("\n")

    def find_offset(self, line: int, column: int) -> int:
        """Offset of a place of the protocol, both counted from 0; the nearest there is."""
        lines = self.lines
        if line >= len(lines):
            return len(self.text)
        before = sum(len(item) + 1 for item in lines[:line])
        units = 0
        for number, char in enumerate(lines[line]):
            if units >= column:
                return before + number
            units += count_units(char, self.encoding)
        return before + len(lines[line])

    def count_column(self, line: int, characters: int) -> int:
        """Column of the protocol that stands behind so many characters of a line."""
        lines = self.lines
        text = lines[line] if line < len(lines) else ""
        return sum(count_units(char, self.encoding) for char in text[:characters])

    def convert_span(self, span: Span) -> tuple[int, int, int, int]:
        """First line and column and last line and column, from 0, of a span; that of a whole file
        is its first line."""
        if span.is_whole_file:
            return 0, 0, 0, self.count_column(0, len(self.lines[0]))
        return (
            span.line - 1,
            self.count_column(span.line - 1, span.column - 1),
            span.end_line - 1,
            self.count_column(span.end_line - 1, span.end_column - 1),
        )

    def convert_offset(self, offset: int) -> tuple[int, int]:
        """Line and column of the protocol at an offset."""
        before = self.text[:offset]
        line = before.count("\n")
        return line, self.count_column(line, len(before) - before.rfind("\n") - 1)


def count_units(char: str, encoding: Encoding) -> int:
    """Units that a character takes in the editor's encoding."""
    if encoding == "utf-32":
        return 1
    if encoding == "utf-16":
        return 2 if ord(char) > 0xFFFF else 1
    return len(char.encode("utf-8", errors="surrogatepass"))


def contains(span: Span, line: int, column: int) -> bool:
    """Whether a place, counted from 1 in characters, lies in or at the end of ``span``."""
    start, end = (span.line, span.column), (span.end_line, span.end_column)
    return not span.is_whole_file and start <= (line, column) <= end
