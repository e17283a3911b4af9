"""The OpenAPI description of the server, out of the classes that check bodies."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic.json_schema import models_json_schema
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pi2.diagnostics import UserError
from pi2.serving import ollama
from pi2.serving.chat import CHAT
from pi2.serving.completions import COMPLETIONS
from pi2.serving.embeddings import DETOKENIZE, EMBEDDINGS, TOKENIZE
from pi2.serving.errors import read_table
from pi2.serving.messages import COUNT_TOKENS, MESSAGES
from pi2.serving.ollama import SHOW
from pi2.serving.requests import NotedSend, Operation
from pi2.serving.responses import RESPONSES

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer


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


@cache
def describe_interface() -> dict[str, Any]:
    kinds = [(operation.body, "validation") for operation in OPERATIONS]
    refs, definitions = models_json_schema(
        kinds,  # type: ignore[arg-type]
        ref_template="#/components/schemas/{model}",
    )
    table = read_table()
    refused = {status: {"description": text} for status, text in table["refusals"].items()}
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
    for path, text in table["gets"].items():
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


_KINDS = {operation.path: operation.kind for operation in OPERATIONS}
"""What paths do, as its conventions call it."""
_QUIET = ("/", "/health", "/metrics", "/api/state")
"""Paths without a span: clients poll them, and they say nothing about models."""
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_EXPORTER = "OTEL_TRACES_EXPORTER"


def make_tracer(environment: Mapping[str, str] | None = None) -> Tracer | None:
    """A tracer for the variables ``OTEL_*``, None without them; UserError P691."""
    values = os.environ if environment is None else environment
    exporter = values.get(_EXPORTER, "otlp" if any(values.get(key) for key in _ENDPOINTS) else "")
    is_off = values.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if is_off or exporter in ("", "none"):
        return None
    if exporter not in ("otlp", "console"):
        raise _refuse(f"{_EXPORTER} is {exporter!r}", "write otlp, console or none")
    protocol = values.get(
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", values.get("OTEL_EXPORTER_OTLP_PROTOCOL", "")
    )
    if exporter == "otlp" and protocol not in ("", "http/protobuf"):
        raise _refuse(f"traces are asked for as {protocol!r}", "write http/protobuf")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import (
            BatchSpanProcessor,
            ConsoleSpanExporter,
            SpanExporter,
        )
    except ImportError as error:
        raise _refuse(
            f"traces need the extra otel: {error.name} is not installed",
            "pip install 'pi2[otel]', or set OTEL_TRACES_EXPORTER=none",
        ) from None
    # What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say comes before the name here.
    named = Resource.create().attributes.get(SERVICE_NAME, "unknown_service")
    own = {SERVICE_NAME: "pi2"} if str(named).startswith("unknown_service") else {}
    provider = TracerProvider(resource=Resource.create(own))
    made: SpanExporter = ConsoleSpanExporter() if exporter == "console" else OTLPSpanExporter()
    provider.add_span_processor(BatchSpanProcessor(made))
    return provider.get_tracer("pi2")


def _refuse(problem: str, help: str) -> UserError:
    return UserError.of("P691", problem, help=help)


class Traces:
    """Writes a span for each request that ``app`` answers."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _QUIET:
            await self._app(scope, receive, send)
            return
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, Status, StatusCode

        headers = Headers(scope=scope)
        state: dict[str, Any] = scope.setdefault("state", {})
        with self._tracer.start_as_current_span(
            f"{scope['method']} {scope['path']}", context=extract(headers), kind=SpanKind.SERVER
        ) as span:
            span.set_attribute("http.request.method", scope["method"])
            span.set_attribute("url.path", scope["path"])
            noted = NotedSend(send)
            try:
                await self._app(scope, receive, noted)
            finally:
                span.set_attribute("http.response.status_code", noted.status)
                describe_request(span, scope["path"], state)
            failed = state.get("use", {}).get("failed") or (noted.status >= 500 and noted.status)
            if failed:
                span.set_attribute("error.type", str(failed))
                span.set_status(Status(StatusCode.ERROR))


def describe_request(span: Span, path: str, state: Mapping[str, Any]) -> None:
    """Report the request and its use: ``state["asked"]`` and ``state["use"]``."""
    operation = _KINDS.get(path)
    used = state.get("use", {})
    if operation is None:
        return
    span.set_attribute("gen_ai.operation.name", operation)
    span.set_attribute("gen_ai.provider.name", "pi2")
    if "model" in used:
        # Of a name that no plan has, nothing is told: it may be anything.
        span.update_name(f"{operation} {used['model']}")
        span.set_attribute("gen_ai.request.model", used["model"])
        span.set_attribute("gen_ai.response.model", used["model"])
    traced = read_table()["traced"]
    for group, values in (("asked", state.get("asked", {})), ("used", used)):
        for key, name in traced[group].items():
            if isinstance(values.get(key), int | float):
                span.set_attribute(name, values[key])
