"""``/v1/responses``, without memory: every request has the whole conversation."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from pi2.serving.answer_reader import Fragment
from pi2.serving.calls import Ask, Collected, Delta, Finished, collect, generate, prepare_chat
from pi2.serving.conversation import ANY_OBJECT, Conversation, join_text, make_call
from pi2.serving.errors import ApiError
from pi2.serving.host import Host, list_arguments
from pi2.serving.openai_schema import Body, FunctionTool, ObjectFormat, Text, TextFormat, Tolerant
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

_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")


class ResponseTool(FunctionTool):
    """A function, its parts not wrapped."""

    type: Literal["function"]


class ResponseSchema(Tolerant):
    """JSON of a schema."""

    type: Literal["json_schema"]
    name: str
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None
    description: str | None = None


class TextSettings(Tolerant):
    """What text is answered."""

    format: (
        Annotated[TextFormat | ObjectFormat | ResponseSchema, Field(discriminator="type")] | None
    ) = None
    verbosity: str | None = None


class Reasoning(Tolerant):
    """How much the model reasons."""

    effort: str | None = None
    summary: str | None = None


class ToolName(Tolerant):
    """The tool that must be called."""

    type: Literal["function"]
    name: str


class ResponsesRequest(Body):
    """A request."""

    input: Text | list[dict[str, Any]]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolName | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: list[str] | None = None
    top_logprobs: Literal[0] | None = None
    previous_response_id: None = None
    conversation: None = None
    background: Literal[False] | None = None
    prompt_cache_retention: Any = None
    max_tool_calls: Any = None


def read_items(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The conversation's messages, as templates read them."""
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
    """The conversation that a body states."""
    schema: Mapping[str, Any] | None = None
    if body.text is not None and isinstance(body.text.format, ObjectFormat):
        schema = ANY_OBJECT
    elif body.text is not None and isinstance(body.text.format, ResponseSchema):
        schema = body.text.format.schema_ or ANY_OBJECT
    variables: dict[str, Any] = {}
    if body.reasoning is not None and body.reasoning.effort is not None:
        effort = body.reasoning.effort
        variables = {
            "reasoning_effort": effort,
            "enable_thinking": effort not in ("none", "minimal"),
        }
    choice = body.tool_choice
    return Conversation(
        messages=read_items(body),
        tools=[tool.model_dump(exclude_none=True, exclude={"type"}) for tool in body.tools or ()],
        tool_choice="auto" if choice is None or isinstance(choice, ToolName) else choice,
        named_tool=choice.name if isinstance(choice, ToolName) else None,
        parallel_calls=body.parallel_tool_calls is not False,
        variables=variables,
        json_schema=schema,
    )


async def answer_responses(request: Request, service: Service) -> Response:
    """Answer a conversation."""
    body = await parse_body(request, service, ResponsesRequest)
    conversation = read_conversation(body)
    async with AsyncExitStack() as stack:
        host, limits = await stack.enter_async_context(use_model(request, service, body.model))
        sampling = {"temperature": body.temperature, "top_p": body.top_p}
        ask = await prepare_chat(
            host,
            conversation,
            {
                "client": find_client(request),
                "max_tokens": body.max_output_tokens,
                "sampling": list_arguments(sampling),
            },
        )
        note_use(request, model=host.plan.name, prompt_tokens=len(ask.prompt_ids))
        events = generate(host, ask, limits, service.metrics)
        writer = _Writer(host, body, ask)
        if not body.stream:
            found = (await wait_for_client(request, collect(events, 1)))[0]
            assert found.end is not None
            note_use(request, completion_tokens=found.end.tokens)
            return JsonResponse(writer.write_whole(found))
        kept = stack.pop_all()
        written = stream_typed(request, writer.write_events, events, kept)
        return await stream_events(request, written, count=writer.count)


