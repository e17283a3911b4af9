"""TOML syntax errors in plain words, at the place that is to be changed."""

from __future__ import annotations

import re

import tomli

from pi2.diagnostics import Diagnostic, Span
from pi2.plan.toml.brackets import find_unclosed
from pi2.plan.toml.paths import format_path
from pi2.plan.toml.spans import index_spans

_DUPLICATE_MESSAGES = (
    "Cannot overwrite",
    "Cannot declare",
    "Duplicate inline",
    "Cannot mutate",
)

_UNIT = r"(?:[kKMGT]i?B|B|[kMG]?Hz|[num]?s|m?W)"
_SLIPS = (
    (
        re.compile(rf"=\s*(?P<value>[0-9][0-9_.]*\s*{_UNIT}\b(?:/s)?)"),
        "a quantity is text and needs quotes",
    ),
    (re.compile(r"=\s*(?P<value>[0-9]+,[0-9]+)\s*$"), "numbers have a decimal point"),
    (re.compile(r"=\s*(?P<value>[A-Za-z][\w./+-]*)\s*(?:#.*)?$"), "text needs quotes"),
)
"""Values that people write, and what is wrong with them."""


def explain_syntax_error(name: str, text: str, error: tomli.TOMLDecodeError) -> list[Diagnostic]:
    """Findings for a text that tomli refused."""
    if str(error).startswith(_DUPLICATE_MESSAGES):
        duplicates = _report_duplicates(name, text)
        if duplicates:
            return duplicates
    message, help_text, span = _describe(name, text, error)
    return [Diagnostic(code="P010", message=message, help=help_text, span=span)]


def _report_duplicates(name: str, text: str) -> list[Diagnostic]:
    return [
        Diagnostic(
            code="P011",
            message=f"`{format_path(item.path)}` is defined twice",
            help="remove or rename one of them",
            span=item.second,
            notes=(f"{item.first}: first defined here",),
            path=format_path(item.path),
        )
        for item in index_spans(name, text).duplicates
    ]


def _describe(name: str, text: str, error: tomli.TOMLDecodeError) -> tuple[str, str | None, Span]:
    lines = text.split("\n")
    number = min(max(error.lineno, 1), len(lines))
    line = lines[number - 1].rstrip("\r")
    column = min(max(error.colno, 1), len(line) + 1)
    if not line and number > 1 and number == len(lines):  # the end of the document
        number -= 1
        line = lines[number - 1].rstrip("\r")
        column = len(line) + 1
    span = Span(name, number, column, number, column + 1)

    for pattern, message in _SLIPS:
        slip = pattern.search(line)
        if slip is not None and slip.end() + 1 >= column:
            place = Span(name, number, slip.start("value") + 1, number, slip.end("value") + 1)
            return message, f"write {_correct(slip['value'])}", place
    for start, message, help_text in _EXPLANATIONS:
        if error.msg.startswith(start):
            opened = None
            if start.startswith("Unclosed"):
                opened = find_unclosed(text[: min(error.pos, len(text))])
            return message, help_text, span if opened is None else locate(name, text, opened)
    return error.msg[:1].lower() + error.msg[1:], None, span


def _correct(value: str) -> str:
    """What somebody means who writes a value without quotes, or a number with a comma."""
    if value.lower() in ("true", "false"):
        return value.lower()
    if re.fullmatch(r"[0-9]+,[0-9]+", value):
        return value.replace(",", ".")
    return f'"{value}"'


def locate(name: str, text: str, offset: int) -> Span:
    """Span of one character."""
    line = text.count("\n", 0, offset) + 1
    column = offset - (text.rfind("\n", 0, offset) + 1) + 1
    return Span(name, line, column, line, column + 1)


_CLOSE = 'add the closing quote, or use """ for multi-line strings'
_EXPLANATIONS = (
    ("Expected '='", "expected `=` after the key", "write `key = value`"),
    ("Expected ']", "the header has no closing bracket", "write `[table]` or `[[array]]`"),
    (
        "Invalid statement",
        "expected a key or a [table] header",
        "keys with characters other than A-Z a-z 0-9 _ - need quotes",
    ),
    (
        "Invalid initial character for a key part",
        "expected a key",
        "keys with characters other than A-Z a-z 0-9 _ - need quotes",
    ),
    (
        "Expected newline or end of document",
        "expected the end of the line after the value",
        "one `key = value` per line",
    ),
    ("Invalid value", "expected a value after `=`", "text needs quotes"),
    ("Unterminated string", "unterminated string", _CLOSE),
    ("Unclosed array", "the array has no closing bracket", "add a `]`"),
    ("Unclosed inline table", "the inline table has no closing brace", "add a `}`"),
    (
        "Unescaped '\\'",
        "an unknown escape in a text",
        "write `\\\\` for a backslash, or ' quotes",
    ),
    (
        "Illegal character '\\n'",
        "unterminated string",
        _CLOSE,
    ),
    ("Illegal character", "a control character is not allowed here", None),
)
"""Beginning of tomli's message, our message, help."""
