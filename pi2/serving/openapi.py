"""The OpenAPI description of the server, out of the classes that check bodies."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

from pi2.serving import ollama
from pi2.serving.chat import CHAT
from pi2.serving.completions import COMPLETIONS
from pi2.serving.dialects import Operation
from pi2.serving.embeddings import EMBEDDINGS
from pi2.serving.messages import COUNT_TOKENS, MESSAGES
from pi2.serving.ollama_models import SHOW
from pi2.serving.responses import RESPONSES
from pi2.serving.tokens import DETOKENIZE, TOKENIZE

OPERATIONS: tuple[Operation[Any], ...] = (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    RESPONSES,
    MESSAGES,
    COUNT_TOKENS,
    TOKENIZE,
    DETOKENIZE,
    *ollama.OPERATIONS,
    SHOW,
)
"""What clients can post."""
_GETS = {
    "/health": "Whether the server is there.",
    "/metrics": "Numbers for Prometheus.",
    "/v1/models": "The served plans.",
    "/api/tags": "The served plans (Ollama).",
    "/api/ps": "The models in memory (Ollama).",
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
    kinds = [(operation.body, "validation") for operation in OPERATIONS]
    refs, definitions = models_json_schema(
        kinds,  # type: ignore[arg-type]
        ref_template="#/components/schemas/{model}",
    )
    refused = {status: {"description": text} for status, text in _REFUSALS.items()}
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        content = {"application/json": {"schema": refs[(operation.body, "validation")]}}
        paths[operation.path] = {
            "post": {
                "summary": operation.summary,
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