class _Writer:
    """Writes what comes of a request as items."""

    def __init__(self, host: Host, body: ResponsesRequest, ask: Ask) -> None:
        self._ask = ask
        self._number = -1
        self._begun = False
        self._output: list[dict[str, Any]] = []
        """Items that are complete."""
        self._open: dict[str, Any] | None = None
        self._text = ""
        sampling = host.model.plan.plan.sampling
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
            "temperature": sampling.temperature if body.temperature is None else body.temperature,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "top_logprobs": 0,
            "text": (
                {"format": {"type": "text"}}
                if body.text is None or body.text.format is None
                else {"format": body.text.format.model_dump(by_alias=True, exclude_none=True)}
            ),
            "tool_choice": (
                body.tool_choice.model_dump()
                if isinstance(body.tool_choice, ToolName)
                else body.tool_choice or "auto"
            ),
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_p": sampling.top_p if body.top_p is None else body.top_p,
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
        """The number of the next event."""
        self._number += 1
        return self._number

    def write_whole(self, found: Collected) -> dict[str, Any]:
        """The answer, complete."""
        assert found.end is not None
        if found.reasoning:
            self._output.append(_make_reasoning(found.reasoning))
        if found.content or not (found.calls or found.reasoning):
            self._output.append(_make_message(found.content))
        self._output += [_make_function_call(call) for call in found.calls]
        return self._write_response(found.end)

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
        prompt = len(self._ask.prompt_ids)
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

    def write_events(self, event: Delta | Finished) -> list[dict[str, Any]]:
        """The events that something makes."""
        found: list[dict[str, Any]] = []
        if not self._begun:
            self._begun = True
            for kind in ("created", "in_progress"):
                self._add(found, f"response.{kind}", response=self._write_response(None))
        if isinstance(event, Finished):
            if not self._output and self._open is None:
                self._begin(found, "message")
            self._end(found)
            response = self._write_response(event)
            self._add(found, f"response.{response['status']}", response=response)
            return found
        for item in event.items:
            if isinstance(item, ToolCall):
                self._write_call(found, item)
            else:
                self._write_text(found, item)
        return found

    def _add(self, found: list[dict[str, Any]], kind: str, **values: Any) -> None:
        found.append({"type": kind, "sequence_number": self.count(), **values})

    @property
    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._output)}

    def _begin(self, found: list[dict[str, Any]], kind: str) -> None:
        """Begin an item, unless one of its kind is open."""
        if self._open is not None and self._open["type"] == kind:
            return
        self._end(found)
        item = _make_message("") if kind == "message" else _make_reasoning("")
        self._open, self._text = item, ""
        shown = {**item, "status": "in_progress", "content": []}
        place = len(self._output)
        self._add(found, "response.output_item.added", output_index=place, item=shown)
        self._add(
            found,
            "response.content_part.added",
            **self._place,
            content_index=0,
            part=item["content"][0],
        )

    def _write_text(self, found: list[dict[str, Any]], item: Fragment) -> None:
        is_message = item.part == "content"
        self._begin(found, "message" if is_message else "reasoning")
        self._text += item.text
        place: dict[str, Any] = {**self._place, "content_index": 0, "delta": item.text}
        if is_message:
            self._add(found, "response.output_text.delta", **place, logprobs=[])
        else:
            self._add(found, "response.reasoning_text.delta", **place)

    def _end(self, found: list[dict[str, Any]]) -> None:
        """End the item that is open."""
        if self._open is None:
            return
        item = self._open
        part = {**item["content"][0], "text": self._text}
        place: dict[str, Any] = {**self._place, "content_index": 0}
        if item["type"] == "message":
            self._add(found, "response.output_text.done", **place, text=self._text, logprobs=[])
        else:
            self._add(found, "response.reasoning_text.done", **place, text=self._text)
        self._add(found, "response.content_part.done", **place, part=part)
        item = {**item, "content": [part]}
        number = len(self._output)
        self._add(found, "response.output_item.done", output_index=number, item=item)
        self._output.append(item)
        self._open = None

    def _write_call(self, found: list[dict[str, Any]], call: ToolCall) -> None:
        self._end(found)
        item = _make_function_call(call)
        self._open = item
        number = len(self._output)
        shown = {**item, "arguments": "", "status": "in_progress"}
        self._add(found, "response.output_item.added", output_index=number, item=shown)
        kind = "response.function_call_arguments"
        self._add(found, f"{kind}.delta", **self._place, delta=call.arguments)
        self._add(found, f"{kind}.done", **self._place, arguments=call.arguments, name=call.name)
        self._add(found, "response.output_item.done", output_index=number, item=item)
        self._open = None
        self._output.append(item)


def _keep_text(value: Any) -> str | None:
    """What is only given back, if it is a text."""
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
