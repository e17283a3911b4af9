"""What a client is told when a stream cannot go on, in the form of the interface that it uses."""

from __future__ import annotations

from pi2.serving.errors import ApiError, find_form
from pi2.serving.sse import dump_json, write_event


def write_stream_error(path: str, error: ApiError, number: int = 0) -> bytes:
    """The last event of a stream of ``path``; ``number`` is its place where events have numbers."""
    problem = error.describe(find_form(path))
    if path.startswith("/api/"):
        return dump_json({"error": error.message}) + b"\n"
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
