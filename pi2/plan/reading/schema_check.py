"""From a file's values to a document: every violation of the schema is said in plain words."""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from pi2.diagnostics import Diagnostic
from pi2.plan.documents.common import (
    MAX_COMPARED,
    SCHEMA_VERSION,
    Document,
    find_field,
    find_type,
    is_table,
    list_known_keys,
    suggest,
)
from pi2.plan.documents.model_mixing import LAYER_CHOICE, LAYER_KIND
from pi2.plan.documents.quantities import find_quantity, format_bytes
from pi2.plan.toml.source import MAX_SHOWN, SourceFile, limit_findings
from pi2.plan.toml.text import KeyPath, format_path, look_up, write_value

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

D = TypeVar("D", bound=Document)


def check_schema(source: SourceFile, document: type[D]) -> tuple[D | None, list[Diagnostic]]:
    """Validate ``source`` as a ``document``.

    If the only errors are unknown keys, the document is made without them: the rules then find
    their mistakes in the same run. After any other error it is None."""
    version = check_version(source, document)
    if version is not None and version.code == "P107":
        return None, [version]
    findings = [] if version is None else [version]
    values = {**source.values, "schema_version": document.VERSION}
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
    newest = document.VERSION
    write_it = f"write `{key} = {newest}`"
    if key not in source.values:
        if suggest(key, set(source.values) - set(document.model_fields)) is not None:
            return None  # misspelt, and reported as an unknown key
        span = source.spans.find_key(())
        message, help_text = f"missing key `{key}`", f"{write_it} as the first key"
        return source.report("P102", (key,), message, help_text, span=span)
    version = source.values[key]
    if type(version) is int and newest <= version <= SCHEMA_VERSION:
        return None
    code, message, help_text = "P104", f"`{key}` is {newest} or more", write_it
    if type(version) is not int:
        code, message = "P103", f"`{key}` is a whole number"
    elif version > SCHEMA_VERSION:
        code, help_text = "P107", "upgrade pi2"
        message = (
            f"the file is written in version {min(version, 10**9)} of the plan language, "
            f"this pi2 knows version {SCHEMA_VERSION}"
        )
    return source.report(code, (key,), message, help_text)


