"""Plain values as TOML: what a device file needs, without a library."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any


def write_toml(values: Mapping[str, Any]) -> str:
    """Return TOML of texts, numbers, truth values, lists and tables; None is left out."""
    return "\n".join(_write_table((), values)) + "\n"


def _write_table(path: tuple[str, ...], values: Mapping[str, Any]) -> Iterator[str]:
    tables: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, Mapping) or _is_list_of_tables(value):
            tables.append((key, value))
        elif value is not None and value != []:
            yield f"{_write_key(key)} = {_write_value(value)}"
    for key, value in tables:
        name = ".".join(map(_write_key, (*path, key)))
        for item in value if isinstance(value, list) else [value]:
            yield ""
            yield f"[[{name}]]" if isinstance(value, list) else f"[{name}]"
            yield from _write_table((*path, key), item)


def _is_list_of_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def _write_key(key: str) -> str:
    plain = key.replace("-", "").replace("_", "")
    return key if plain.isascii() and plain.isalnum() else json.dumps(key)


def _write_value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_write_value, value))}]"
    if isinstance(value, float) and value.is_integer():
        return f"{value:.1f}"
    # Texts of JSON are texts of TOML but for DEL, which no figure has.
    return json.dumps(value)
