"""What a client is told when something is wrong, in the form that it knows."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pi2.diagnostics import UserError

Form = Literal["openai", "anthropic", "ollama"]


@cache
def read_table() -> Mapping[str, Any]:
    """What ``fields.toml`` says of fields and errors."""
    return tomllib.loads(Path(__file__).with_name("fields.toml").read_text("utf-8"))


_CODES = {"P601": "context_length_exceeded"}
"""Codes of errors by findings of the engine."""

_CLIENTS_FAULT = ("P601", "P603", "P604", "P606", "P607", "P608", "P609", "P612", "P745")
"""Findings that a request is to blame for."""


class ApiError(Exception):
    """A request that is not answered."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}

    def describe(self, form: Form) -> dict[str, Any]:
        if form == "ollama":
            return {"error": self.message}
        types, status = read_table()["errors"], str(self.status)
        if form == "anthropic":
            kind = types.get(status, "api_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        kind = types["openai"].get(status) or types.get(status, "server_error")
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }


def find_form(path: str) -> Form:
    if path.startswith("/api/"):
        return "ollama"
    return "anthropic" if path.startswith("/v1/messages") else "openai"


def explain_user_error(error: UserError) -> ApiError:
    """What a client is told of a finding; nothing of this machine where the server is at fault."""
    finding = error.diagnostics[0]
    if finding.code == "P609":
        return ApiError(400, f"{finding.message}: it continues texts, at /v1/completions")
    if finding.code in _CLIENTS_FAULT:
        return ApiError(400, finding.message, code=_CODES.get(finding.code))
    if finding.code == "P696":
        return ApiError(503, finding.message, retry_after_s=10)
    if finding.code == "P615":
        return ApiError(503, "the model is being closed", retry_after_s=1)
    return ApiError(500, f"the model cannot go on ({finding.code}); the server's log says why")


def explain_invalid(error: ValidationError) -> ApiError:
    """What a client is told of the first thing that is wrong with a body."""
    problem = _find_nearest(error.errors(include_url=False, include_input=False))
    param = ""
    for part in problem["loc"]:
        if isinstance(part, int):
            param += f"[{part}]"
        elif not _is_branch(part):
            param += f".{part}" if param else part
    if problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1:
        return ApiError(
            400, f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter"
        )
    if problem["type"] == "missing":
        return ApiError(
            400,
            f"Missing required parameter: '{param}'.",
            param=param or None,
            code="missing_required_parameter",
        )
    message = f"Invalid value for '{param}': {problem['msg']}." if param else problem["msg"]
    return ApiError(400, message, param=param or None, code="invalid_value")


def _is_branch(part: str | int) -> bool:
    return isinstance(part, str) and ("-" in part or "[" in part)


def _find_nearest(problems: Sequence[ErrorDetails]) -> ErrorDetails:
    """The first problem; of a value with several types, the problem of the nearest type."""
    first = problems[0]
    branch = next((at for at, part in enumerate(first["loc"]) if _is_branch(part)), None)
    if branch is None:
        return first
    same = [each for each in problems if each["loc"][:branch] == first["loc"][:branch]]

    def measure_agreement(problem: ErrorDetails) -> tuple[bool, int, int]:
        numbers = [part for part in problem["loc"][branch:] if isinstance(part, int)]
        return not problem["type"].endswith("_type"), len(problem["loc"]), max(numbers, default=0)

    return max(same, key=measure_agreement)


DONE = b"data: [DONE]\n\n"
"""What ends OpenAI's streams."""
PING = b": ping\n\n"
"""A comment, which clients pass over."""
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Proxies must not keep events back."""


def dump_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(
        "utf-8", "replace"
    )


def write_event(value: Any, name: str | None = None) -> bytes:
    head = b"" if name is None else b"event: " + name.encode("ascii") + b"\n"
    return head + b"data: " + dump_json(value) + b"\n\n"


def write_typed_events(events: Sequence[Mapping[str, Any]]) -> bytes:
    return b"".join(write_event(event, event["type"]) for event in events)


def write_stream_error(path: str, error: ApiError, number: int = 0) -> bytes:
    """The last event of a failed stream of ``path``, numbered if its events are."""
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
