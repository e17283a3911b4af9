"""``/api/chat``, ``/api/tags`` and ``/api/version``: what Ollama's clients need to talk."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from pi2.serving.calls import Collected, Delta, Finished, collect, generate, prepare_chat
from pi2.serving.conversation import ANY_OBJECT, Conversation, make_call
from pi2.serving.errors import ApiError
from pi2.serving.host import Host, list_arguments
from pi2.serving.openai_schema import Text, Tolerant, Tool
from pi2.serving.requests import (
    JsonResponse,
    Service,
    find_client,
    list_stops,
    note_use,
    parse_body,
    stream_events,
    use_model,
    wait_for_client,
)
from pi2.serving.sse import dump_json

VERSION = "0.9.0"
"""Version of Ollama's interface that this is."""


class Function(Tolerant):
    """A call in an earlier message."""

    name: str
    arguments: dict[str, Any] = {}


class Call(Tolerant):
    """A call in an earlier message."""

    function: Function


class Message(Tolerant):
    """A message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text = ""
    thinking: str | None = None
    tool_calls: list[Call] | None = None
    tool_name: str | None = None


class Options(Tolerant):
    """How tokens are drawn."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    num_predict: int | None = None
    stop: str | list[str] | None = None


class ChatRequest(BaseModel):
    """A chat; what is unknown is ignored, as Ollama does."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)

    model: Text
    messages: Annotated[list[Message], Field(min_length=1)]
    stream: bool = True
    options: Options | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    tools: list[Tool] | None = None
    think: bool | str | None = None


def _strip_tag(name: str) -> str:
    return name.removesuffix(":latest")


async def answer_chat(request: Request, service: Service) -> Response:
    """Answer a chat."""
    body = await parse_body(request, service, ChatRequest)
    options = body.options or Options()
    messages = []
    for message in body.messages:
        found: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.tool_calls:
            found["tool_calls"] = [
                make_call(f"call_{number}", call.function.name, call.function.arguments)
                for number, call in enumerate(message.tool_calls)
            ]
        if message.tool_name:
            found["name"] = message.tool_name
        messages.append(found)
    conversation = Conversation(
        messages=messages,
        tools=[tool.function.model_dump(exclude_none=True) for tool in body.tools or ()],
        json_schema=(ANY_OBJECT if body.format == "json" else body.format or None),
        variables={} if body.think is None else {"enable_thinking": bool(body.think)},
    )
    sampling = {
        name: getattr(options, name)
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
        )
    }
    sampling |= {
        "repetition_penalty": options.repeat_penalty,
        "seed": None if options.seed is None else options.seed % 2**63,
    }
    most = options.num_predict
    async with AsyncExitStack() as stack:
        host, limits = await stack.enter_async_context(
            use_model(request, service, _strip_tag(body.model))
        )
        ask = await prepare_chat(
            host,
            conversation,
            {
                "client": find_client(request),
                "max_tokens": most if most is not None and most > 0 else None,
                "stop": list_stops(options.stop),
                "sampling": list_arguments(sampling),
            },
        )
        note_use(request, model=host.plan.name, prompt_tokens=len(ask.prompt_ids))
        start = time.perf_counter_ns()
        events = generate(host, ask, limits, service.metrics)
        if not body.stream:
            whole = (await wait_for_client(request, collect(events, 1)))[0]
            assert whole.end is not None
            note_use(request, completion_tokens=whole.end.tokens)
            last = _describe_end(whole.end, len(ask.prompt_ids), start)
            return JsonResponse({**_write(body.model, whole), **last})
        kept = stack.pop_all()
        return await stream_events(
            request,
            _stream(request, body.model, events, kept, len(ask.prompt_ids), start),
            media_type="application/x-ndjson",
        )


async def _stream(
    request: Request,
    model: str,
    events: AsyncGenerator[Delta | Finished, None],
    kept: AsyncExitStack,
    prompt: int,
    start: int,
) -> AsyncGenerator[bytes, None]:
    async with kept:
        try:
            async for event in events:
                piece = Collected()
                if isinstance(event, Delta):
                    piece.add(event)
                    yield dump_json({**_write(model, piece), "done": False}) + b"\n"
                else:
                    note_use(request, completion_tokens=event.tokens)
                    last = _describe_end(event, prompt, start)
                    yield dump_json({**_write(model, piece), **last}) + b"\n"
        finally:
            await events.aclose()


def _write(model: str, piece: Collected) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": piece.content}
    if piece.reasoning:
        message["thinking"] = piece.reasoning
    if piece.calls:
        message["tool_calls"] = [
            {"function": {"name": call.name, "arguments": _read(call.arguments)}}
            for call in piece.calls
        ]
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return {"model": model, "created_at": now, "message": message}


def _read(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return {}


def _describe_end(end: Finished, prompt: int, start: int) -> Mapping[str, Any]:
    return {
        "done": True,
        "done_reason": "length" if end.reason == "length" else "stop",
        "total_duration": time.perf_counter_ns() - start,
        "prompt_eval_count": prompt,
        "eval_count": end.tokens,
    }


def list_tags(hosts: Mapping[str, Host]) -> dict[str, Any]:
    """The served plans, as Ollama lists models."""
    return {
        "models": [
            {
                "name": f"{name}:latest",
                "model": f"{name}:latest",
                "modified_at": datetime.fromtimestamp(host.created, UTC).isoformat(),
                "size": host.plan.budget_bytes,
                "digest": "",
                "details": {
                    "format": "pi2",
                    "family": "",
                    "parameter_size": "",
                    "quantization_level": "",
                },
            }
            for name, host in hosts.items()
        ]
    }


def describe_error(error: ApiError) -> dict[str, Any]:
    """An error, as Ollama writes it."""
    return {"error": error.message}
