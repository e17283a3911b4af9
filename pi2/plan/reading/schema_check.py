"""From a file's values to a document: every violation of the schema becomes a diagnostic."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import ValidationError

from pi2.diagnostics import Diagnostic
from pi2.plan.documents.common import SCHEMA_VERSION, Document
from pi2.plan.toml.source import MAX_SHOWN, SourceFile, limit_findings
from pi2.plan.toml.text import KeyPath, format_path, name_path

D = TypeVar("D", bound=Document)


def check_schema(source: SourceFile, document: type[D]) -> tuple[D | None, list[Diagnostic]]:
    """Validate ``source`` as a ``document``.

    Where all that is wrong are unknown keys, the document is what remains without them, so that
    the rules find their mistakes in the same run; after any other error it is None.
    """
    version = check_version(source, document)
    if version is not None and version.code == "P107":
        return None, [version]
    findings = [] if version is None else [version]
    values = {**source.values, "schema_version": SCHEMA_VERSION}
    odd_paths: set[KeyPath] = set()
    for path, finding in _check_scalars(source, values):
        odd_paths.add(path)
        findings.append(finding)
    seen = 0
    text = json.dumps(values, default=lambda value: None)
    flawed = bool(findings)
    result: D | None
    try:
        result = document.model_validate_json(text)
    except ValidationError as error:
        from pi2.plan.reading.schema_messages import explain_violation, is_misspelt

        result = _validate_without_unknown(values, document, error)
        seen = error.error_count()
        for violation in error.errors(include_url=False)[:MAX_SHOWN]:
            path = _find_path(source.values, violation["loc"])
            if path in odd_paths:
                continue
            if violation["type"] != "missing" or not is_misspelt(source, document, path):
                findings.append(explain_violation(source, document, path, violation))
    findings = limit_findings(findings, len(findings) + max(0, seen - MAX_SHOWN))
    return (None if flawed else result), findings


def _validate_without_unknown(
    values: dict[str, Any], document: type[D], error: ValidationError
) -> D | None:
    """The document without its unknown keys; None if that is not all that is wrong."""
    pruned = json.loads(json.dumps(values))
    for violation in error.errors(include_url=False)[:MAX_SHOWN]:
        if violation["type"] != "extra_forbidden":
            return None
        *way, key = _find_path(values, violation["loc"])
        table = pruned
        for part in way:
            table = table[part]
        table.pop(key, None)
    try:
        return document.model_validate_json(json.dumps(pruned))
    except ValidationError:
        return None


def check_version(source: SourceFile, document: type[Document]) -> Diagnostic | None:
    """A finding about the file's ``schema_version``."""
    key = "schema_version"
    write_it = f"write `{key} = {SCHEMA_VERSION}`"
    if key not in source.values:
        from pi2.plan.documents.common import suggest

        if suggest(key, set(source.values) - set(document.model_fields)) is not None:
            return None  # misspelt, and reported as an unknown key
        return Diagnostic(
            code="P102",
            message=f"missing key `{key}`",
            help=f"{write_it} as the first key",
            span=source.spans.find_key(()),
            path=key,
        )
    version = source.values[key]
    if type(version) is int and version == SCHEMA_VERSION:
        return None
    code, message, help_text = "P104", f"`{key}` is {SCHEMA_VERSION} or more", write_it
    if type(version) is not int:
        code, message = "P103", f"`{key}` is a whole number"
    elif version > SCHEMA_VERSION:
        code, help_text = "P107", "upgrade pi2"
        message = (
            f"the file is written in version {min(version, 10**9)} of the plan language, "
            f"this pi2 knows version {SCHEMA_VERSION}"
        )
    span = source.spans.find_value((key,))
    return Diagnostic(code=code, message=message, help=help_text, span=span, path=key)


def _check_scalars(source: SourceFile, values: Any) -> Iterator[tuple[KeyPath, Diagnostic]]:
    """Find values that JSON cannot carry or would change, and replace them by None."""
    for path, container, key in _walk(values):
        value = container[key]
        if isinstance(value, datetime.date | datetime.time):
            message = f"`{format_path(path)}` is a date or time, and no key takes one"
            help_text = "if it is meant as text, put it in quotes"
            code = "P103"
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            message, help_text = f"`{format_path(path)}` does not fit into 64 bits", None
            code = "P108"
        elif isinstance(value, str) and not _is_utf8(value):
            message, help_text = f"`{format_path(path)}` is not UTF-8", None
            code = "P108"
        elif isinstance(value, float) and not math.isfinite(value):
            message, help_text = f"`{format_path(path)}` is not a finite number", None
            code = "P108"
        else:
            continue
        container[key] = None
        span = source.spans.find_value(path)
        yield (
            path,
            Diagnostic(code=code, message=message, help=help_text, span=span, path=name_path(path)),
        )


def _is_utf8(text: str) -> bool:
    """Whether ``text`` has no half characters, which only come from a command line."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def _walk(values: dict[str, Any]) -> Iterator[tuple[KeyPath, Any, Any]]:
    """Yield the path, container and key of every scalar; containers are copied before."""
    stack: list[tuple[KeyPath, Any]] = [((), values)]
    while stack:
        base, container = stack.pop()
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, value in list(items):
            path = (*base, key)
            if isinstance(value, dict):
                container[key] = dict(value)
                stack.append((path, container[key]))
            elif isinstance(value, list):
                container[key] = list(value)
                stack.append((path, container[key]))
            else:
                yield path, container, key


def _find_path(values: Any, loc: tuple[str | int, ...]) -> KeyPath:
    """Turn a pydantic location into a path of the document.

    Tags of unions are not keys of the document, so parts that lead nowhere are left out, except
    the last one, which names a missing key.  ``[key]`` stands for the key itself.
    """
    path: list[str | int] = []
    current = values
    for number, part in enumerate(loc):
        if part == "[key]":
            continue
        is_key = isinstance(current, dict) and part in current
        is_index = isinstance(current, list) and isinstance(part, int) and 0 <= part < len(current)
        if is_key or is_index:
            path.append(part)
            current = current[part]
        elif number == len(loc) - 1 and isinstance(current, dict):
            path.append(part)
    return tuple(path)
