"""GitLab format: a code quality report, which GitLab shows in merge requests.

Fingerprints are those of `pi2.diagnostics.fingerprints`: by them GitLab knows which findings a
merge request adds and which were there before.  The report is ASCII, whatever the terminal's
encoding.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pi2.diagnostics.diagnostic import Diagnostic
from pi2.diagnostics.fingerprints import compute_fingerprints
from pi2.diagnostics.repository import name_in_repository

if TYPE_CHECKING:
    from pi2.diagnostics.page import FindPage

_SEVERITIES = {"error": "major", "warning": "minor", "note": "info"}
_NOWHERE = "."
"""GitLab wants a path of every finding; this is the project as a whole."""


def render(
    diagnostics: Sequence[Diagnostic],
    *,
    colour: bool = False,
    sources: Mapping[str, str] | None = None,
    find_page: FindPage | None = None,
) -> str:
    """Write an array, empty if there is nothing to report; ``sources`` serve the fingerprints."""
    del colour, find_page
    prints = compute_fingerprints(diagnostics, sources)
    items = [_describe(item, name) for item, name in zip(diagnostics, prints, strict=True)]
    return json.dumps(items, indent=2) + "\n"


def _name_file(file: str) -> str:
    """GitLab's paths begin at the top of the repository."""
    return name_in_repository(file) or file.removeprefix("./")


def _describe(item: Diagnostic, fingerprint: str) -> dict[str, Any]:
    span = item.span
    help_text = f" ({item.help})" if item.help is not None else ""
    return {
        "description": f"{item.code}: {item.message}{help_text}",
        "check_name": item.code,
        "fingerprint": fingerprint,
        "severity": _SEVERITIES[item.severity],
        "location": {
            "path": _NOWHERE if span is None else _name_file(span.file),
            "lines": {
                "begin": 1 if span is None else span.line,
                "end": 1 if span is None else span.end_line,
            },
        },
    }
