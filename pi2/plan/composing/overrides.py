"""``--set a.b=VALUE``: values of a plan replaced from outside, with their own source text."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin

import tomli

from pi2.diagnostics import Diagnostic, Span, UserError
from pi2.plan.documents.common import COMPOSITION
from pi2.plan.documents.fields import find_type, list_known_keys, suggest
from pi2.plan.documents.plan import Plan
from pi2.plan.toml.paths import KeyPath, format_path
from pi2.plan.toml.text import write_value

SET = "--set"
"""Name of the source that overridden values come from."""


@dataclass(frozen=True)
class Override:
    """One value, and where it stands in the text of all overrides."""

    path: KeyPath
    value: object
    key_span: Span
    value_span: Span


@dataclass(frozen=True)
class Overrides:
    """All overridden values of a plan; ``text`` is shown in diagnostics, one line each."""

    items: tuple[Override, ...]
    text: str


def parse_assignments(texts: tuple[str, ...]) -> dict[str, object]:
    """Parse ``KEY=VALUE`` texts; a value that is no TOML value is text."""
    values: dict[str, object] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise UserError.of(
                "P016",
                f"`{SET} {text}`: expected KEY=VALUE",
                help="for example `--set decode.predictor=gate`",
            )
        values[key.strip()] = _parse_value(text, value.strip())
    return values


def _parse_value(text: str, value: str) -> object:
    try:
        parsed = tomli.loads(f"value = {value}")
    except (tomli.TOMLDecodeError, RecursionError, ValueError):
        if value and value[0] not in "\"'[{" and "\n" not in value:
            return value
        raise UserError.of(
            "P016",
            f"`{SET} {text}`: the value is not TOML",
            help="for example `--set memory.budget='\"64 MiB\"'` or `--set io.threads=2`",
        ) from None
    if set(parsed) != {"value"}:
        raise UserError.of("P016", f"`{SET} {text}`: expected one value")
    result: object = parsed["value"]
    return result


def prepare_overrides(values: Mapping[str, object]) -> tuple[Overrides, list[Diagnostic]]:
    """Check that the keys exist in plans, and write the text that diagnostics show."""
    items, findings, lines = [], [], []
    for number, (key, value) in enumerate(values.items(), start=1):
        reason: str | None = None
        plain: object = None
        try:
            plain = None if value is None else _make_plain(value)
            shown = "(left out)" if value is None else write_value(plain)
        except TypeError as error:
            shown, reason = f"<{type(value).__name__}>", str(error)
        lines.append(f"{key} = {shown}")
        key_span = Span(SET, number, 1, number, len(key) + 1)
        value_span = Span(SET, number, len(key) + 4, number, len(key) + 4 + len(shown))
        path: KeyPath = tuple(int(part) if part.isdecimal() else part for part in key.split("."))
        unknown = _find_unknown(path)
        if unknown is not None:
            findings.append(_report_unknown(path, unknown, key_span))
        elif reason is not None:
            findings.append(Diagnostic(code="P016", message=reason, span=value_span, path=key))
        else:
            items.append(Override(path, plain, key_span, value_span))
    return Overrides(tuple(items), "\n".join(lines)), findings


def _find_unknown(path: KeyPath) -> int | None:
    """Index of the first part that plans do not know."""
    if path[0] in COMPOSITION:
        return 0  # documents are put together before values are replaced
    for end in range(1, len(path) + 1):
        if find_type(Plan, path[:end]) is None:
            return end - 1
        holder = find_type(Plan, path[: end - 1])
        if get_origin(holder) is dict:
            allowed = get_args(get_args(holder)[0])
            if allowed and isinstance(allowed[0], str) and path[end - 1] not in allowed:
                return end - 1
    return None


def _report_unknown(path: KeyPath, index: int, span: Span) -> Diagnostic:
    parent, name = path[:index], path[index]
    known = [key for key in list_known_keys(Plan, parent) if parent or key not in COMPOSITION]
    near = suggest(str(name), known)
    place = f"in `{format_path(parent)}`" if parent else "in plans"
    help_text = f"known keys: {', '.join(known)}" if known else None
    if near:
        help_text = f"did you mean `{'.'.join(str(part) for part in (*parent, near))}`?"
    return Diagnostic(
        code="P017",
        message=f"unknown key `{name}` {place}",
        help=help_text,
        span=span,
        path=format_path(path),
    )


def apply_overrides(
    values: dict[str, Any], overrides: Overrides
) -> tuple[dict[str, Any], list[Diagnostic]]:
    """Return ``values`` with every override in its place, and what has no place.

    Tables on the way are made; items of arrays must be there.  None takes a key away.
    """
    result: dict[str, Any] = _copy(values)
    findings = []
    for item in overrides.items:
        current: Any = result
        for number, part in enumerate(item.path):
            if isinstance(part, int) and isinstance(current, list) and part >= len(current):
                findings.append(_report_index(item, number, len(current)))
                break
            fits = isinstance(current, dict if isinstance(part, str) else list)
            if not fits:
                break  # the plan itself is at fault, and that is reported
            if number == len(item.path) - 1:
                if item.value is None:
                    current.pop(part, None)
                else:
                    current[part] = _copy(item.value)
            elif isinstance(part, int):
                current = current[part]
            else:
                is_array = isinstance(item.path[number + 1], int)
                current = current.setdefault(part, [] if is_array else {})
    return result, findings


def _report_index(item: Override, number: int, length: int) -> Diagnostic:
    entries = "no entries" if length == 0 else f"the entries 0 to {length - 1}"
    return Diagnostic(
        code="P017",
        message=f"`{format_path(item.path[:number])}` has {entries} in this plan",
        span=item.key_span,
        path=format_path(item.path),
    )


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value


def _make_plain(value: object) -> object:
    """Turn Python values into what TOML has; TypeError if there is no such thing."""
    if isinstance(value, bool | int | float | str | datetime.date | datetime.time):
        return value
    if isinstance(value, Mapping):
        return {str(key): _make_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_make_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"no TOML value: {type(value).__name__}")
