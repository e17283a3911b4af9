"""Quick fixes: what the help of a finding says to write, as changes of the text.

Helps are written for people, in a few turns of phrase: ``write KEY = VALUE``, ``write VALUE``,
``did you mean `NAME`?``, ``lower KEY to VALUE``, ``for example `KEY = VALUE` ``.  A phrase becomes
a fix only where the place that it speaks of is in the text and of the kind that it speaks of.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import tomli

from pi2.diagnostics import Diagnostic, Span
from pi2.lsp.checked import Checked
from pi2.plan.toml.paths import KeyPath, format_path
from pi2.plan.toml.text import write_text

_VALUE = r"""(?P<value>"[^"]*"|true|false|[0-9]+(?:\.[0-9]+)?(?![\w.]))"""
_KEYED = re.compile(rf"\bwrite (?P<key>[\w-]+) = {_VALUE}")
_BARE = re.compile(rf"\bwrite {_VALUE}")
_MEANT = re.compile(r"""did you mean (?:`(?P<name>[^`]+)`|(?P<value>"[^"]+"))\?""")
_CHANGED = re.compile(
    r"\b(?:raise|lower) (?:the )?(?P<key>[\w-]+) to (?P<amount>[0-9.]*[0-9](?: [A-Za-z]+)?)"
)
_MISSING = re.compile(r"for example `(?P<line>[\w-]+ = [^`]+)`")


@dataclass(frozen=True)
class Fix:
    """One change that a finding suggests."""

    title: str
    span: Span
    """What is replaced; without width, where something is put in."""
    text: str


def list_fixes(checked: Checked, span: Span, item: Diagnostic) -> Iterator[Fix]:
    """Changes that the help of ``item``, which stands at ``span`` of the text, suggests."""
    if item.help is None or span.is_whole_file or span.line != span.end_line:
        return
    old = _read(checked, span)
    for match in _MEANT.finditer(item.help):
        name = match["value"] or match["name"]
        if match["value"] is None and old[:1] in ('"', "'"):
            name = write_text(name)
        yield Fix(f"Write {name}", span, name)
    if _is_value(old):
        for match in _KEYED.finditer(item.help):
            if (item.path or "").rpartition(".")[2] == match["key"]:
                yield Fix(f"Write {match['key']} = {match['value']}", span, match["value"])
        for match in _BARE.finditer(item.help):
            yield Fix(f"Write {match['value']}", span, match["value"])
    for match in _CHANGED.finditer(item.help):
        place = _find_key(checked, item, match["key"])
        if place is not None:
            path, other = place
            quoted = _read(checked, other)[:1] in ('"', "'")
            value = write_text(match["amount"]) if quoted else match["amount"]
            yield Fix(f"Write {format_path(path)} = {value}", other, value)
    line = checked.text.split("\n")[span.line - 1]
    missing = _MISSING.search(item.help)
    if item.code == "P102" and missing is not None and line.lstrip().startswith("["):
        end = len(line) + 1
        below = Span(span.file, span.line, end, span.line, end)
        yield Fix(f"Add {missing['line']}", below, f"\n{missing['line']}")


def _read(checked: Checked, span: Span) -> str:
    """The text at a span of one line."""
    line = checked.text.split("\n")[span.line - 1]
    return line[span.column - 1 : span.end_column - 1]


def _is_value(text: str) -> bool:
    """Whether a text is a TOML value, or a number with a unit but no quotes, which was meant as
    one; not a key or a header."""
    if text[:1] in ("[", "{") or "=" in text:
        return False
    if text[:1].isdigit():
        return True
    try:
        tomli.loads(f"value = {text}")
    except ValueError:
        return False
    return True


def _find_key(checked: Checked, item: Diagnostic, key: str) -> tuple[KeyPath, Span] | None:
    """The only value of this text that is called ``key``, in the table that a finding is about."""
    table = (item.path or "").partition(".")[0]
    found = [
        (path, span)
        for path, span in checked.spans.values.items()
        if path and path[-1] == key and path[0] == table and span.line == span.end_line
    ]
    return found[0] if len(found) == 1 else None
