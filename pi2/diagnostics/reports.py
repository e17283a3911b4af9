"""Findings as reports for GitHub, GitLab, JUnit and SARIF."""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from pi2.diagnostics.diagnostic import Diagnostic, Span, label_note
from pi2.diagnostics.texts import FindPage, Page, begin_sentence, escape_controls, render_full

MARKS = (".git", ".hg", "pi2.lock")
"""A folder with one of them is the top of a repository; earlier marks come first."""


def name_in_repository(file: str) -> str | None:
    """Path of ``file`` from the top of its repository, with ``/``; None outside of any."""
    try:
        path = Path(os.path.abspath(file))
    except ValueError:  # a name that no file has
        return None
    for mark in MARKS:
        for folder in path.parents:
            if os.path.exists(folder / mark):
                return path.relative_to(folder).as_posix()
    return None


def compute_fingerprints(
    diagnostics: Sequence[Diagnostic], sources: Mapping[str, str] | None = None
) -> list[str]:
    lines = {file: text.split("\n") for file, text in (sources or {}).items()}
    seen: Counter[tuple[str, str, str]] = Counter()
    found = []
    for item in diagnostics:
        file = "" if item.span is None else item.span.file
        place = name_in_repository(file) or PurePath(file).name
        key = (place if file else "", item.code, _find_anchor(item, lines))
        text = "\0".join([*key, str(seen[key])])
        seen[key] += 1
        found.append(hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest())
    return found


def _find_anchor(item: Diagnostic, lines: Mapping[str, Sequence[str]]) -> str:
    if item.path is not None:
        return f"path {item.path}"
    if item.span is not None and not item.span.is_whole_file:
        text = lines.get(item.span.file, ())
        if item.span.line <= len(text):
            return f"line {text[item.span.line - 1].strip()}"
    return f"message {item.message}"


_COMMANDS = {"error": "error", "warning": "warning", "note": "notice"}
_DATA = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_PROPERTY = {**_DATA, **str.maketrans({":": "%3A", ",": "%2C"})}


def render_github(diagnostics: Sequence[Diagnostic]) -> str:
    """Write one workflow command per diagnostic."""
    return "".join(_render_command(item) for item in diagnostics)


def _render_command(item: Diagnostic) -> str:
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
    return escape_controls(text.translate(table))


_SEVERITIES = {"error": "major", "warning": "minor", "note": "info"}
_PROJECT = "."
"""GitLab wants a path of every finding; this is the project as a whole."""


def render_gitlab(diagnostics: Sequence[Diagnostic], sources: Mapping[str, str]) -> str:
    """Write an array, empty if there is nothing to report; ``sources`` serve the fingerprints."""
    prints = compute_fingerprints(diagnostics, sources)
    items = [_describe(item, name) for item, name in zip(diagnostics, prints, strict=True)]
    return json.dumps(items, indent=2) + "\n"


def _describe(item: Diagnostic, fingerprint: str) -> dict[str, Any]:
    span = item.span
    help_text = f" ({item.help})" if item.help is not None else ""
    return {
        "description": f"{item.code}: {item.message}{help_text}",
        "check_name": item.code,
        "fingerprint": fingerprint,
        "severity": _SEVERITIES[item.severity],
        "location": {
            "path": _PROJECT
            if span is None
            else (name_in_repository(span.file) or span.file.removeprefix("./")),
            "lines": {
                "begin": 1 if span is None else span.line,
                "end": 1 if span is None else span.end_line,
            },
        },
    }


SUITE = "pi2 validate"
_NO_FILE = "pi2"
"""Case of the findings that belong to no file."""


def render_junit(diagnostics: Sequence[Diagnostic], sources: Mapping[str, str]) -> str:
    """Write a suite of one case per file of ``sources`` and of the diagnostics."""
    from xml.etree import ElementTree

    cases: dict[str, list[Diagnostic]] = {file: [] for file in sources}
    for item in diagnostics:
        cases.setdefault(_NO_FILE if item.span is None else item.span.file, []).append(item)
    failed = sum(any(item.severity == "error" for item in items) for items in cases.values())
    counts = {"tests": str(len(cases)), "failures": str(failed), "errors": "0"}
    root = ElementTree.Element("testsuites", {"name": SUITE, **counts})
    suite = ElementTree.SubElement(root, "testsuite", {"name": SUITE, **counts, "skipped": "0"})
    for file, items in cases.items():
        names = {"classname": SUITE, "name": _make_visible(file)}
        case = ElementTree.SubElement(suite, "testcase", names)
        errors = [item for item in items if item.severity == "error"]
        if errors:
            about = {"type": errors[0].code, "message": _make_visible(_summarise(errors))}
            failure = ElementTree.SubElement(case, "failure", about)
            failure.text = _make_visible(render_full(errors, sources=sources))
        remarks = [item for item in items if item.severity != "error"]
        if remarks:
            output = ElementTree.SubElement(case, "system-out")
            output.text = _make_visible(render_full(remarks, sources=sources))
    ElementTree.indent(root)
    report: bytes = ElementTree.tostring(root, encoding="us-ascii")
    return report.decode("ascii") + "\n"


def _summarise(errors: Sequence[Diagnostic]) -> str:
    """The first error, and the number of further ones: a case has at most one failure."""
    text = f"{errors[0].code}: {errors[0].message}"
    return text if len(errors) == 1 else f"{text} (and {len(errors) - 1} more)"


def _make_visible(text: str) -> str:
    return "\n".join(escape_controls(line) for line in text.split("\n"))


SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
FINGERPRINT = "pi2/v1"

_NOTE = re.compile(
    r"(?P<file>[^\n]+?):(?P<line>[1-9]\d*):(?P<column>[1-9]\d*): (?P<text>.*)", re.DOTALL
)


def render_sarif(
    diagnostics: Sequence[Diagnostic], sources: Mapping[str, str], find_page: FindPage | None
) -> str:
    """Write a log of one run; the table of rules has the pages that ``find_page`` knows."""
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
    return {
        "id": code,
        "shortDescription": {"text": page.what},
        "fullDescription": {"text": begin_sentence(page.why)},
        "help": {
            "text": _write_sections(page, "{}: {}"),
            "markdown": _write_sections(page, "**{}:** {}"),
        },
    }


def _write_sections(page: Page, form: str) -> str:
    return "\n\n".join([page.what, *(form.format(*section) for section in page.sections)])


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
    parts = _NOTE.fullmatch(note)
    if parts is None:
        return {"message": {"text": note}}
    line, column = int(parts["line"]), int(parts["column"])
    place = {"startLine": line, "startColumn": column}
    file = {"artifactLocation": _locate_file(parts["file"]), "region": place}
    return {"physicalLocation": file, "message": {"text": parts["text"]}}


def _locate(span: Span) -> dict[str, Any]:
    place: dict[str, Any] = {"artifactLocation": _locate_file(span.file)}
    if not span.is_whole_file:
        place["region"] = {
            "startLine": span.line,
            "startColumn": span.column,
            "endLine": span.end_line,
            "endColumn": span.end_column,  # exclusive here and there
        }
    return {"physicalLocation": place}


def _locate_file(file: str) -> dict[str, str]:
    from urllib.parse import quote

    path = Path(name_in_repository(file) or file)
    if path.is_absolute():
        return {"uri": path.as_uri()}
    return {"uri": quote(path.as_posix(), errors="surrogateescape"), "uriBaseId": "%SRCROOT%"}
