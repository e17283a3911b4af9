"""Fingerprints: names of findings that stay the same while a file changes elsewhere.

A fingerprint is the SHA-256 of file, code and *anchor*.  The anchor is the key path of the finding;
a finding without one (a syntax error) is anchored by the text of its line without the blanks around
it, and where there is no text by its message.  Line numbers and values take no part: lines may be
added above, and a value changed from one wrong one to another, and it is still the same finding.
Equal findings of one report are told apart by a number, in their order.

The file is its path in its repository, so that the folder in which pi2 was started takes no part;
outside of any repository it is the file's name alone.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from pi2.diagnostics.diagnostic import Diagnostic
from pi2.diagnostics.repository import name_in_repository


def compute_fingerprints(
    diagnostics: Sequence[Diagnostic], sources: Mapping[str, str] | None = None
) -> list[str]:
    """One fingerprint per diagnostic, 64 hex digits, no two alike."""
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
