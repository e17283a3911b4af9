"""What is common to requests of all interfaces: reading them, and answering those who wait."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from pi2.serving.calls import Limits
from pi2.serving.errors import ApiError, dump_json, explain_invalid
from pi2.serving.host import Host, list_arguments
from pi2.serving.hosts import Hosts
from pi2.serving.metrics import Metrics

Parsed = TypeVar("Parsed", bound=BaseModel)
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What requests are answered with."""

    hosts: Hosts
    limits: Limits
    metrics: Metrics
    read_s: float = 30.0
    """Seconds in which a body must have come."""
    body_bytes: int = 8 << 20
    """Most bytes of a body."""


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class JsonResponse(Response):
    """JSON, or what stands for it as bytes."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        return content if isinstance(content, bytes) else dump_json(content)


def make_id(prefix: str) -> str:
    """A new identity."""
    return f"{prefix}{secrets.token_hex(12)}"


def find_client(request: Request) -> str:
    """Whose request it is: clients take turns."""
    key = request.headers.get("authorization") or request.headers.get("x-api-key") or ""
    host = request.client.host if request.client else ""
    return f"{host} {key}"


async def read_body(request: Request, body_bytes: int, read_s: float = 30.0) -> bytes:
    """The body; ApiError 413 if it has more than ``body_bytes``, 408 if it has not come after
    ``read_s`` seconds."""
    stated = request.headers.get("content-length", "")
    too_large = ApiError(413, f"A body may have {body_bytes} bytes at most.")
    if stated.isdigit() and int(stated) > body_bytes:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(read_s):
            async for part in request.stream():
                size += len(part)
                if size > body_bytes:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, "The body did not come in time.") from None
    return b"".join(parts)


async def parse_body(request: Request, service: Service, kind: type[Parsed]) -> Parsed:
    """The body as ``kind``; ApiError 400 for what is wrong with it."""
    data = await read_body(request, service.body_bytes, service.read_s)
    try:
        data.decode("utf-8")
        body = kind.model_validate_json(data)
        request.state.asked = dict(body)  # what traces tell of it are numbers alone
        return body
    except UnicodeDecodeError:
        raise ApiError(400, "The body is not UTF-8.", code="invalid_json") from None
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        if problem["type"] == "json_invalid":
            message = f"The body is not JSON: {problem['msg']}."
            raise ApiError(400, message, code="invalid_json") from None
        raise explain_invalid(error) from None
    except RecursionError:
        raise ApiError(400, "The body is nested too deeply.", code="invalid_json") from None


async def wait_for_client(request: Request, work: Awaitable[Found]) -> Found:
    """The result of ``work``, which ends when the client goes (`ClientGone`)."""
    task = asyncio.ensure_future(work)

    async def watch() -> None:
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                return

    watcher = asyncio.create_task(watch())
    try:
        await asyncio.wait([task, watcher], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for other in (task, watcher):
            other.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


@asynccontextmanager
async def use_model(
    request: Request, service: Service, name: str
) -> AsyncIterator[tuple[Host, Limits]]:
    """The host of the plan called ``name``, loaded, as long as somebody uses it, and the limits of
    the answer, of whose time the wait is a part.

    Raises ApiError 404 if there is none, 429 if too many wait for it, 504 if it is not there in
    time, and `ClientGone`.
    """
    limits, start = service.limits, time.monotonic()
    turn = service.hosts.join(name, waiting=limits.waiting)
    try:
        if not turn.ready.done():
            try:
                async with asyncio.timeout(limits.time_s):
                    await wait_for_client(request, turn.ready)
            except TimeoutError:
                message = f"there was no memory for '{name}' within {limits.time_s:g} s"
                raise ApiError(504, message) from None
        yield turn.host, replace(limits, spent_s=time.monotonic() - start)
    finally:
        service.hosts.leave(turn)


def note_use(request: Request, **values: Any) -> None:
    """Keep what the access log says of a request besides; no prompts."""
    request.state.use = {**getattr(request.state, "use", {}), **values}


_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "seed", "logit_bias"),
)


def choose_sampling(body: BaseModel, vocab: int) -> dict[str, Any]:
    """What a body says of how tokens are drawn; ApiError 400 for biases of tokens that are not."""
    found = list_arguments({name: getattr(body, name, None) for name in _SAMPLING})
    if found.get("seed") == -1:
        del found["seed"]
    elif "seed" in found:
        found["seed"] %= 2**63
    if "top_k" in found:
        found["top_k"] = max(found["top_k"], 0)
    if "top_p" in found:
        found["top_p"] = max(found["top_p"], _LEAST_TOP_P)
    bias: dict[int, float] = {}
    for key, value in found.pop("logit_bias", {}).items():
        if not key.isdecimal() or int(key) >= vocab:
            raise ApiError(400, f"'{key}' is no token of this model.", param="logit_bias")
        bias[int(key)] = value
    return {**found, "logit_bias": bias} if bias else found


def describe_ask(host: Host, body: BaseModel, client: str, most: int | None) -> dict[str, Any]:
    """What an `Ask` has of every interface; ``most``: tokens that the body lets an answer have."""
    return {
        "client": client,
        "max_tokens": limit_tokens(most),
        "sampling": choose_sampling(body, host.model.plan.model.shape.vocab),
    }


_LEAST_TOP_P = 1e-9
"""Keeps the likeliest token alone, which is what 0 asks for."""


def limit_tokens(given: int | None) -> int | None:
    """The most tokens of an answer; None for as many as there is room for, which -1 asks for."""
    return None if given is None or given < 0 else given


def list_stops(stop: str | Sequence[str] | None) -> list[str]:
    return [] if stop is None else [stop] if isinstance(stop, str) else list(stop)


def describe_usage(prompt: int, completion: int, reused: int, reasoning: int) -> Mapping[str, Any]:
    """``usage`` of OpenAI's chats and completions."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": reused},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
