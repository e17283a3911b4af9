"""What interfaces have in common: a body is read, the model is asked, and its answer is written."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from pi2.plan.documents.common import Sampling
from pi2.serving.calls import Answers, Ask, Collected, Delta, Finished, Limits
from pi2.serving.errors import (
    HEADERS,
    PING,
    ApiError,
    dump_json,
    explain_invalid,
    write_stream_error,
)
from pi2.serving.hosts import Host, Hosts, list_arguments
from pi2.serving.metrics import Metrics

Parsed = TypeVar("Parsed", bound=BaseModel)
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    hosts: Hosts
    limits: Limits
    metrics: Metrics
    read_s: float = 30.0
    """Seconds in which a body must have come."""
    body_bytes: int = 8 << 20
    """Most bytes of a body."""


class ClientGone(Exception):
    """The client is gone."""


class NotedSend:
    """Sends messages on; `status` is the answer's, 0 before it has one."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dump_json(content)


def make_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


def find_client(request: Request) -> str:
    key = request.headers.get("authorization") or request.headers.get("x-api-key") or ""
    host = request.client.host if request.client else ""
    return f"{host} {key}"


async def read_body(request: Request, body_bytes: int, read_s: float = 30.0) -> bytes:
    """The body; ApiError 413 above ``body_bytes``, 408 after ``read_s`` seconds."""
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
    """The body as ``kind``; ApiError 400 for its faults."""
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
    """The loaded host of a plan while it is used, and the answer's limits, less the wait. Raises
    ApiError 404, 429 or 504, and `ClientGone`."""
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
    """Keep additional fields of a request's access log; no prompts."""
    request.state.use = {**getattr(request.state, "use", {}), **values}


def choose_sampling(body: BaseModel, vocab: int) -> dict[str, Any]:
    """What a body says of how tokens are drawn; ApiError 400 for biases of tokens that are not."""
    names = (*Sampling.model_fields, "logit_bias")
    found = list_arguments({name: getattr(body, name, None) for name in names})
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
    stop: str | Sequence[str] | None = getattr(body, "stop", None)
    return {
        "client": client,
        "max_tokens": (None if most is None or most < 0 else most),
        "stop": [stop] if isinstance(stop, str) else stop or (),
        "sampling": choose_sampling(body, host.model.plan.model.shape.vocab),
    }


_LEAST_TOP_P = 1e-9
"""Keeps only the likeliest token, as 0 demands."""


def describe_usage(prompt: int, completion: int, reused: int, reasoning: int) -> Mapping[str, Any]:
    """``usage`` of OpenAI's chats and completions."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": reused},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


FIRST_PING_S = 1.0
"""Seconds until a stream without an event says that it goes on."""
PING_S = 5.0
"""Seconds between such events."""


class Asking(Protocol):
    """A body that asks a model."""

    @property
    def model(self) -> str: ...

    @property
    def stream(self) -> bool | None: ...


Question = TypeVar("Question", bound=Asking)


@dataclass(frozen=True, slots=True)
class Operation(Generic[Parsed]):
    """Something that clients can post."""

    path: str
    body: type[Parsed]
    summary: str
    answer: Callable[[Request, Service, Parsed], Awaitable[Response]]
    kind: str | None = None
    """What OpenTelemetry calls it, if it asks a model."""

    async def __call__(self, request: Request, service: Service) -> Response:
        body = await parse_body(request, service, self.body)
        return await self.answer(request, service, body)


class Writer:
    """Writes an answer as clients of an interface expect it."""

    media_type: ClassVar[str] = "text/event-stream"

    def __init__(self, host: Host, asks: Sequence[Ask]) -> None:
        self.host = host
        self.asks = asks
        self.ends: list[Finished] = []
        """The sequences that have ended."""

    @property
    def prompt_tokens(self) -> int:
        return sum(len(ask.prompt_ids) for ask in self.asks)

    @property
    def tokens(self) -> int:
        return sum(end.tokens for end in self.ends)

    def write_whole(self, found: Sequence[Collected]) -> dict[str, Any]:
        """The answer, complete; one sequence in most interfaces."""
        raise NotImplementedError

    def write_start(self) -> bytes:
        return b""

    def write_ping(self) -> bytes:
        return PING

    def write_event(self, event: Delta | Finished) -> bytes:
        """The answer so far; `ends` has it already if it is an end."""
        raise NotImplementedError

    def write_end(self) -> bytes:
        return b""

    def count(self) -> int:
        return 0


def answer_with(
    prepare: Callable[[Host, Question, str], Awaitable[Writer]],
) -> Callable[[Request, Service, Question], Awaitable[Response]]:
    """An interface's answer function; ``prepare`` makes the writer of the asks."""

    async def answer(request: Request, service: Service, body: Question) -> Response:
        async with AsyncExitStack() as stack:
            used = use_model(request, service, body.model)
            host, limits = await stack.enter_async_context(used)
            writer = await prepare(host, body, find_client(request))
            note_use(request, model=host.plan.name, prompt_tokens=writer.prompt_tokens)
            answers = Answers(host, writer.asks, limits, service.metrics)
            stack.push_async_callback(answers.close)
            if body.stream:
                return AnswerStream(request, answers, writer, stack.pop_all())
            found = await wait_for_client(request, answers.collect())
            writer.ends += [item.end for item in found if item.end is not None]
            note_use(request, completion_tokens=writer.tokens)
            return JsonResponse(writer.write_whole(found))

    return answer


class AnswerStream(StreamingResponse):
    """An answer sent as it comes, with pings, because proxies hang up; errors are events."""

    def __init__(
        self, request: Request, answers: Answers, writer: Writer, kept: AsyncExitStack
    ) -> None:
        """``kept`` is closed at the end, or when the client has gone."""
        self._kept = kept
        content = _write_stream(request, answers, writer)
        super().__init__(content, media_type=writer.media_type, headers=HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._kept:
            await super().__call__(scope, receive, send)


async def _write_stream(
    request: Request, answers: Answers, writer: Writer
) -> AsyncGenerator[bytes, None]:
    start, wait_s = time.perf_counter(), FIRST_PING_S
    try:
        if first := writer.write_start():
            yield first
        has_begun = False
        while answers.going:
            event = await answers.take(wait_s)
            if event is not None and not has_begun:
                has_begun = True
                note_use(request, first_s=round(time.perf_counter() - start, 4))
            if isinstance(event, Finished):
                writer.ends.append(event)
            if written := writer.write_ping() if event is None else writer.write_event(event):
                yield written
            wait_s = PING_S
        note_use(request, completion_tokens=writer.tokens)
        if last := writer.write_end():
            yield last
    except ApiError as error:
        note_use(request, failed=error.status)
        yield write_stream_error(request.url.path, error, writer.count())
