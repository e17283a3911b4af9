"""``--set a.b=VALUE``: values of a plan replaced from outside, with their own source text."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin

import tomli

from pi2.diagnostics import Diagnostic, Span, UserError
from pi2.plan.fields import find_type, list_known_keys, suggest
from pi2.plan.plan import Plan
from pi2.plan.spans import Path, format_path

SET = "--set"
"""Name of the source that overridden values come from."""


@dataclass(frozen=True, slots=True)
class Override:
    """One value, and where it stands in the text of all overrides."""

    path: Path
    value: object
    key_span: Span
    value_span: Span


@dataclass(frozen=True, slots=True)
class Overrides:
    """All overridden values of a plan; ``text`` is shown in diagnostics, one line each."""

    items: tuple[Override, ...]
    text: str

    def find(self, path: Path) -> Override | None:
        """The override that sets ``path`` or a table above it."""
        for item in reversed(self.items):
            if path[: len(item.path)] == item.path:
                return item
        return None


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
        shown = write_value(value)
        lines.append(f"{key} = {shown}")
        key_span = Span(SET, number, 1, number, len(key) + 1)
        value_span = Span(SET, number, len(key) + 4, number, len(key) + 4 + len(shown))
        path: Path = tuple(int(part) if part.isdecimal() else part for part in key.split("."))
        unknown = _find_unknown(path)
        if unknown is not None:
            findings.append(_report_unknown(path, unknown, key_span))
            continue
        items.append(Override(path, value, key_span, value_span))
    return Overrides(tuple(items), "\n".join(lines)), findings


def _find_unknown(path: Path) -> int | None:
    """Index of the first part that plans do not know."""
    for end in range(1, len(path) + 1):
        if find_type(Plan, path[:end]) is None:
            return end - 1
        holder = find_type(Plan, path[: end - 1])
        if get_origin(holder) is dict:
            allowed = get_args(get_args(holder)[0])
            if allowed and isinstance(allowed[0], str) and path[end - 1] not in allowed:
                return end - 1
    return None


def _report_unknown(path: Path, index: int, span: Span) -> Diagnostic:
    parent, name = path[:index], path[index]
    known = list_known_keys(Plan, parent)
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


def apply_overrides(values: dict[str, Any], overrides: Overrides) -> dict[str, Any]:
    """Return ``values`` with every override in its place; tables on the way are made."""
    result: dict[str, Any] = _copy(values)
    for item in overrides.items:
        current: Any = result
        for part in item.path[:-1]:
            if isinstance(part, int):
                if not isinstance(current, list) or part >= len(current):
                    break
                current = current[part]
            elif isinstance(current, dict):
                current = current.setdefault(part, {})
            else:
                break
        else:
            last = item.path[-1]
            if isinstance(last, int):
                if isinstance(current, list) and last < len(current):
                    current[last] = item.value
            elif isinstance(current, dict):
                current[last] = item.value
    return result


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value


def write_value(value: object) -> str:
    """Write a plain value as TOML on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float | datetime.date | datetime.time):
        return str(value)
    if isinstance(value, str):
        return write_text(value)
    if isinstance(value, Mapping):
        inner = ", ".join(f"{write_key(str(k))} = {write_value(v)}" for k, v in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(write_value(item) for item in value) + "]"
    return repr(value)


_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def write_text(value: str) -> str:
    """Write a TOML basic string."""
    written = (
        _ESCAPES.get(char) or (char if char.isprintable() else f"\\U{ord(char):08x}")
        for char in value
    )
    return '"' + "".join(written) + '"'


def write_key(key: str) -> str:
    """Write a TOML key, quoted where it has to be."""
    plain = key.isascii() and key.replace("-", "").replace("_", "").isalnum()
    return key if plain else write_text(key)
