"""``/v1/messages``, Anthropic's interface."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from pi2.serving.answer_reader import Fragment
from pi2.serving.calls import Ask, Collected, Delta, Finished, collect, generate, prepare_chat
from pi2.serving.conversation import Conversation, ToolChoice, join_text, make_call
from pi2.serving.errors import ApiError
from pi2.serving.host import Host, list_arguments
from pi2.serving.openai_schema import Text, Tolerant
from pi2.serving.requests import (
    JsonResponse,
    Service,
    find_client,
    make_id,
    note_use,
    parse_body,
    stream_events,
    use_model,
    wait_for_client,
)
from pi2.serving.tool_formats import ToolCall
from pi2.serving.typed_events import stream_typed


class Message(Tolerant):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: Text | list[dict[str, Any]]


class Tool(Tolerant):
    """A tool of the client's."""

    name: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[\w.:-]+$")]
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None


class Choice(Tolerant):
    """Which tool is called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Tolerant):
    """Whether the model reasons."""

    type: Literal["enabled", "disabled", "adaptive"]


class CountRequest(BaseModel):
    """``/v1/messages/count_tokens``."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: Text
    messages: Annotated[list[Message], Field(min_length=1)]
    system: Text | list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None


class MessagesRequest(CountRequest):
    """``/v1/messages``."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    metadata: Any = None
    """Accepted and ignored, as is the one that follows."""
    service_tier: Any = None


def read_messages(body: CountRequest) -> list[dict[str, Any]]:
    """The messages as templates read them: results of tools are messages of their own."""
    found: list[dict[str, Any]] = []
    if body.system:
        found.append({"role": "system", "content": join_text(body.system, param="system")})
    for message in body.messages:
        if isinstance(message.content, str):
            found.append({"role": message.role, "content": message.content})
            continue
        texts: list[dict[str, Any]] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for block in message.content:
            kind = block.get("type")
            if kind == "tool_result":
                content = join_text(block.get("content"), param="messages")
                identity = str(block.get("tool_use_id"))
                found.append({"role": "tool", "content": content, "tool_call_id": identity})
            elif kind == "tool_use":
                calls.append(
                    make_call(
                        str(block.get("id")), str(block.get("name")), block.get("input") or {}
                    )
                )
            elif kind == "thinking":
                thoughts.append(str(block.get("thinking", "")))
            elif kind != "redacted_thinking":
                texts.append(block)
        if texts or calls:
            own: dict[str, Any] = {"role": message.role, "content": join_text(texts)}
            if calls:
                own["tool_calls"] = calls
            if thoughts:
                own["reasoning_content"] = "".join(thoughts)
            found.append(own)
    return found


def read_conversation(body: CountRequest) -> Conversation:
    """The conversation that a body states."""
    choices: Mapping[str, ToolChoice] = {"any": "required", "none": "none"}
    choice = body.tool_choice
    variables = {}
    if body.thinking is not None:
        variables["enable_thinking"] = body.thinking.type != "disabled"
    return Conversation(
        messages=read_messages(body),
        tools=[
            list_arguments(
                {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                }
            )
            for tool in body.tools or ()
        ],
        tool_choice="auto" if choice is None else choices.get(choice.type, "auto"),
        named_tool=choice.name if choice is not None and choice.type == "tool" else None,
        parallel_calls=not (choice and choice.disable_parallel_tool_use),
        variables=variables,
    )


async def count_tokens(request: Request, service: Service) -> Response:
    """Count the tokens of a conversation."""
    body = await parse_body(request, service, CountRequest)
    async with use_model(request, service, body.model) as (host, _):
        ask = await prepare_chat(host, read_conversation(body), {})
        return JsonResponse({"input_tokens": len(ask.prompt_ids)})


async def answer_messages(request: Request, service: Service) -> Response:
    """Answer a conversation."""
    body = await parse_body(request, service, MessagesRequest)
    conversation = read_conversation(body)
    async with AsyncExitStack() as stack:
        host, limits = await stack.enter_async_context(use_model(request, service, body.model))
        sampling = {name: getattr(body, name) for name in ("temperature", "top_p", "top_k")}
        ask = await prepare_chat(
            host,
            conversation,
            {
                "client": find_client(request),
                "max_tokens": body.max_tokens,
                "stop": body.stop_sequences or (),
                "sampling": list_arguments(sampling),
            },
        )
        note_use(request, model=host.plan.name, prompt_tokens=len(ask.prompt_ids))
        events = generate(host, ask, limits, service.metrics)
        if not body.stream:
            found = (await wait_for_client(request, collect(events, 1)))[0]
            assert found.end is not None
            note_use(request, completion_tokens=found.end.tokens)
            return JsonResponse(write_whole(host, ask, found))
        kept = stack.pop_all()
        return await stream_events(
            request, stream_typed(request, _Stream(host, ask).write, events, kept)
        )


def _describe_stop(end: Finished) -> dict[str, Any]:
    reason = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[end.reason]
    if end.stop_text is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": end.stop_text}


def _describe_usage(prompt: int, end: Finished | None) -> dict[str, Any]:
    reused = 0 if end is None else end.reused_tokens
    return {
        "input_tokens": prompt - reused,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": reused,
        "output_tokens": 0 if end is None else end.tokens,
        # Keys that every answer of Anthropic's has.
        "cache_creation": None,
        "inference_geo": None,
        "output_tokens_details": None,
        "server_tool_use": None,
        "service_tier": None,
    }


def _read_input(call: ToolCall) -> Any:
    try:
        value = json.loads(call.arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {}


def _make_tool_use(call: ToolCall) -> dict[str, Any]:
    """A call, but for its arguments."""
    identity = make_id("toolu_")
    return {"type": "tool_use", "id": identity, "name": call.name, "caller": {"type": "direct"}}


def write_whole(host: Host, ask: Ask, found: Collected) -> dict[str, Any]:
    """The answer, complete."""
    assert found.end is not None
    content: list[dict[str, Any]] = []
    if found.reasoning:
        content.append({"type": "thinking", "thinking": found.reasoning, "signature": ""})
    if found.content or not (found.calls or found.reasoning):
        content.append({"type": "text", "text": found.content, "citations": None})
    for call in found.calls:
        content.append({**_make_tool_use(call), "input": _read_input(call)})
    return {
        "id": make_id("msg_"),
        "type": "message",
        "role": "assistant",
        "model": host.plan.name,
        "content": content,
        "container": None,
        "stop_details": None,
        **_describe_stop(found.end),
        "usage": _describe_usage(len(ask.prompt_ids), found.end),
    }


class _Stream:
    """Writes what comes as blocks, one after the other."""

    def __init__(self, host: Host, ask: Ask) -> None:
        self._host = host
        self._prompt = len(ask.prompt_ids)
        self._begun = False
        self._block = -1
        self._kind: str | None = None
        """What the open block is."""

    def write(self, event: Delta | Finished) -> Sequence[dict[str, Any]]:
        """The events that something makes."""
        found: list[dict[str, Any]] = []
        if not self._begun:
            self._begun = True
            message: dict[str, Any] = {
                "id": make_id("msg_"),
                "type": "message",
                "role": "assistant",
                "model": self._host.plan.name,
                "content": [],
                "container": None,
                "stop_details": None,
                "stop_reason": None,
                "stop_sequence": None,
                "usage": _describe_usage(self._prompt, None),
            }
            found += [{"type": "message_start", "message": message}, {"type": "ping"}]
        if isinstance(event, Finished):
            if self._block < 0:
                self._open(found, "text", {"type": "text", "text": "", "citations": None})
            self._close(found)
            usage = _describe_usage(self._prompt, event)
            delta = _describe_stop(event)
            found.append({"type": "message_delta", "delta": delta, "usage": usage})
            found.append({"type": "message_stop"})
            return found
        for item in event.items:
            self._write_item(found, item)
        return found

    def _write_item(self, found: list[dict[str, Any]], item: Fragment | ToolCall) -> None:
        if isinstance(item, ToolCall):
            self._close(found)
            self._open(found, "tool_use", {**_make_tool_use(item), "input": {}})
            text = json.dumps(_read_input(item), ensure_ascii=False)
            self._write_delta(found, {"type": "input_json_delta", "partial_json": text})
            self._close(found)
        elif item.part == "reasoning":
            self._open(found, "thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._write_delta(found, {"type": "thinking_delta", "thinking": item.text})
        else:
            self._open(found, "text", {"type": "text", "text": "", "citations": None})
            self._write_delta(found, {"type": "text_delta", "text": item.text})

    def _open(self, found: list[dict[str, Any]], kind: str, block: dict[str, Any]) -> None:
        """Begin a block, unless one of its kind is open."""
        if self._kind == kind:
            return
        self._close(found)
        self._block += 1
        self._kind = kind
        found.append({"type": "content_block_start", "index": self._block, "content_block": block})

    def _write_delta(self, found: list[dict[str, Any]], delta: dict[str, Any]) -> None:
        found.append({"type": "content_block_delta", "index": self._block, "delta": delta})

    def _close(self, found: list[dict[str, Any]]) -> None:
        if self._kind is not None:
            self._kind = None
            found.append({"type": "content_block_stop", "index": self._block})


def require_version(request: Request) -> None:
    """ApiError 400 where a client of this interface does not say which version it speaks."""
    if "anthropic-version" not in request.headers:
        raise ApiError(400, "anthropic-version: header is required")
