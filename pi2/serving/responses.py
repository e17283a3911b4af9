"""``/v1/responses``, without memory: every request has the whole conversation."""

import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from pi2.serving.call_patterns import ToolCall
from pi2.serving.calls import Ask, Collected, Delta, Finished, prepare_chat
from pi2.serving.conversation import (
    Conversation,
    join_text,
    make_call,
    read_choice,
    read_format,
    set_effort,
)
from pi2.serving.errors import ApiError, write_typed_events
from pi2.serving.hosts import Host
from pi2.serving.openai_schema import (
    Body,
    Count,
    FunctionTool,
    Reasoning,
    Text,
    Tolerant,
    find_fields,
    keep_tools,
)
from pi2.serving.requests import Operation, Writer, answer_with, describe_ask, make_id

_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")


class ResponseTool(FunctionTool):
    """A function, its parts not wrapped."""

    type: Literal["function"] = "function"


class TextSettings(Tolerant):
    """What text is answered."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesRequest(Body):
    fields = find_fields("responses")

    input: Text | list[dict[str, Any]]
    instructions: Text | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stream: bool | None = None
    tools: Annotated[list[ResponseTool] | None, keep_tools("function")] = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: list[str] | None = None
    metadata: Any = None
    """Given back, as are the three that follow."""
    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None


def read_items(body: ResponsesRequest) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if body.instructions:
        found.append({"role": "system", "content": body.instructions})
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    thoughts = ""
    for number, item in enumerate(items):
        place = f"input[{number}]"
        kind = item.get("type", "message")
        if kind == "message":
            role = item.get("role")
            if role not in ("system", "developer", "user", "assistant"):
                raise ApiError(400, f"Invalid value: {role!r}.", param=f"{place}.role")
            message = {
                "role": "system" if role == "developer" else role,
                "content": join_text(item.get("content"), param=place, kinds=_TEXTS),
            }
            if thoughts and role == "assistant":
                message["reasoning_content"] = thoughts
            thoughts = ""
            found.append(message)
        elif kind == "function_call":
            call = make_call(
                str(item.get("call_id")), str(item.get("name")), item.get("arguments", "{}")
            )
            last = found[-1] if found else {}
            if last.get("role") == "assistant":
                last.setdefault("tool_calls", []).append(call)
            else:
                found.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif kind == "function_call_output":
            text = join_text(item.get("output"), param=place, kinds=_TEXTS)
            identity = str(item.get("call_id"))
            found.append({"role": "tool", "content": text, "tool_call_id": identity})
        elif kind == "reasoning":
            thoughts = join_text(item.get("content") or [], param=place, kinds=_TEXTS)
        else:
            raise ApiError(400, f"Items of type {kind!r} are not supported.", param=f"{place}.type")
    if not found:
        raise ApiError(400, "The input is empty.", param="input")
    return found


def read_conversation(body: ResponsesRequest) -> Conversation:
    if "message.output_text.logprobs" in (body.include or ()):
        message = "Log probabilities are given by chats and completions, not by responses."
        raise ApiError(400, message, param="include", code="unsupported_parameter")
    variables: dict[str, Any] = {}
    set_effort(variables, body.reasoning.effort if body.reasoning else None)
    if body.text is not None and body.text.verbosity is not None:
        variables["verbosity"] = body.text.verbosity
    tools = [tool.model_dump(exclude_none=True, exclude={"type"}) for tool in body.tools or ()]
    return Conversation(
        messages=read_items(body),
        **read_choice(body.tool_choice, tools),
        parallel_calls=body.parallel_tool_calls,
        variables=variables,
        json_schema=read_format(body.text.format if body.text else None, param="text.format"),
    )


async def prepare(host: Host, body: ResponsesRequest, client: str) -> Writer:
    stated = describe_ask(host, body, client, body.max_output_tokens)
    ask = await prepare_chat(host, read_conversation(body), stated)
    return _ResponseWriter(host, body, ask)


class _ResponseWriter(Writer):
    def __init__(self, host: Host, body: ResponsesRequest, ask: Ask) -> None:
        super().__init__(host, [ask])
        self._events: list[dict[str, Any]] = []
        """Events to send next."""
        self._number = -1
        self._output: list[dict[str, Any]] = []
        """Items that are complete."""
        self._open: dict[str, Any] | None = None
        self._text = ""
        sampling = host.model.chat_sampling
        self._head = {
            "id": make_id("resp_"),
            "object": "response",
            "created_at": int(time.time()),
            "error": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": host.plan.name,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {
                "effort": body.reasoning.effort if body.reasoning else None,
                "summary": None,
            },
            "max_tool_calls": None,
            "store": False,
            "temperature": sampling["temperature"]
            if body.temperature is None
            else body.temperature,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "top_logprobs": 0,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_p": sampling["top_p"] if body.top_p is None else body.top_p,
            "truncation": body.truncation or "disabled",
            "background": False,
            "service_tier": "default",
            "completed_at": None,
            "metadata": body.metadata if isinstance(body.metadata, dict) else {},
            "user": _keep_text(body.user),
            "safety_identifier": _keep_text(body.safety_identifier),
            "prompt_cache_key": _keep_text(body.prompt_cache_key),
        }

    def count(self) -> int:
        self._number += 1
        return self._number

    def write_whole(self, found: Sequence[Collected]) -> dict[str, Any]:
        (one,) = found
        if one.reasoning:
            self._output.append(_make_reasoning(one.reasoning))
        if one.content or not (one.calls or one.reasoning):
            self._output.append(_make_message(one.content))
        self._output += [_make_function_call(call) for call in one.calls]
        return self._write_response(one.end)

    def _write_response(self, end: Finished | None) -> dict[str, Any]:
        if end is None:
            return {
                **self._head,
                "status": "in_progress",
                "incomplete_details": None,
                "output": [],
                "usage": None,
            }
        is_whole = end.reason != "length"
        prompt = self.prompt_tokens
        return {
            **self._head,
            "status": "completed" if is_whole else "incomplete",
            "completed_at": int(time.time()) if is_whole else None,
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "output": self._output,
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": end.reused_tokens},
                "output_tokens": end.tokens,
                "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
                "total_tokens": prompt + end.tokens,
            },
        }

    def write_start(self) -> bytes:
        for kind in ("created", "in_progress"):
            self._add(f"response.{kind}", response=self._write_response(None))
        return self._send()

    def write_event(self, event: Delta | Finished) -> bytes:
        if isinstance(event, Finished):
            if not self._output and self._open is None:
                self._begin("message")
            self._end()
            response = self._write_response(event)
            self._add(f"response.{response['status']}", response=response)
            return self._send()
        for item in event.items:
            if isinstance(item, ToolCall):
                self._add_call(item)
                continue
            self._begin("message" if item.part == "content" else "reasoning")
            self._text += item.text
            self._add_text("delta", delta=item.text)
        return self._send()

    def _send(self) -> bytes:
        events, self._events = self._events, []
        return write_typed_events(events)

    def _add(self, kind: str, **values: Any) -> None:
        self._events.append({"type": kind, "sequence_number": self.count(), **values})

    @property
    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._output)}

    def _show(self, item: dict[str, Any], **begun: Any) -> None:
        """Open an item that has as yet what ``begun`` says."""
        self._open, self._text = item, ""
        shown = {**item, **begun, "status": "in_progress"}
        self._add("response.output_item.added", output_index=len(self._output), item=shown)

    def _keep(self, item: dict[str, Any]) -> None:
        """Close an item that is complete."""
        self._add("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._open = None

    def _begin(self, kind: str) -> None:
        if self._open is not None and self._open["type"] == kind:
            return
        self._end()
        item = _make_message("") if kind == "message" else _make_reasoning("")
        self._show(item, content=[])
        part = item["content"][0]
        self._add("response.content_part.added", **self._place, content_index=0, part=part)

    def _add_text(self, stage: str, **values: str) -> None:
        assert self._open is not None
        place = {**self._place, "content_index": 0, **values}
        if self._open["type"] == "message":
            self._add(f"response.output_text.{stage}", **place, logprobs=[])
        else:
            self._add(f"response.reasoning_text.{stage}", **place)

    def _end(self) -> None:
        if self._open is None:
            return
        part = {**self._open["content"][0], "text": self._text}
        self._add_text("done", text=self._text)
        self._add("response.content_part.done", **self._place, content_index=0, part=part)
        self._keep({**self._open, "content": [part]})

    def _add_call(self, call: ToolCall) -> None:
        self._end()
        item = _make_function_call(call)
        self._show(item, arguments="")
        kind = "response.function_call_arguments"
        self._add(f"{kind}.delta", **self._place, delta=call.arguments)
        self._add(f"{kind}.done", **self._place, arguments=call.arguments, name=call.name)
        self._keep(item)


def _keep_text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _make_message(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {
        "id": make_id("msg_"),
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }


def _make_reasoning(text: str) -> dict[str, Any]:
    return {
        "id": make_id("rs_"),
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
    }


def _make_function_call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": make_id("fc_"),
        "type": "function_call",
        "call_id": make_id("call_"),
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }


RESPONSES = Operation(
    "/v1/responses",
    ResponsesRequest,
    "Answer a conversation, item by item.",
    answer_with(prepare),
    "chat",
)
