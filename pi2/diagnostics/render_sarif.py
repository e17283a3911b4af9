"""SARIF 2.1.0, the format that code scanning services read.

Files of a repository are named relative to its top, ``%SRCROOT%``, others by ``file:`` URIs or as
they were given.
The report is ASCII, whatever the terminal's encoding.  Source: OASIS standard "Static Analysis
Results Interchange Format (SARIF) Version 2.1.0".
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pi2.diagnostics.diagnostic import Diagnostic, Span
from pi2.diagnostics.fingerprints import compute_fingerprints
from pi2.diagnostics.repository import name_in_repository

if TYPE_CHECKING:
    from pi2.diagnostics.page import FindPage, Page

SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
FINGERPRINT = "pi2/v1"

_NOTE = re.compile(
    r"(?P<file>[^\n]+?):(?P<line>[1-9]\d*):(?P<column>[1-9]\d*): (?P<text>.*)", re.DOTALL
)


def render(
    diagnostics: Sequence[Diagnostic],
    *,
    colour: bool = False,
    sources: Mapping[str, str] | None = None,
    find_page: FindPage | None = None,
) -> str:
    """Write a log of one run; the table of rules has the pages that ``find_page`` knows."""
    del colour
    codes = sorted({item.code for item in diagnostics})
    numbers = {code: number for number, code in enumerate(codes)}
    prints = compute_fingerprints(diagnostics, sources)
    run = {
        "tool": {
            "driver": {
                "name": "pi2",
                **_find_version(),
                "rules": [_describe_rule(code, find_page) for code in codes],
            }
        },
        "columnKind": "unicodeCodePoints",
        "results": [
            _describe_result(item, numbers[item.code], name)
            for item, name in zip(diagnostics, prints, strict=True)
        ],
    }
    log = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(log, indent=2) + "\n"


def _find_version() -> dict[str, str]:
    from importlib import metadata

    try:
        return {"version": metadata.version("pi2")}
    except metadata.PackageNotFoundError:
        return {}


def _describe_rule(code: str, find_page: FindPage | None) -> dict[str, Any]:
    page = find_page(code) if find_page is not None else None
    if page is None:
        return {"id": code}
    from pi2.diagnostics.page import begin_sentence

    return {
        "id": code,
        "shortDescription": {"text": page.what},
        "fullDescription": {"text": begin_sentence(page.why)},
        "help": {"text": _write_text(page), "markdown": _write_help(page)},
    }


def _write_text(page: Page) -> str:
    return "\n\n".join([page.what, *(f"{heading}: {text}" for heading, text in page.sections)])


def _write_help(page: Page) -> str:
    return "\n\n".join([page.what, *(f"**{heading}:** {text}" for heading, text in page.sections)])


def _describe_result(item: Diagnostic, number: int, fingerprint: str) -> dict[str, Any]:
    help_text = "" if item.help is None else f"\nhelp: {item.help}"
    result: dict[str, Any] = {
        "ruleId": item.code,
        "ruleIndex": number,
        "level": item.severity,
        "message": {"text": item.message + help_text},
        "partialFingerprints": {FINGERPRINT: fingerprint},
    }
    if item.span is not None:
        location = _locate(item.span)
        if item.path is not None:
            location["logicalLocations"] = [{"fullyQualifiedName": item.path}]
        result["locations"] = [location]
    related = [_describe_note(note) for note in item.notes]
    if related:
        result["relatedLocations"] = related
    return result


def _describe_note(note: str) -> dict[str, Any]:
    """An origin with its place, if it names one."""
    parts = _NOTE.fullmatch(note)
    if parts is None:
        return {"message": {"text": note}}
    line, column = int(parts["line"]), int(parts["column"])
    place = {"startLine": line, "startColumn": column}
    file = {"artifactLocation": _name_file(parts["file"]), "region": place}
    return {"physicalLocation": file, "message": {"text": parts["text"]}}


def _locate(span: Span) -> dict[str, Any]:
    place: dict[str, Any] = {"artifactLocation": _name_file(span.file)}
    if not span.is_whole_file:
        place["region"] = {
            "startLine": span.line,
            "startColumn": span.column,
            "endLine": span.end_line,
            "endColumn": span.end_column,  # exclusive here and there
        }
    return {"physicalLocation": place}


def _name_file(file: str) -> dict[str, str]:
    from pathlib import Path
    from urllib.parse import quote

    path = Path(name_in_repository(file) or file)
    if path.is_absolute():
        return {"uri": path.as_uri()}
    return {"uri": quote(path.as_posix(), errors="surrogateescape"), "uriBaseId": "%SRCROOT%"}
