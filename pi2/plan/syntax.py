"""TOML syntax errors in plain words, at the place that is to be changed."""

from __future__ import annotations

import re
from collections.abc import Callable

import tomli

from pi2.diagnostics import Diagnostic, Span
from pi2.plan.spans import format_path, index_spans

_DUPLICATE_MESSAGES = (
    "Cannot overwrite",
    "Cannot declare",
    "Duplicate inline",
    "Cannot mutate",
)

_UNIT = r"(?:[kKMGT]i?B|B|[kMG]?Hz|[num]?s|m?W)"
_BARE_QUANTITY = re.compile(rf"=\s*(?P<value>[0-9][0-9_.]*\s*{_UNIT}\b(?:/s)?)")
_BARE_TEXT = re.compile(r"=\s*(?P<value>[A-Za-z][\w./+-]*)")


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
    column = error.colno
    if number == len(lines) and not lines[-1] and number > 1 and "end of document" in str(error):
        number, column = number - 1, len(lines[number - 2]) + 1
    line = lines[number - 1].rstrip("\r")
    column = min(max(column, 1), len(line) + 1)
    span = Span(name, number, column, number, column + 1)
    reason = error.msg[:1].lower() + error.msg[1:]

    quantity = _BARE_QUANTITY.search(line)
    if quantity is not None:
        return (
            "a quantity is text and needs quotes",
            f'write "{quantity["value"]}"',
            _span_of(name, number, quantity),
        )
    if error.msg.startswith("Invalid value"):
        word = _BARE_TEXT.search(line)
        if word is None:
            return "expected a value after `=`", None, span
        value = word["value"]
        help_text = f'write "{value}"'
        if value.lower() in ("true", "false"):
            help_text = f"write {value.lower()}"
        return "text needs quotes", help_text, _span_of(name, number, word)
    explain = _EXPLANATIONS.get(error.msg.split("'")[0].strip())
    if explain is None:
        return reason, None, span
    return *explain(line), span


def _span_of(name: str, number: int, match: re.Match[str]) -> Span:
    return Span(name, number, match.start("value") + 1, number, match.end("value") + 1)


_EXPLANATIONS: dict[str, Callable[[str], tuple[str, str | None]]] = {
    "Expected": lambda line: ("expected `=` after the key", "write `key = value`"),
    "Invalid statement": lambda line: (
        "expected a key or a [table] header",
        "keys with other characters than A-Z a-z 0-9 _ - need quotes",
    ),
    "Expected newline or end of document after a statement": lambda line: (
        "expected the end of the line after the value",
        "one `key = value` per line",
    ),
    "Unterminated string": lambda line: ("the text has no closing quote", 'add a `"`'),
    "Unclosed array": lambda line: ("the array has no closing bracket", "add a `]`"),
    "Unclosed inline table": lambda line: (
        "the inline table has no closing brace",
        "add a `}`",
    ),
    "Illegal character": lambda line: (
        "the text ends at the line's end without a closing quote"
        if line.count('"') % 2 or line.count("'") % 2
        else "a control character is not allowed here",
        None,
    ),
}
