"""``/v1/chat/completions``."""

from collections.abc import Mapping, Sequence
from typing import Any

from pi2.serving.answer_reader import Fragment
from pi2.serving.call_patterns import ToolCall
from pi2.serving.calls import Ask, Collected, Delta, Finished, prepare_chat
from pi2.serving.completions import ChunkWriter, describe_chat_scores
from pi2.serving.conversation import (
    Conversation,
    join_text,
    make_call,
    read_choice,
    read_format,
    set_effort,
)
from pi2.serving.errors import ApiError
from pi2.serving.hosts import Host
from pi2.serving.openai_schema import CalledTool, ChatMessage, ChatRequest
from pi2.serving.requests import (
    Operation,
    Writer,
    answer_with,
    describe_ask,
    describe_usage,
    make_id,
)


def read_calls(calls: Sequence[CalledTool]) -> list[dict[str, Any]]:
    return [
        make_call(call.id or f"call_{number}", call.function.name, call.function.arguments)
        for number, call in enumerate(calls)
    ]


def read_message(message: ChatMessage) -> dict[str, Any]:
    roles = {"developer": "system", "function": "tool"}
    found: dict[str, Any] = {
        "role": roles.get(message.role, message.role),
        "content": join_text(message.content, kinds=("text", "refusal")),
    }
    for key in ("name", "reasoning_content", "tool_call_id"):
        if (value := getattr(message, key)) is not None:
            found[key] = value
    calls = read_calls(message.tool_calls or ())
    if message.function_call is not None:
        calls.append(
            make_call("call_0", message.function_call.name, message.function_call.arguments)
        )
    if calls:
        found["tool_calls"] = calls
    return found


def read_conversation(body: ChatRequest) -> Conversation:
    variables = dict(body.chat_template_kwargs or {})
    if body.enable_thinking is not None:
        variables.setdefault("enable_thinking", body.enable_thinking)
    if body.thinking is not None and body.thinking.type is not None:
        variables.setdefault("enable_thinking", body.thinking.type != "disabled")
    other_effort = body.reasoning.effort if body.reasoning else None
    set_effort(variables, body.reasoning_effort or other_effort)
    if body.verbosity is not None:
        variables.setdefault("verbosity", body.verbosity)
    tools = [tool.function.model_dump(exclude_none=True) for tool in body.tools or ()]
    found = Conversation(
        messages=[read_message(message) for message in body.messages],
        **read_choice(body.tool_choice, tools),
        parallel_calls=body.parallel_tool_calls,
        variables=variables,
        json_schema=read_format(body.response_format),
        continues=body.continue_final_message,
    )
    if body.add_generation_prompt is False and not found.is_open:
        message = "'add_generation_prompt' may be false where the answer continues a message."
        raise ApiError(400, message, param="add_generation_prompt")
    return found


async def prepare(host: Host, body: ChatRequest, client: str) -> Writer:
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    stated = {
        **describe_ask(host, body, client, most),
        "count": body.n or 1,
        "alternatives": (body.top_logprobs or 0) if body.logprobs else None,
    }
    ask = await prepare_chat(host, read_conversation(body), stated)
    return _ChatWriter(host, body, ask)


class _ChatWriter(ChunkWriter):
    kind = "chat.completion.chunk"

    def __init__(self, host: Host, body: ChatRequest, ask: Ask) -> None:
        super().__init__(host, [ask], body, "chatcmpl-")
        self._scored = bool(body.logprobs)
        self._begun: set[int] = set()
        self._calls = [0] * ask.count

    def write_whole(self, found: Sequence[Collected]) -> dict[str, Any]:
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
                message["tool_calls"] = [_make_call(call, call.arguments) for call in item.calls]
            scores = describe_chat_scores(self.host.model, item.scores) if self._scored else None
            choices.append(
                {"index": index, "message": message, "logprobs": scores, **item.end.describe()}
            )
        return {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            "usage": self.describe_usage(),
        }

    def write_event(self, event: Delta | Finished) -> bytes:
        chunks, index = [], event.index
        if index not in self._begun:
            self._begun.add(index)
            chunks.append(self._write_delta(index, {"role": "assistant", "content": ""}))
        if isinstance(event, Finished):
            return b"".join([*chunks, self._write_delta(index, {}, end=event.describe())])
        deltas = [delta for item in event.items for delta in self._write_deltas(index, item)]
        if self._scored and event.scores:
            deltas = deltas or [{"content": ""}]
            scores = describe_chat_scores(self.host.model, event.scores)
            chunks.append(self._write_delta(index, deltas[0], scores=scores))
            deltas = deltas[1:]
        return b"".join([*chunks, *(self._write_delta(index, delta) for delta in deltas)])

    def _write_deltas(self, index: int, item: Fragment | ToolCall) -> list[dict[str, Any]]:
        if isinstance(item, Fragment):
            key = "content" if item.part == "content" else "reasoning_content"
            return [{key: item.text}]
        number = self._calls[index]
        self._calls[index] += 1
        return [
            {"tool_calls": [{"index": number, **_make_call(item, "")}]},
            {"tool_calls": [{"index": number, "function": {"arguments": item.arguments}}]},
        ]

    def _write_delta(
        self,
        index: int,
        delta: Mapping[str, Any],
        *,
        scores: Mapping[str, Any] | None = None,
        end: Mapping[str, Any] | None = None,
    ) -> bytes:
        end = end or {"finish_reason": None}
        return self.write_chunk({"index": index, "delta": delta, "logprobs": scores, **end})

    def describe_usage(self) -> Mapping[str, Any]:
        """Of the sequences, one has read the prompt; the others begin where it has ended."""
        return describe_usage(
            self.prompt_tokens,
            self.tokens,
            max((end.reused_tokens for end in self.ends), default=0),
            sum(end.reasoning_tokens for end in self.ends),
        )


def _make_call(call: ToolCall, arguments: str) -> dict[str, Any]:
    function = {"name": call.name, "arguments": arguments}
    return {"id": make_id("call_"), "type": "function", "function": function}


CHAT = Operation(
    "/v1/chat/completions", ChatRequest, "Answer a conversation.", answer_with(prepare), "chat"
)
