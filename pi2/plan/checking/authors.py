"""Whose line a finding belongs to: its author's, not that of a document that comes with pi2.

What a document extends may be one that pi2 ships, or one that was fetched: nobody is to change it.
A finding about a value from there stands at the entry of ``extends`` that takes the document up,
and says what to write in the author's own file instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pi2.diagnostics import Diagnostic
from pi2.plan.composing.composed import Chain, Link
from pi2.plan.reading.references import find_shipped_folder, has_scheme
from pi2.plan.toml.paths import KeyPath, format_path

MAX_SHOWN = 80
"""Longest line of another document that is shown, in characters."""

_WRITE = re.compile(r"write (?P<key>[\w-]+) = ")


def give_to_author(
    item: Diagnostic,
    path: KeyPath,
    at: Literal["key", "value"],
    chains: Mapping[str, Chain],
    sources: Mapping[str, str],
) -> Diagnostic:
    """Move a finding about the key at ``path`` from a document that nobody is to change to the
    entry that takes it up; any other is returned as it is.

    ``chains`` lead from the author's document to the others, ``sources`` are their texts, by name.
    """
    span = item.span
    link = None if span is None else find_entry(span.file, chains.get(span.file, ()))
    if span is None or link is None:
        return item
    lines = sources.get(span.file, "").split("\n")
    line = lines[span.line - 1].strip() if span.line <= len(lines) else ""
    shown = line if len(line) <= MAX_SHOWN else f"{line[: MAX_SHOWN - 3]}..."
    return replace(
        item,
        span=link.file.spans.find_value(link.path),
        notes=(f"{span.place}: {shown}", *item.notes),
        help=_advise(item.help, path, at, link.file.name),
    )


def find_entry(name: str, chain: Chain) -> Link | None:
    """The entry in an author's file from which the way leads to the document ``name`` that is not
    theirs; None where ``name`` is an author's itself, or nothing on the way is."""
    if not _is_foreign(name):
        return None
    return next((link for link in reversed(chain) if not _is_foreign(link.file.name)), None)


def _is_foreign(name: str) -> bool:
    """Whether a document is one that pi2 ships or that was fetched."""
    return has_scheme(name) or Path(name).resolve().is_relative_to(find_shipped_folder())


def _advise(help: str | None, path: KeyPath, at: Literal["key", "value"], file: str) -> str:
    key = format_path(path)
    if at == "key":
        remedy = f'write remove = ["{key}"] in {file} to leave it out'
        return remedy if help is None else f"{help}; {remedy}"
    wanted = _WRITE.match(help or "")
    if help is not None and wanted is not None and wanted["key"] == path[-1]:
        value = help[wanted.end() :].removesuffix(", or leave it out")
        return f"in {file}, write {key} = {value}"
    remedy = f"write {key} in {file}, and it counts instead"
    return remedy if help is None else f"{help}; {remedy}"
