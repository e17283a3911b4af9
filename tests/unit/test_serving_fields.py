"""Fields of requests, as clients that others wrote have them: each is used, ignored or refused."""

from __future__ import annotations

import typing
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from pi2.serving import messages, ollama, openai_schema, responses
from pi2.serving.errors import ApiError
from pi2.serving.openai_schema import Tolerant

MESSAGE = {"role": "user", "content": "hi"}
BODIES: dict[type[Tolerant], dict[str, Any]] = {
    openai_schema.ChatRequest: {"model": "m", "messages": [MESSAGE]},
    openai_schema.CompletionRequest: {"model": "m", "prompt": "hi"},
    openai_schema.EmbeddingRequest: {"model": "m", "input": "hi"},
    responses.ResponsesRequest: {"model": "m", "input": "hi"},
    messages.MessagesRequest: {"model": "m", "messages": [MESSAGE], "max_tokens": 1},
    messages.CountRequest: {"model": "m", "messages": [MESSAGE]},
    ollama.ChatRequest: {"model": "m", "messages": [MESSAGE]},
    ollama.GenerateRequest: {"model": "m", "prompt": "hi"},
    ollama.Options: {},
}


def list_openai() -> list[tuple[type[Tolerant], Any]]:
    pytest.importorskip("openai", reason="needs OpenAI's client")
    from openai.types import completion_create_params, embedding_create_params
    from openai.types.chat import completion_create_params as chat
    from openai.types.responses import response_create_params

    return [
        (openai_schema.ChatRequest, chat.CompletionCreateParamsBase),
        (openai_schema.CompletionRequest, completion_create_params.CompletionCreateParamsBase),
        (openai_schema.EmbeddingRequest, embedding_create_params.EmbeddingCreateParams),
        (responses.ResponsesRequest, response_create_params.ResponseCreateParamsBase),
    ]


def list_anthropic() -> list[tuple[type[Tolerant], Any]]:
    pytest.importorskip("anthropic", reason="needs Anthropic's client")
    from anthropic.types import MessageCountTokensParams, beta, message_create_params
    from anthropic.types.beta import message_create_params as beta_create_params

    return [
        (messages.MessagesRequest, message_create_params.MessageCreateParamsBase),
        (messages.MessagesRequest, beta_create_params.MessageCreateParamsBase),
        (messages.CountRequest, MessageCountTokensParams),
        (messages.CountRequest, beta.MessageCountTokensParams),
    ]


def list_ollama() -> list[tuple[type[Tolerant], Any]]:
    client = pytest.importorskip("ollama", reason="needs Ollama's client")
    kinds = client._types
    return [
        (ollama.ChatRequest, kinds.ChatRequest),
        (ollama.GenerateRequest, kinds.GenerateRequest),
        (ollama.Options, kinds.Options),
    ]


def list_names(kind: type[BaseModel]) -> set[str]:
    """Names under which a body has its own fields."""
    names = set()
    for name, field in kind.model_fields.items():
        names |= {name, str(field.alias or name)}
    return names


@pytest.mark.parametrize("listed", [list_openai, list_anthropic, list_ollama])
def test_every_field_of_a_client_is_used_ignored_or_refused(listed: Any) -> None:
    for own, theirs in listed():
        known = list_names(own) | set(own.fields.ignored) | set(own.fields.refused)
        missing = set(typing.get_type_hints(theirs)) - known
        assert not missing, f"{own.__name__}: use, ignore or refuse {sorted(missing)}"


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_what_would_change_the_answer_is_refused_by_its_name(kind: type[Tolerant]) -> None:
    body = BODIES[kind]
    assert not set(kind.fields.ignored) & set(kind.fields.refused)
    assert not list_names(kind) & (set(kind.fields.ignored) | set(kind.fields.refused))
    kind.model_validate({**body, **{key: {"any": "thing"} for key in kind.fields.ignored}})
    for name, harmless in kind.fields.refused.items():
        for value in (None, *harmless):
            kind.model_validate({**body, name: value})
        with pytest.raises(ApiError) as refused:
            kind.model_validate({**body, name: "surprise"})
        assert refused.value.status == 400 and str(refused.value.param).endswith(name)


@pytest.mark.parametrize("kind", [kind for kind in BODIES if kind.__module__ != ollama.__name__])
def test_what_nobody_knows_is_refused(kind: type[Tolerant]) -> None:
    with pytest.raises(ValidationError, match="surprise"):
        kind.model_validate({**BODIES[kind], "surprise": 1})


def test_tools_that_run_elsewhere_are_left_out() -> None:
    function = {"name": "f", "parameters": {"type": "object"}}
    own = {"type": "function", "function": function}
    for kind in ("custom", "web_search", "mcp", "namespace"):
        chat = openai_schema.ChatRequest.model_validate(
            {**BODIES[openai_schema.ChatRequest], "tools": [{"type": kind, kind: {}}, own]}
        )
        assert [tool.function.name for tool in chat.tools or ()] == ["f"]
        response = responses.ResponsesRequest.model_validate(
            {"model": "m", "input": "", "tools": [{"type": kind}, {"type": "function", **function}]}
        )
        assert [tool.name for tool in response.tools or ()] == ["f"]
    for kind in (
        "web_search_20250305",
        "code_execution_20250825",
        "computer_20251124",
        "mcp_toolset",
    ):
        message = messages.CountRequest.model_validate(
            {
                **BODIES[messages.CountRequest],
                "tools": [{"type": kind, "name": kind}, {"name": "f", "input_schema": {}}],
            }
        )
        assert [tool.name for tool in message.tools or ()] == ["f"]


def test_the_interface_describes_every_body() -> None:
    from pi2.serving.openapi import OPERATIONS, describe_interface

    found = describe_interface()
    for operation in OPERATIONS:
        assert operation.path in found["paths"]
        TypeAdapter(operation.body)
