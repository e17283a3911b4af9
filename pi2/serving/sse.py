"""Server-sent events: how a stream of JSON objects is written."""

from __future__ import annotations

import json
from typing import Any

DONE = b"data: [DONE]\n\n"
"""What ends OpenAI's streams."""
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Nobody on the way keeps events back."""


def dump_json(value: Any) -> bytes:
    """JSON on a line, in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(
        "utf-8", "replace"
    )


def write_event(value: Any, name: str | None = None) -> bytes:
    """An event with ``value`` as its data."""
    head = b"" if name is None else b"event: " + name.encode("ascii") + b"\n"
    return head + b"data: " + dump_json(value) + b"\n\n"
