"""Plain values of TOML: their key paths, and how they are written."""

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

KeyPath = tuple[str | int, ...]
"""Keys and array indices from the root, such as ``("layers", "overrides", 0, "select")``."""
EVERY_ITEM = -1
"""Replaces an index, for every item of the array, written ``[]``."""
EVERY_NAME = "*"
"""Replaces a user's name, for every name of the table."""


def format_path(path: Sequence[str | int]) -> str:
    """Write a key path for people: ``layers.overrides[0].select``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += "[]" if part == EVERY_ITEM else f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def name_path(path: KeyPath) -> str | None:
    """Key path for a diagnostic, None for the document itself."""
    return format_path(path) or None


def look_up(values: Any, path: Sequence[str | int]) -> Any:
    """The value at ``path`` in plain values; None where there is none (TOML has no null)."""
    for part in path:
        is_key = isinstance(values, dict) and part in values
        is_index = isinstance(values, list) and isinstance(part, int) and 0 <= part < len(values)
        if not (is_key or is_index):
            return None
        values = values[part]
    return values


def write_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, int):
        return hex(value) if value.bit_length() > 10_000 else str(value)  # str() has a limit
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
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
    written = (
        _ESCAPES.get(char) or (char if char.isprintable() else f"\\U{ord(char):08x}")
        for char in value
    )
    return '"' + "".join(written) + '"'


def write_key(key: str) -> str:
    plain = key.isascii() and key.replace("-", "").replace("_", "").isalnum()
    return key if plain else write_text(key)
