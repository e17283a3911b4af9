"""Where in a TOML text a cursor stands, while the text is being written and may be unfinished."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from pi2.plan.toml.paths import KeyPath

Role = Literal["key", "header", "value", "none"]

_TOKEN = re.compile(
    r"(?P<newline>\n)"
    r"|(?P<blank>[ \t\r]+)"
    r"|(?P<comment>#[^\n]*)"
    r'|(?P<text>"""(?:\\.|[^\\])*?(?:"""|\Z)|\'\'\'.*?(?:\'\'\'|\Z)'
    r'|"(?:\\.|[^"\\\n])*(?:"|(?=\n)|\Z)|\'[^\'\n]*(?:\'|(?=\n)|\Z))'
    r"|(?P<word>[A-Za-z0-9_+-]+)"
    r"|(?P<mark>.)",
    re.DOTALL,
)


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """What is being written at a place."""

    role: Role
    path: KeyPath
    """Path of the key, header or value: for a key or header, the table that it is in with the
    parts before; for a value, its own."""
    prefix: str = ""
    """What of the word stands before the cursor, without its quote."""
    start: int = 0
    """Offset of the word, behind its quote."""
    is_quoted: bool = False


@dataclass
class _Frame:
    """A table or array that is open."""

    mark: str
    """Closing bracket, or nothing for the document."""
    path: KeyPath
    parts: list[str] = field(default_factory=list)
    """Parts of the key so far."""
    in_value: bool = False
    is_done: bool = False
    """Whether the value is complete."""
    count: int = 0
    """Items of an array so far."""

    def start_pair(self) -> None:
        """Forget the pair before."""
        self.parts, self.in_value, self.is_done = [], False, False

    @property
    def value_path(self) -> KeyPath:
        """Path of the value that stands here."""
        return (*self.path, self.count) if self.mark == "]" else (*self.path, *self.parts)


class _Reader:
    """Reads tokens up to the cursor."""

    def __init__(self) -> None:
        self.root = _Frame("", ())
        self.frames = [self.root]
        self.counts: dict[KeyPath, int] = {}
        self.header: list[str] | None = None
        self.brackets = 0

    def take(self, kind: str, text: str) -> None:
        """Take one whole token."""
        if kind in ("blank", "comment"):
            return
        if self.header is not None:
            self.take_header(kind, text)
            return
        frame = self.frames[-1]
        if kind == "newline":
            if frame.mark == "":
                frame.start_pair()
        elif kind in ("word", "text"):
            self.take_word(frame, kind, text)
        elif text in "[{":
            self.open(frame, text)
        elif text in "]}":
            self.close(text)
        elif text == "=" and frame.mark != "]":
            frame.in_value = True
        elif text == ",":
            if frame.mark == "]":
                frame.count += 1
            elif frame.mark == "}":
                frame.start_pair()
            frame.is_done = False

    def take_word(self, frame: _Frame, kind: str, text: str) -> None:
        if frame.in_value or frame.mark == "]":
            frame.is_done = True
        else:
            frame.parts.append(unquote(text) if kind == "text" else text)

    def open(self, frame: _Frame, mark: str) -> None:
        if frame.mark == "" and not frame.in_value and not frame.parts and mark == "[":
            self.header, self.brackets = [], 1
            return
        closing = "]" if mark == "[" else "}"
        if frame.in_value or frame.mark == "]":
            self.frames.append(_Frame(closing, frame.value_path))

    def close(self, mark: str) -> None:
        if len(self.frames) > 1 and self.frames[-1].mark == mark:
            self.frames.pop()
            self.frames[-1].is_done = True

    def take_header(self, kind: str, text: str) -> None:
        assert self.header is not None
        if kind == "newline":
            self.header = None
        elif kind in ("word", "text"):
            self.header.append(unquote(text) if kind == "text" else text)
        elif text == "[" and not self.header:
            self.brackets = 2
        elif text == "]":
            self.enter(self.header)
            self.header = None
            self.root.is_done = True  # the second bracket, and what follows on the line

    def enter(self, parts: list[str]) -> None:
        """Go into the table of a header."""
        path: KeyPath = ()
        for number, part in enumerate(parts):
            path = (*path, part)
            if number == len(parts) - 1 and self.brackets == 2:
                self.counts[path] = self.counts.get(path, -1) + 1
            if path in self.counts:
                path = (*path, self.counts[path])
        self.root.path = path
        self.root.start_pair()
        del self.frames[1:]


def unquote(text: str) -> str:
    """A text without its quotes; what is escaped stays so."""
    for quote in ('"""', "'''", '"', "'"):
        if text.startswith(quote):
            inner = text[len(quote) :]
            return inner.removesuffix(quote)
    return text


def find_cursor(text: str, offset: int) -> Cursor:
    """Find out what is being written at ``offset``."""
    reader = _Reader()
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup or "mark"
        is_open = kind in ("word", "text", "comment") and match.start() < offset <= match.end()
        if is_open and kind == "text" and offset == match.end() and _is_closed(match[0]):
            is_open = False
        if match.start() >= offset or is_open:
            if not is_open:
                return _describe(reader, "", offset, quoted=False)
            if kind == "comment":
                return Cursor(role="none", path=())
            quote = len(match[0]) - len(match[0].lstrip("\"'")) if kind == "text" else 0
            quote = min(quote, 3 if match[0][:3] in ('"""', "'''") else 1) if quote else 0
            start = min(match.start() + quote, offset)
            return _describe(reader, text[start:offset], start, quoted=quote > 0)
        reader.take(kind, match[0])
    return _describe(reader, "", offset, quoted=False)


def _is_closed(token: str) -> bool:
    return len(token) > 1 and token[-1] == token[0]


def _describe(reader: _Reader, prefix: str, start: int, *, quoted: bool) -> Cursor:
    frame = reader.frames[-1]
    if reader.header is not None:
        return Cursor(
            role="header",
            path=tuple(reader.header),
            prefix=prefix,
            start=start,
            is_quoted=quoted,
        )
    if frame.is_done:
        return Cursor(role="none", path=frame.value_path)
    is_value = frame.in_value or frame.mark == "]"
    return Cursor(
        role="value" if is_value else "key",
        path=frame.value_path,
        prefix=prefix,
        start=start,
        is_quoted=quoted,
    )
