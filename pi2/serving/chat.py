"""``/v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pi2.serving.answer_reader import Fragment
from pi2.serving.calls import Ask, Collected, Delta, Finished, collect, generate, prepare_chat
from pi2.serving.conversation import ANY_OBJECT, Conversation, join_text, make_call
from pi2.serving.host import Host, describe_fingerprint
from pi2.serving.openai_schema import (
    ChatMessage,
    ChatRequest,
    NamedTool,
    ObjectFormat,
    SchemaFormat,
)
from pi2.serving.requests import (
    JsonResponse,
    Service,
    choose_sampling,
    describe_usage,
    find_client,
    list_stops,
    make_id,
    note_use,
    parse_body,
    stream_events,
    use_model,
    wait_for_client,
)
from pi2.serving.sse import DONE, write_event
from pi2.serving.token_scores import describe_chat_scores
from pi2.serving.tool_formats import ToolCall

_EFFORTS = {"none": False, "minimal": False}
"""Efforts that leave out reasoning, for templates that can."""


def read_message(message: ChatMessage) -> dict[str, Any]:
    """A message as templates read it."""
    found: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": join_text(message.content, kinds=("text", "refusal")),
    }
    if message.name is not None:
        found["name"] = message.name
    if message.reasoning_content is not None:
        found["reasoning_content"] = message.reasoning_content
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        found["tool_calls"] = [
            make_call(call.id, call.function.name, call.function.arguments)
            for call in message.tool_calls
        ]
    return found


def read_conversation(body: ChatRequest) -> Conversation:
    """The conversation that a body states."""
    schema: Mapping[str, Any] | None = None
    if isinstance(body.response_format, ObjectFormat):
        schema = ANY_OBJECT
    elif isinstance(body.response_format, SchemaFormat):
        schema = body.response_format.json_schema.schema_ or ANY_OBJECT
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
        variables.setdefault("enable_thinking", _EFFORTS.get(body.reasoning_effort, True))
    choice = body.tool_choice
    return Conversation(
        messages=[read_message(message) for message in body.messages],
        tools=[tool.function.model_dump(exclude_none=True) for tool in body.tools or ()],
        tool_choice="auto" if choice is None or isinstance(choice, NamedTool) else choice,
        named_tool=choice.function.name if isinstance(choice, NamedTool) else None,
        parallel_calls=body.parallel_tool_calls is not False,
        variables=variables,
        json_schema=schema,
    )


async def answer_chat(request: Request, service: Service) -> Response:
    """Answer a chat."""
    body = await parse_body(request, service, ChatRequest)
    conversation = read_conversation(body)
    async with AsyncExitStack() as stack:
        host, limits = await stack.enter_async_context(use_model(request, service, body.model))
        ask = await prepare_chat(
            host,
            conversation,
            {
                "count": body.n or 1,
                "client": find_client(request),
                "max_tokens": body.max_completion_tokens or body.max_tokens,
                "stop": list_stops(body.stop),
                "alternatives": (body.top_logprobs or 0) if body.logprobs else None,
                "sampling": choose_sampling(body, host.model.plan.model.shape.vocab),
            },
        )
        note_use(request, model=host.plan.name, prompt_tokens=len(ask.prompt_ids))
        writer = _Writer(host, body, ask)
        events = generate(host, ask, limits, service.metrics)
        if not body.stream:
            found = await wait_for_client(request, collect(events, ask.count))
            note_use(request, completion_tokens=_count_tokens(found))
            return JsonResponse(writer.write_whole(found))
        kept = stack.pop_all()
        return await stream_events(request, _stream(request, writer, events, kept))


async def _stream(
    request: Request,
    writer: _Writer,
    events: AsyncGenerator[Delta | Finished, None],
    kept: AsyncExitStack,
) -> AsyncGenerator[bytes, None]:
    async with kept:
        async for event in _close_after(events):
            for chunk in writer.write_chunks(event):
                yield write_event(chunk)
        note_use(request, completion_tokens=writer.tokens)
        if writer.includes_usage:
            yield write_event(writer.write_usage())
        yield DONE


async def _close_after(
    events: AsyncGenerator[Delta | Finished, None],
) -> AsyncGenerator[Delta | Finished, None]:
    try:
        async for event in events:
            yield event
    finally:
        await events.aclose()


def _count_tokens(found: Sequence[Collected]) -> int:
    return sum(item.end.tokens for item in found if item.end is not None)


class _Writer:
    """Writes what comes of a request as OpenAI's clients expect it."""

    def __init__(self, host: Host, body: ChatRequest, ask: Ask) -> None:
        self._model = host.model
        self._ask = ask
        self._scored = bool(body.logprobs)
        self.includes_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._head = {
            "id": make_id("chatcmpl-"),
            "created": int(time.time()),
            "model": host.plan.name,
            "system_fingerprint": describe_fingerprint(host.model),
        }
        self._begun: set[int] = set()
        self._calls = [0] * ask.count
        self._ends: list[Finished] = []

    @property
    def tokens(self) -> int:
        """Tokens of the sequences that have ended."""
        return sum(end.tokens for end in self._ends)

    def write_whole(self, found: Sequence[Collected]) -> dict[str, Any]:
        """The answer, complete."""
        self._ends = [item.end for item in found if item.end is not None]
        choices = []
        for index, item in enumerate(found):
            assert item.end is not None
            message: dict[str, Any] = {
                "role": "assistant",
                "content": item.content if item.content or not item.calls else None,
                "refusal": None,
            }
            if item.reasoning:
                message["reasoning_content"] = item.reasoning
            if item.calls:
                message["tool_calls"] = [
                    {
                        "id": make_id("call_"),
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    }
                    for call in item.calls
                ]
            scores = describe_chat_scores(self._model, item.scores) if self._scored else None
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": scores,
                    "finish_reason": item.end.reason,
                }
            )
        return {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            "usage": self._describe_usage(),
        }

    def write_chunks(self, event: Delta | Finished) -> list[dict[str, Any]]:
        """The chunks that an event makes."""
        chunks = []
        index = event.index
        if index not in self._begun:
            self._begun.add(index)
            chunks.append(self._write_chunk(index, {"role": "assistant", "content": ""}))
        if isinstance(event, Finished):
            self._ends.append(event)
            chunks.append(self._write_chunk(index, {}, reason=event.reason))
            return chunks
        deltas = [delta for item in event.items for delta in self._write_deltas(index, item)]
        if self._scored and event.scores:
            deltas = deltas or [{"content": ""}]
            scores = describe_chat_scores(self._model, event.scores)
            chunks.append(self._write_chunk(index, deltas[0], scores=scores))
            deltas = deltas[1:]
        return chunks + [self._write_chunk(index, delta) for delta in deltas]

    def _write_deltas(self, index: int, item: Fragment | ToolCall) -> list[dict[str, Any]]:
        if isinstance(item, Fragment):
            key = "content" if item.part == "content" else "reasoning_content"
            return [{key: item.text}]
        number = self._calls[index]
        self._calls[index] += 1
        head = {"id": make_id("call_"), "type": "function"}
        function = {"name": item.name, "arguments": ""}
        return [
            {"tool_calls": [{"index": number, **head, "function": function}]},
            {"tool_calls": [{"index": number, "function": {"arguments": item.arguments}}]},
        ]

    def _write_chunk(
        self,
        index: int,
        delta: Mapping[str, Any],
        *,
        scores: Mapping[str, Any] | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": scores, "finish_reason": reason}
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        return {**chunk, "usage": None} if self.includes_usage else chunk

    def write_usage(self) -> dict[str, Any]:
        """The last chunk, where it is asked for."""
        usage = self._describe_usage()
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage}

    def _describe_usage(self) -> Mapping[str, Any]:
        return describe_usage(
            len(self._ask.prompt_ids),
            self.tokens,
            max((end.reused_tokens for end in self._ends), default=0),
            sum(end.reasoning_tokens for end in self._ends),
        )
