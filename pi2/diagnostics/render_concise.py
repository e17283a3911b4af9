"""Concise format: one line per diagnostic, ``file:line:column: severity[code] message``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pi2.diagnostics.diagnostic import Diagnostic
from pi2.diagnostics.text import escape_controls, paint

if TYPE_CHECKING:
    from pi2.diagnostics.page import FindPage


def render(
    diagnostics: Sequence[Diagnostic],
    *,
    colour: bool = False,
    sources: Mapping[str, str] | None = None,
    find_page: FindPage | None = None,
) -> str:
    """Write one line per diagnostic; only the diagnostics are used."""
    del sources, find_page
    lines = []
    for item in diagnostics:
        place = f"{paint(escape_controls(str(item.span)), 'place', colour)}: " if item.span else ""
        head = paint(f"{item.severity}[{item.code}]", item.severity, colour)
        text = escape_controls(item.message)
        if item.help:
            text += f" ({escape_controls(item.help)})"
        lines.append(f"{place}{head} {text}\n")
    return "".join(lines)
