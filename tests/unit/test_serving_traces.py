"""Spans of OpenTelemetry for the server's requests."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

pytest.importorskip("uvicorn", reason="needs the extra serve")
sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="needs the extra otel")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otel")
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402

from pi2.diagnostics import UserError  # noqa: E402
from pi2.serving.openapi import Traces, make_tracer  # noqa: E402
from tests.helpers.patience import PATIENCE_S  # noqa: E402
from tests.helpers.servers import describe_plan, get, make_chat_plan, post, serve  # noqa: E402
from tests.helpers.tables import in_table  # noqa: E402

SECRET = "do not tell anybody"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def address(tmp_path: Path, exporter: InMemorySpanExporter) -> Iterator[str]:
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    plans = [describe_plan(make_chat_plan(tmp_path))]
    with serve(plans, wrap=lambda app: Traces(app, tracer)) as address:
        yield address


def wait_for_spans(exporter: InMemorySpanExporter, count: int) -> tuple[Any, ...]:
    """Spans, which end a moment after the last byte of an answer."""
    deadline = time.monotonic() + PATIENCE_S
    while len(found := exporter.get_finished_spans()) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def test_request_is_a_span_without_its_prompt(address: str, exporter: InMemorySpanExporter) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    body: dict[str, Any] = {
        "model": "tiny", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 3,
        "temperature": 0.5, "seed": 4, "user": SECRET,
    }  # fmt: skip
    with httpx2.Client(headers={"traceparent": parent}, timeout=PATIENCE_S) as client:
        url = f"{address}/v1/chat/completions"
        whole = client.post(url, json=body).json()
        streamed = client.post(url, json={**body, "stream": True}).text
    assert streamed.endswith("data: [DONE]\n\n")
    first, second = wait_for_spans(exporter, 2)
    assert first.name == second.name == "chat tiny"
    found = dict(first.attributes or {})
    assert (
        found
        | {
            "http.request.method": "POST", "http.response.status_code": 200,
            "gen_ai.operation.name": "chat", "gen_ai.provider.name": "pi2",
            "gen_ai.request.model": "tiny", "gen_ai.response.model": "tiny",
            "gen_ai.request.max_tokens": 3, "gen_ai.request.temperature": 0.5,
            "gen_ai.request.seed": 4, "gen_ai.usage.input_tokens": whole["usage"]["prompt_tokens"],
            "gen_ai.usage.output_tokens": whole["usage"]["completion_tokens"],
        }
        == found
    )  # fmt: skip
    # Who asked is known by the header of the W3C.
    assert first.context is not None and first.parent is not None
    assert f"{first.context.trace_id:032x}" == parent.split("-")[1]
    assert f"{first.parent.span_id:016x}" == parent.split("-")[2]
    streamed_for = dict(second.attributes or {})
    assert streamed_for["gen_ai.usage.output_tokens"] == 3
    first_s = streamed_for["gen_ai.response.time_to_first_chunk"]
    assert isinstance(first_s, float) and first_s > 0
    assert SECRET not in first.to_json() + second.to_json()


def test_refusals_are_spans_and_health_is_none(
    address: str, exporter: InMemorySpanExporter
) -> None:
    assert get(f"{address}/health").status_code == 200
    answer = post(f"{address}/v1/embeddings", json={"model": SECRET, "input": SECRET})
    assert answer.status_code == 404
    (span,) = wait_for_spans(exporter, 1)
    assert (span.attributes or {})["http.response.status_code"] == 404
    assert SECRET not in span.to_json()


@in_table
def test_nothing_is_traced_unless_somebody_asks(variables: dict[str, str]) -> None:
    assert make_tracer(variables) is None


def test_the_usual_variables_are_heeded() -> None:
    assert make_tracer({"OTEL_TRACES_EXPORTER": "console"}) is not None
    for variables in (
        {"OTEL_TRACES_EXPORTER": "zipkin"},
        {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
    ):
        with pytest.raises(UserError, match="P691"):
            make_tracer(variables)
