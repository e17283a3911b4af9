"""GitHub format: workflow commands, which GitHub Actions shows beside the lines of a pull request.

::

    ::error title=pi2 (P210),file=a.plan.toml,line=2,col=9,endLine=2,endColumn=33::shares add up ...

Columns are left out where a place covers several lines: GitHub takes both for columns of one line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pi2.diagnostics.diagnostic import Diagnostic, label_note
from pi2.diagnostics.repository import name_in_repository
from pi2.diagnostics.text import escape_controls

if TYPE_CHECKING:
    from pi2.diagnostics.page import FindPage

_COMMANDS = {"error": "error", "warning": "warning", "note": "notice"}
_DATA = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_PROPERTY = {**_DATA, **str.maketrans({":": "%3A", ",": "%2C"})}


def render(
    diagnostics: Sequence[Diagnostic],
    *,
    colour: bool = False,
    sources: Mapping[str, str] | None = None,
    find_page: FindPage | None = None,
) -> str:
    """Write one workflow command per diagnostic; only the diagnostics are used."""
    del colour, sources, find_page
    return "".join(_render_one(item) for item in diagnostics)


def _render_one(item: Diagnostic) -> str:
    properties = {"title": f"pi2 ({item.code})", **_list_place(item)}
    written = ",".join(f"{key}={_escape(text, _PROPERTY)}" for key, text in properties.items())
    lines = [item.message, *(label_note(note) for note in item.notes)]
    if item.help is not None:
        lines.append(f"help: {item.help}")
    return f"::{_COMMANDS[item.severity]} {written}::{_escape(chr(10).join(lines), _DATA)}\n"


def _list_place(item: Diagnostic) -> dict[str, str]:
    span = item.span
    if span is None:
        return {}
    file = name_in_repository(span.file) or span.file  # paths begin at the repository's top
    if span.is_whole_file:
        return {"file": file}
    if span.line != span.end_line:
        return {"file": file, "line": str(span.line), "endLine": str(span.end_line)}
    return {
        "file": file,
        "line": str(span.line),
        "col": str(span.column),
        "endLine": str(span.end_line),
        "endColumn": str(span.end_column),
    }


def _escape(text: str, table: Mapping[int, str]) -> str:
    """Line ends become codes that the runner reads back, other control characters visible."""
    return escape_controls(text.translate(table))
