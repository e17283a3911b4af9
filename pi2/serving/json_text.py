"""JSON in the text of an answer: where it ends, and what it says."""

from __future__ import annotations

import json
import re
from typing import Any

_PARTS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*("|\Z)|[{}\[\]]', re.DOTALL)


def _refuse(name: str) -> None:
    raise ValueError(name)


_LENIENT = json.JSONDecoder(strict=False, parse_constant=_refuse)
"""Models write line breaks into texts; NaN is no JSON."""


def find_json_end(text: str, start: int) -> int | None:
    """Where the object or list ends that begins at ``start``; None if it is not whole."""
    depth = 0
    for found in _PARTS.finditer(text, start):
        sign = found[0][0]
        if sign == '"':
            if found[1] != '"':
                return None
        elif sign in "{[":
            depth += 1
        else:
            depth -= 1
            if depth <= 0:
                return found.end()
    return None


def load_json(text: str) -> Any:
    """The value, None if it is none (or ``null``)."""
    try:
        return _LENIENT.decode(text)
    except (ValueError, RecursionError):
        return None


def dump_json_text(value: Any) -> str:
    """JSON as models and templates write it."""
    return json.dumps(value, ensure_ascii=False)


def keep_text(text: str, value: Any) -> str:
    """The JSON of ``value``: as it was written, if that is JSON."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return dump_json_text(value)
    return text
