"""Output formats of diagnostics; their modules are imported when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pi2.diagnostics.diagnostic import Diagnostic

if TYPE_CHECKING:
    from pi2.diagnostics.texts import FindPage


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
    from pi2.diagnostics import texts

    match name:
        case "full":
            return texts.render_full(diagnostics, colour=colour, sources=sources)
        case "concise":
            return texts.render_concise(diagnostics, colour=colour)
        case "json":
            return texts.render_json(diagnostics)

    from pi2.diagnostics import reports

    match name:
        case "github":
            return reports.render_github(diagnostics)
        case "gitlab":
            return reports.render_gitlab(diagnostics, sources or {})
        case "junit":
            return reports.render_junit(diagnostics, sources or {})
    return reports.render_sarif(diagnostics, sources or {}, find_page)
