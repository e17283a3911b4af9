"""Rewriting documents to the present version of the plan language; comments and layout stay.

A version step changes a tomlkit document in place.  A renamed key is replaced in the text at its
own place, which tomlkit has no means for; both leave every other character alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli

from pi2.diagnostics import Diagnostic
from pi2.plan.documents.common import SCHEMA_VERSION
from pi2.plan.reading.deprecations import RENAMES, Rename, find_old_keys
from pi2.plan.reading.versions import STEPS, Step
from pi2.plan.toml.paths import format_path
from pi2.plan.toml.source import Kind, SourceFile, parse_source
from pi2.plan.toml.text import write_key


@dataclass(frozen=True)
class Migration:
    """The outcome of a migration."""

    text: str
    changes: tuple[str, ...]
    """The changes that were made, one line each; empty where the text is current."""
    findings: tuple[Diagnostic, ...] = ()
    """The reasons why the text cannot be migrated; it is as it was then."""


def migrate_text(
    kind: Kind,
    name: str,
    text: str,
    *,
    steps: Mapping[int, Step] = STEPS,
    renames: Sequence[Rename] = RENAMES,
    newest: int = SCHEMA_VERSION,
) -> Migration:
    """Bring a document's ``text`` to version ``newest``; ``name`` is for findings."""
    changes: list[str] = []
    source = parse_source(Path(name), name, text)
    if isinstance(source, list):
        return Migration(text, (), tuple(source))
    version = source.values.get("schema_version")
    if version is None:
        # Whoever leaves it out writes the language as it is.
        text = _add_version(text, newest)
        changes.append("added schema_version")
    elif type(version) is int and version < newest and version in steps:
        text = _take_steps(kind, text, version, steps, newest)
        changes.append(f"schema_version {version} is {newest} now")
    if changes:
        source = parse_source(Path(name), name, text)
        assert not isinstance(source, list), source
    text, renamed = _rename_keys(kind, source, [item for item in renames if item.new])
    text, removed = _remove_keys(kind, text, [item for item in renames if not item.new])
    return Migration(text, (*changes, *renamed, *removed))


def _add_version(text: str, version: int) -> str:
    """The version goes first, below a line for editors."""
    line = f"schema_version = {version}\n"
    if text.startswith("#:schema"):
        first, end, rest = text.partition("\n")
        return f"{first}{end or chr(10)}{line}{rest}"
    return line + text


def _take_steps(kind: Kind, text: str, version: int, steps: Mapping[int, Step], newest: int) -> str:
    import tomlkit

    document = tomlkit.parse(text)
    for number in range(version, newest):
        steps[number](document, kind)
        document["schema_version"] = number + 1
    return tomlkit.dumps(document)


def _rename_keys(
    kind: Kind, source: SourceFile, renames: Sequence[Rename]
) -> tuple[str, list[str]]:
    """Replace old names, the last one first, so that places stay right."""
    lines = source.text.split("\n")
    index = source.index()
    found = [
        (index.keys[path], rename)
        for rename in renames
        if rename.kind == kind
        for path in find_old_keys(source.values, rename)
        if path in index.keys
    ]
    changes = []
    for span, rename in sorted(found, key=lambda item: (-item[0].line, -item[0].column)):
        line = lines[span.line - 1]
        new = write_key(rename.new or "")
        lines[span.line - 1] = line[: span.column - 1] + new + line[span.end_column - 1 :]
        changes.append(f"line {span.line}: {rename.old} is {rename.new} now")
    return "\n".join(lines), changes[::-1]


def _remove_keys(kind: Kind, text: str, renames: Sequence[Rename]) -> tuple[str, list[str]]:
    """Remove the keys that are gone."""
    found = [
        path
        for rename in renames
        if rename.kind == kind and rename.old in text
        for path in find_old_keys(tomli.loads(text), rename)
    ]
    if not found:
        return text, []
    import tomlkit

    document = tomlkit.parse(text)
    for path in found:
        table: Any = document
        for part in path[:-1]:
            table = table[part]
        del table[path[-1]]
    return tomlkit.dumps(document), [f"removed {format_path(path)}" for path in found]
