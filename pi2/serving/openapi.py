"""The OpenAPI description of the server, out of the classes that check bodies."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from pi2.serving import messages, ollama, responses
from pi2.serving.openai_schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)

_POSTS: dict[str, tuple[type[BaseModel], str]] = {
    "/v1/chat/completions": (ChatRequest, "Answer a conversation."),
    "/v1/completions": (CompletionRequest, "Continue a prompt."),
    "/v1/embeddings": (EmbeddingRequest, "Embed texts."),
    "/v1/responses": (responses.ResponsesRequest, "Answer a conversation, item by item."),
    "/v1/messages": (messages.MessagesRequest, "Answer a conversation (Anthropic)."),
    "/v1/messages/count_tokens": (messages.CountRequest, "Count a conversation's tokens."),
    "/tokenize": (TokenizeRequest, "Token ids of a text or a conversation."),
    "/detokenize": (DetokenizeRequest, "The text of token ids."),
    "/api/chat": (ollama.ChatRequest, "Answer a conversation (Ollama)."),
}
_GETS = {
    "/health": "Whether the server is there.",
    "/metrics": "Numbers for Prometheus.",
    "/v1/models": "The served plans.",
    "/api/tags": "The served plans (Ollama).",
    "/api/version": "Version of Ollama's interface.",
    "/api/state": "What models do, and what memory they have.",
}
_REFUSALS = {
    "400": "The request cannot be answered.",
    "401": "The key is missing or wrong.",
    "404": "There is no such model.",
    "408": "The body did not come in time.",
    "413": "The body is too large.",
    "429": "Too many requests wait; Retry-After says when to come again.",
    "500": "The server has failed.",
    "503": "There is no memory for the model now.",
    "504": "The answer took too long.",
}


@cache
def describe_interface() -> dict[str, Any]:
    """The description."""
    kinds = [(kind, "validation") for kind, _ in _POSTS.values()]
    refs, definitions = models_json_schema(
        kinds,  # type: ignore[arg-type]
        ref_template="#/components/schemas/{model}",
    )
    refused = {status: {"description": text} for status, text in _REFUSALS.items()}
    paths: dict[str, Any] = {}
    for path, (kind, text) in _POSTS.items():
        content = {"application/json": {"schema": refs[(kind, "validation")]}}
        paths[path] = {
            "post": {
                "summary": text,
                "requestBody": {"required": True, "content": content},
                "responses": {"200": {"description": "The answer."}, **refused},
            }
        }
    for path, text in _GETS.items():
        refusals = {"401": refused["401"]}
        paths[path] = {
            "get": {"summary": text, "responses": {"200": {"description": text}, **refusals}}
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "pi2", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }
