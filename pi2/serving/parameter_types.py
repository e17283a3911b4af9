"""Values of parameters that a model writes as text: the tool's JSON schema decides their types."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pi2.serving.json_text import load_json

Schema = Mapping[str, Any]
_DEPTH = 16
"""References that are followed, one after the other."""


def find_parameter(tool: Mapping[str, Any] | None, name: str) -> Schema | None:
    """The schema of a parameter of ``tool`` (OpenAI's ``function`` object); None if it has none."""
    root = (tool or {}).get("parameters")
    if not isinstance(root, Mapping):
        return None
    return _find_property(root, root, name, _DEPTH)


def _find_property(root: Schema, schema: Any, name: str, depth: int) -> Schema | None:
    schema = resolve(root, schema)
    if not isinstance(schema, Mapping) or depth < 0:
        return None
    properties = schema.get("properties")
    found = properties.get(name) if isinstance(properties, Mapping) else None
    if found is None:
        patterns = schema.get("patternProperties")
        for pattern, own in patterns.items() if isinstance(patterns, Mapping) else ():
            if _matches(pattern, name):
                found = own
    for key in ("allOf", "anyOf", "oneOf"):
        for part in schema.get(key) or () if found is None else ():
            found = found or _find_property(root, part, name, depth - 1)
    if found is None:
        found = schema.get("additionalProperties")
    return found if isinstance(found, Mapping) else None


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return False


def resolve(root: Schema, schema: Any) -> Any:
    """``schema``, or what its ``$ref`` names within ``root``."""
    for _ in range(_DEPTH):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            return schema
        place: Any = root
        for part in schema["$ref"].removeprefix("#").strip("/").split("/"):
            part = part.replace("~1", "/").replace("~0", "~")
            place = place.get(part) if isinstance(place, Mapping) else None
        schema = place
    return None


def list_types(root: Schema, schema: Any, depth: int = _DEPTH) -> list[str]:
    """The types that a schema allows, in its order; empty if it does not say."""
    schema = resolve(root, schema)
    if not isinstance(schema, Mapping) or depth < 0:
        return []
    stated = schema.get("type")
    found = [stated] if isinstance(stated, str) else [*stated] if isinstance(stated, list) else []
    for key in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(key) or ():
            found += list_types(root, part, depth - 1)
    if not found:
        values = [*(schema.get("enum") or ()), *([schema["const"]] if "const" in schema else [])]
        found = [name_type(value) for value in values]
    if not found and ("properties" in schema or "additionalProperties" in schema):
        found = ["object"]
    if not found and "items" in schema:
        found = ["array"]
    if schema.get("nullable") is True:
        found.append("null")
    return list(dict.fromkeys(found))


def name_type(value: Any) -> str:
    """The name that JSON schemas have for a value's type."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return "null" if value is None else names.get(type(value), "object")


def read_value(text: str, root: Schema, schema: Any, *, is_text: bool | None = None) -> Any:
    """The value that ``text`` stands for; ``is_text``: what the model says of it."""
    types = list_types(root, schema)
    if not types:
        return text if is_text else _guess_value(text)
    if "null" in types and text.strip() in ("null", "None"):
        return None
    for name in types:
        found = _READERS.get(name, _read_text)(text.strip() if name != "string" else text)
        if found is not _NOTHING:
            return found
    return text


_NOTHING = object()


def _read_text(text: str) -> Any:
    return text


def _read_integer(text: str) -> Any:
    value = _read_number(text)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) else _NOTHING


def _read_number(text: str) -> Any:
    value = load_json(text)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else _NOTHING


def _read_boolean(text: str) -> Any:
    return {"true": True, "false": False}.get(text.lower(), _NOTHING)


def _read_null(text: str) -> Any:
    return None if text in ("null", "None") else _NOTHING


def _read_container(text: str, kind: type) -> Any:
    value = load_json(text)
    if isinstance(value, kind):
        return value
    try:
        value = ast.literal_eval(text)
        json.dumps(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return _NOTHING
    return value if isinstance(value, kind) else _NOTHING


_READERS: Mapping[str, Callable[[str], Any]] = {
    "string": _read_text,
    "integer": _read_integer,
    "number": _read_number,
    "boolean": _read_boolean,
    "null": _read_null,
    "object": lambda text: _read_container(text, dict),
    "array": lambda text: _read_container(text, list),
}


def _guess_value(text: str) -> Any:
    """A parameter whose type nobody states: JSON if it is other than a text, else the text."""
    value = load_json(text)
    return text if value is None and text.strip() != "null" or isinstance(value, str) else value


def list_parameters(tool: Mapping[str, Any]) -> tuple[Schema, Sequence[tuple[str, Any, bool]]]:
    """The schema of a tool's parameters; their names and schemas, and whether each is required."""
    root = tool.get("parameters") or {}
    found = resolve(root, root) or {}
    properties = found.get("properties") or {}
    required = found.get("required") or ()
    return root, [(name, schema, name in required) for name, schema in properties.items()]
