"""How streams are written: server-sent events, or JSON line by line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pi2.serving.errors import ApiError, find_form

DONE = b"data: [DONE]\n\n"
"""What ends OpenAI's streams."""
PING = b": ping\n\n"
"""A comment, which clients pass over."""
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


def write_typed_events(events: Sequence[Mapping[str, Any]]) -> bytes:
    """Events that name their types, as Anthropic's are and those of responses."""
    return b"".join(write_event(event, event["type"]) for event in events)


def write_stream_error(path: str, error: ApiError, number: int = 0) -> bytes:
    """The last event of a stream of ``path`` that cannot go on; ``number`` is its place where
    events have numbers."""
    problem = error.describe(find_form(path))
    if path.startswith("/api/"):
        return dump_json(problem) + b"\n"
    if path.startswith("/v1/messages"):
        return write_event(problem, "error")
    if path.startswith("/v1/responses"):
        facts = problem["error"]
        told = {
            "type": "error",
            "sequence_number": number,
            "code": facts["code"] or facts["type"],
            "message": facts["message"],
            "param": facts["param"],
        }
        return write_event(told, "error")
    return write_event(problem)