def _check_scalars(source: SourceFile, values: Any) -> Iterator[tuple[KeyPath, Diagnostic]]:
    """Find values that JSON cannot carry or would change, and replace them by None."""
    for path, container, key in _walk(values):
        value, code, help_text = container[key], "P108", None
        if isinstance(value, datetime.date | datetime.time):
            fault, code = "is a date or time, and no key takes one", "P103"
            help_text = "if it is meant as text, put it in quotes"
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            fault = "does not fit into 64 bits"
        elif isinstance(value, str) and not _is_utf8(value):
            fault = "is not UTF-8"
        elif isinstance(value, float) and not math.isfinite(value):
            fault = "is not a finite number"
        else:
            continue
        container[key] = None
        yield path, source.report(code, path, f"`{format_path(path)}` {fault}", help_text)


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

    Tags of unions are not keys of the document. Parts that lead nowhere are left out, except the
    last one, which names a missing key. ``[key]`` stands for the key itself."""
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


MAX_LISTED = 8
"""Most known words that a message lists."""

_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "tuple_type": "an array",
    "list_type": "an array",
}

_PATTERNS = {
    r"^[a-z0-9][a-z0-9._-]*$": ("a name of lower-case letters, digits, `.`, `_` and `-`", None),
    r"^\s*\d+(-\d+)?(\s*,\s*\d+(-\d+)?)*\s*$": (
        "layer numbers and ranges",
        'for example `select = "0-7,28-31"`',
    ),
    LAYER_KIND: (
        "attention, delta, mamba, mamba1 or convolution, several with `+` between them, or none",
        None,
    ),
    LAYER_CHOICE: (
        "layer numbers, ranges and slices",
        'for example `layers = "3::4"`, or `"0-2, -1"`',
    ),
    r"^[^\x00]*$": ("a path or a name without NUL characters", None),
}


def explain_violation(
    source: SourceFile, document: type[BaseModel], path: KeyPath, violation: ErrorDetails
) -> Diagnostic:
    """Put one pydantic error into words, with the span to change."""
    kind = violation["type"]
    context: Mapping[str, Any] = violation.get("ctx") or {}
    value = violation["input"]
    shown = format_path(path)
    if kind == "missing":
        return _explain_missing(source, document, path)
    if kind == "extra_forbidden":
        return _explain_unknown(source, document, path)
    is_key = "[key]" in violation["loc"]
    span = source.spans.find_key(path) if is_key else source.spans.find_value(path)
    code, message, help_text = "P104", f"`{shown}`: {violation['msg']}", None
    if kind in _WANTED:
        code = "P103"
        message = f"`{shown}` is {_WANTED[kind]}, got {describe_value(value)}"
        help_text = _suggest_conversion(kind, value)
        if kind == "tuple_type" and isinstance(value, dict) and source.spans.has_header(path):
            help_text = f"write `[[{shown}]]`, once per entry"
    elif kind == "literal_error":
        explain = _explain_word_key if is_key else _explain_word
        code, message, help_text = explain(document, path, value)
    elif kind in ("quantity", "quantity_type"):
        code, message = "P105", f"`{shown}`: {violation['msg']}"
        help_text = _suggest_quantity(document, path, value, context)
    elif kind == "string_pattern_mismatch":
        code = "P106"
        wanted, help_text = _PATTERNS.get(context.get("pattern", ""), ("another form", None))
        message = f"expected {wanted}, got {describe_value(value)}"
    elif kind in _LIMITS:
        limit = _LIMITS[kind].format(**{key: f"{bound:g}" for key, bound in context.items()})
        message = f"`{shown}` is {limit}, got {describe_value(value)}"
        if kind == "less_than_equal" and context["le"] == 1:
            message = f"`{shown}` must be 0 to 1, got {describe_value(value)}"
            if 2 < value <= 100:
                help_text = f"write {value / 100:g} for {value} %"
    elif kind == "too_short":
        least = context.get("min_length", 1)
        message = f"`{shown}` needs at least {'one entry' if least == 1 else f'{least} entries'}"
    elif kind in ("string_too_long", "string_too_short"):
        limit = context.get("max_length", context.get("min_length"))
        word = "at most" if kind == "string_too_long" else "at least"
        message = f"`{shown}` has {word} {limit} characters, got {len(str(value))}"
    return source.report(code, path, message, help_text, span=span)


_LIMITS = {
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "finite_number": "a finite number",
}


def describe_value(value: object) -> str:
    """Say what kind of value ``value`` is, with the value where it is short."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'the text "{value}"' if len(value) <= 40 else "a long text"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "an array"
    return "something else"


def _name_table(path: KeyPath) -> str:
    return f"in `{format_path(path)}`" if path else "at the top level"


def _explain_missing(source: SourceFile, document: type[BaseModel], path: KeyPath) -> Diagnostic:
    message = f"missing key `{path[-1]}` {_name_table(path[:-1])}"
    span = source.spans.find_table(path[:-1])
    return source.report("P102", path, message, _suggest_line(document, path), span=span)


def is_misspelt(source: SourceFile, document: type[BaseModel], path: KeyPath) -> bool:
    """Whether the missing key at ``path`` exists with a slip of the pen: one finding suffices."""
    known = list_known_keys(document, path[:-1])
    keys = islice(look_up(source.values, path[:-1]), MAX_COMPARED)
    return any(key not in known and suggest(key, known) == path[-1] for key in keys)


