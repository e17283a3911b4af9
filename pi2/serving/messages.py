"""``/v1/messages``, Anthropic's interface."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from pi2.serving.answer_reader import Fragment
from pi2.serving.call_patterns import ToolCall
from pi2.serving.calls import Ask, Collected, Delta, Finished, prepare_chat
from pi2.serving.conversation import (
    Conversation,
    ToolChoice,
    join_text,
    make_call,
    read_format,
    read_object,
    set_effort,
)
from pi2.serving.errors import write_typed_events
from pi2.serving.hosts import Host, list_arguments
from pi2.serving.openai_schema import Body, Count, Text, Tolerant, TopK, find_fields, keep_tools
from pi2.serving.requests import (
    JsonResponse,
    Operation,
    Service,
    Writer,
    answer_with,
    describe_ask,
    make_id,
    use_model,
)


class Message(Tolerant):
    role: Literal["user", "assistant", "system"]
    content: Text | list[dict[str, Any]] | None = None


class Tool(Tolerant):
    """A tool of the client's."""

    fields = find_fields("messages-tool")

    name: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[\w.:-]+$")]
    description: str | None = None
    input_schema: dict[str, Any]


class Choice(Tolerant):
    """Which tool is called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Tolerant):
    """Whether the model reasons."""

    fields = find_fields("messages-thinking")

    type: str


class OutputConfig(Tolerant):
    """The answer, and the amount of reasoning."""

    fields = find_fields("messages-output")

    effort: str | None = None
    format: dict[str, Any] | None = None


class CountRequest(Body):
    """``/v1/messages/count_tokens``."""

    fields = find_fields("counts")

    messages: Annotated[list[Message], Field(min_length=1)]
    system: Text | list[dict[str, Any]] | None = None
    tools: Annotated[list[Tool] | None, keep_tools("custom")] = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None


class MessagesRequest(CountRequest):
    """``/v1/messages``."""

    fields = find_fields("messages")

    max_tokens: Count
    """0 reads the prompt, which later ones go on from."""
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: TopK | None = None


def _read_document(block: Mapping[str, Any]) -> str:
    """The text of a document or of something found; ApiError 400 for anything but text."""
    source = block.get("source")
    content = block.get("content")
    if isinstance(source, Mapping):
        is_text = source.get("type") in ("text", "content")
        content = source.get("data" if source.get("type") == "text" else "content")
        content = content if is_text else [{"type": f"document of {source.get('type')}"}]
    titles = [str(value) for value in (block.get("title"), block.get("context")) if value]
    return "\n".join([*titles, join_text(content)])


def read_messages(body: CountRequest) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if body.system:
        found.append({"role": "system", "content": join_text(body.system, param="system")})
    for message in body.messages:
        if not isinstance(message.content, list):
            found.append({"role": message.role, "content": message.content or ""})
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
            elif kind in ("document", "search_result"):
                texts.append({"type": "text", "text": _read_document(block)})
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
    choices: Mapping[str, ToolChoice] = {"any": "required", "none": "none"}
    choice, config = body.tool_choice, body.output_config
    variables: dict[str, Any] = {}
    if body.thinking is not None:
        variables["enable_thinking"] = body.thinking.type != "disabled"
    set_effort(variables, config.effort if config else None)
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
        named_tool=(choice.name or "") if choice is not None and choice.type == "tool" else None,
        parallel_calls=(
            None
            if choice is None or choice.disable_parallel_tool_use is None
            else not choice.disable_parallel_tool_use
        ),
        variables=variables,
        json_schema=read_format(
            (config.format if config else None) or body.output_format, param="output_config.format"
        ),
    )


async def count_tokens(request: Request, service: Service, body: CountRequest) -> Response:
    async with use_model(request, service, body.model) as (host, _):
        ask = await prepare_chat(host, read_conversation(body), {})
        return JsonResponse({"input_tokens": len(ask.prompt_ids)})


async def prepare(host: Host, body: MessagesRequest, client: str) -> Writer:
    stated = describe_ask(host, body, client, body.max_tokens)
    stated["stop"] = body.stop_sequences or ()
    ask = await prepare_chat(host, read_conversation(body), stated)
    return _MessageWriter(host, ask)


def _describe_stop(end: Finished | None) -> dict[str, Any]:
    if end is None:
        return {"stop_reason": None, "stop_sequence": None}
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


def _make_tool_use(call: ToolCall) -> dict[str, Any]:
    identity = make_id("toolu_")
    return {"type": "tool_use", "id": identity, "name": call.name, "caller": {"type": "direct"}}


class _MessageWriter(Writer):
    def __init__(self, host: Host, ask: Ask) -> None:
        super().__init__(host, [ask])
        self._block = -1
        self._kind: str | None = None
        """What the open block is."""

    def write_whole(self, found: Sequence[Collected]) -> dict[str, Any]:
        (one,) = found
        content: list[dict[str, Any]] = []
        if one.reasoning:
            content.append({"type": "thinking", "thinking": one.reasoning, "signature": ""})
        if one.content or not (one.calls or one.reasoning):
            content.append({"type": "text", "text": one.content, "citations": None})
        for call in one.calls:
            content.append({**_make_tool_use(call), "input": read_object(call.arguments)})
        return self._make_message(content, one.end)

    def _make_message(
        self, content: Sequence[dict[str, Any]], end: Finished | None
    ) -> dict[str, Any]:
        return {
            "id": make_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": self.host.plan.name,
            "content": content,
            "container": None,
            "stop_details": None,
            **_describe_stop(end),
            "usage": _describe_usage(self.prompt_tokens, end),
        }

    def write_start(self) -> bytes:
        message = self._make_message([], None)
        return write_typed_events([{"type": "message_start", "message": message}]) + (
            self.write_ping()
        )

    def write_ping(self) -> bytes:
        return write_typed_events([{"type": "ping"}])

    def write_event(self, event: Delta | Finished) -> bytes:
        found: list[dict[str, Any]] = []
        if isinstance(event, Finished):
            if self._block < 0:
                self._open(found, "text", {"type": "text", "text": "", "citations": None})
            self._close(found)
            usage = _describe_usage(self.prompt_tokens, event)
            delta = _describe_stop(event)
            found.append({"type": "message_delta", "delta": delta, "usage": usage})
            found.append({"type": "message_stop"})
        else:
            for item in event.items:
                self._write_item(found, item)
        return write_typed_events(found)

    def _write_item(self, found: list[dict[str, Any]], item: Fragment | ToolCall) -> None:
        if isinstance(item, ToolCall):
            self._close(found)
            self._open(found, "tool_use", {**_make_tool_use(item), "input": {}})
            text = json.dumps(read_object(item.arguments), ensure_ascii=False)
            self._write_delta(found, {"type": "input_json_delta", "partial_json": text})
            self._close(found)
        elif item.part == "reasoning":
            self._open(found, "thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._write_delta(found, {"type": "thinking_delta", "thinking": item.text})
        else:
            self._open(found, "text", {"type": "text", "text": "", "citations": None})
            self._write_delta(found, {"type": "text_delta", "text": item.text})

    def _open(self, found: list[dict[str, Any]], kind: str, block: dict[str, Any]) -> None:
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


MESSAGES = Operation(
    "/v1/messages",
    MessagesRequest,
    "Answer a conversation (Anthropic).",
    answer_with(prepare),
    "chat",
)
COUNT_TOKENS = Operation(
    "/v1/messages/count_tokens", CountRequest, "Count a conversation's tokens.", count_tokens
)
