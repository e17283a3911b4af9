"""What all interfaces have in common: a body is read, the model is asked, and what comes of it is
written as the interface's clients expect it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from pi2.serving.calls import Answers, Ask, Collected, Delta, Finished
from pi2.serving.errors import HEADERS, PING, ApiError, write_stream_error
from pi2.serving.host import Host
from pi2.serving.requests import (
    JsonResponse,
    Service,
    find_client,
    note_use,
    parse_body,
    use_model,
    wait_for_client,
)

FIRST_PING_S = 1.0
"""Seconds until a stream without an event says that it goes on."""
PING_S = 5.0
"""Seconds until it says so again."""


class Asking(Protocol):
    """A body that asks a model."""

    @property
    def model(self) -> str: ...

    @property
    def stream(self) -> bool | None: ...


Parsed = TypeVar("Parsed", bound=BaseModel)
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
        """Answer a request."""
        body = await parse_body(request, service, self.body)
        return await self.answer(request, service, body)


class Writer:
    """Writes what comes of a request as clients of an interface expect it."""

    media_type: ClassVar[str] = "text/event-stream"

    def __init__(self, host: Host, asks: Sequence[Ask]) -> None:
        self.host = host
        self.asks = asks
        self.ends: list[Finished] = []
        """The sequences that have ended."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(ask.prompt_ids) for ask in self.asks)

    @property
    def tokens(self) -> int:
        """Tokens of the sequences that have ended."""
        return sum(end.tokens for end in self.ends)

    def write_whole(self, found: Sequence[Collected]) -> dict[str, Any]:
        """The answer, complete; one sequence in most interfaces."""
        raise NotImplementedError

    def write_start(self) -> bytes:
        """What a stream begins with, while the prompt is read."""
        return b""

    def write_ping(self) -> bytes:
        """What says that the answer will go on."""
        return PING

    def write_event(self, event: Delta | Finished) -> bytes:
        """What has come; `ends` has it already if it is an end."""
        raise NotImplementedError

    def write_end(self) -> bytes:
        """What a stream ends with."""
        return b""

    def count(self) -> int:
        """The number of the next event, where events are numbered."""
        return 0


def answer_with(
    prepare: Callable[[Host, Question, str], Awaitable[Writer]],
) -> Callable[[Request, Service, Question], Awaitable[Response]]:
    """What answers bodies of an interface; ``prepare`` makes of the model, the body and the client
    what is to be asked, and what writes the answer."""

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
    """An answer that is sent as it comes: the header at once, and a sign of life where nothing else
    comes for a while, because proxies hang up.  Errors are events."""

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