def _suggest_line(document: type[BaseModel], path: KeyPath) -> str | None:
    wanted = find_type(document, path)
    name = path[-1]
    if get_origin(wanted) is Literal:
        return f"one of {_join(get_args(wanted))}"
    if is_table(wanted):
        required = [key for key, field in wanted.model_fields.items() if field.is_required()]
        needs = f" with {_join(required)}" if required else ""
        return f"add a table `[{format_path(path)}]`{needs}"
    field = find_field(document, path)
    if wanted is int and field is not None and find_quantity(field) is not None:
        return f'for example `{name} = "4 MiB"`'
    examples = None if field is None else field.examples
    return f"for example `{name} = {write_value(examples[0])}`" if examples else None


def _explain_unknown(source: SourceFile, document: type[BaseModel], path: KeyPath) -> Diagnostic:
    name = str(path[-1])
    known = list_known_keys(document, path[:-1])
    near = suggest(name, known)
    help_text = f"did you mean `{near}`?" if near else None
    if near is None:
        home = _find_home(document, name)
        if home:
            help_text = f"`{name}` belongs to {home}"
        elif known:
            help_text = f"known keys: {_join(known)}"
    message = f"unknown key `{name}` {_name_table(path[:-1])}"
    return source.report("P101", path, message, help_text, span=source.spans.find_key(path))


def _find_home(document: type[BaseModel], name: str) -> str | None:
    """The table one level down that has a key of this name: the key stands under another header."""
    homes = []
    if name in document.model_fields:
        return "the top level: move it above the first [table]"
    for table in document.model_fields:
        if name in list_known_keys(document, (table,)):
            homes.append(f"`[{table}]`")
    return homes[0] if len(homes) == 1 else None


def _explain_word(
    document: type[BaseModel], path: KeyPath, value: object
) -> tuple[str, str, str | None]:
    options = [str(item) for item in get_args(find_type(document, path))]
    near = suggest(value, options) if isinstance(value, str) else None
    message = f"`{format_path(path)}` is {_list_options(options)}, got {describe_value(value)}"
    return "P104", message, f'did you mean "{near}"?' if near else None


def _explain_word_key(
    document: type[BaseModel], path: KeyPath, value: object
) -> tuple[str, str, str | None]:
    """A key that is none of the known words, in a table such as ``backends``."""
    table = find_type(document, path[:-1])
    options = [str(item) for item in get_args(get_args(table)[0])]
    near = suggest(str(value), options)
    help_text = f"did you mean `{near}`?" if near else f"known keys: {_join(options)}"
    return "P101", f"unknown key `{value}` {_name_table(path[:-1])}", help_text


def _list_options(options: Sequence[str]) -> str:
    if len(options) == 1:
        return f"`{options[0]}`"
    if len(options) > MAX_LISTED:
        return f"one of {_join(options[:MAX_LISTED])} and {len(options) - MAX_LISTED} more"
    return f"one of {_join(options)}"


def _join(items: Iterable[object]) -> str:
    return ", ".join(f"`{item}`" for item in items)


def _suggest_conversion(kind: str, value: object) -> str | None:
    if kind == "bool_type" and isinstance(value, str) and value.lower() in ("true", "false"):
        return f"write {value.lower()} without quotes"
    is_number = isinstance(value, str) and re.fullmatch(r"\s*-?\d+(\.\d+)?\s*", value)
    if kind in ("int_type", "float_type") and is_number:
        return f"write {str(value).strip()} without quotes"
    if kind == "string_type" and isinstance(value, int | float) and not isinstance(value, bool):
        return f'write "{value}"'
    if kind in ("tuple_type", "list_type") and isinstance(value, str | int | float | dict):
        return "put it in [ ]"
    if kind in ("int_type", "int_from_float") and isinstance(value, float):
        return f"write {round(value)}"
    return None


def _suggest_quantity(
    document: type[BaseModel], path: KeyPath, value: object, context: Mapping[str, Any]
) -> str | None:
    """Correct a unit's spelling, or turn a bare number of bytes into text."""
    if context.get("hint"):
        return str(context["hint"])
    if type(value) is int and value >= 0 and find_type(document, path) is int:
        return f'write "{format_bytes(value)}" if it is bytes'
    return None
