"""The forms of the server's interfaces: events, mistakes, embeddings, tokens, numbers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the extra serve")

import pi2
from pi2.cli.serve import list_plans
from pi2.serving.openapi import OPERATIONS, describe_interface
from tests.helpers.gguf_files import write_random_gguf
from tests.helpers.servers import (
    HELLO,
    describe_plan,
    get,
    make_chat_plan,
    post,
    serve,
    wait_until_idle,
)


def test_events_are_written_to_the_byte(address: str) -> None:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 3, "temperature": 0, "stream": True}
    answer = post(f"{address}/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.content.replace(b": ping\n\n", b"").split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    for event in events[:-2]:
        found = re.fullmatch(rb"data: (\{.*\})", event)
        assert found, event
        chunk = json.loads(found[1])
        assert chunk["object"] == "chat.completion.chunk"
        assert list(chunk["choices"][0]) == ["index", "delta", "logprobs", "finish_reason"]
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 3, "stream": True}
    answer = post(f"{address}/v1/messages", json=body)
    for event in answer.content.split(b"\n\n")[:-1]:
        found = re.fullmatch(rb"event: (\w+)\ndata: (\{.*\})", event)
        assert found, event
        assert json.loads(found[2])["type"] == found[1].decode()


@pytest.mark.parametrize("broken", [False, True], ids=["no template", "a template that fails"])
def test_a_client_learns_of_a_template_and_nothing_of_this_machine(
    tmp_path: Path, broken: bool
) -> None:
    plan = make_chat_plan(tmp_path, template="{{ 1 / 0 }}\n" if broken else None)
    with serve([describe_plan(plan)]) as address:
        for path in ("/v1/chat/completions", "/v1/messages", "/api/chat"):
            body = {"model": "tiny", "messages": HELLO, "max_tokens": 3}
            if path == "/api/chat":
                del body["max_tokens"]
            answer = post(f"{address}{path}", json=body)
            assert answer.status_code == 400, answer.text
            assert "chat template" in answer.text
            assert str(tmp_path) not in answer.text
            assert broken or "/v1/completions" in answer.text


def test_mistakes_are_told_in_the_form_of_each_interface(
    client: Any, other: Any, openai: Any, anthropic: Any
) -> None:
    def ask(**more: Any) -> Any:
        return client.chat.completions.create(**{"model": "tiny", "messages": HELLO, **more})

    with pytest.raises(openai.BadRequestError) as unknown:
        ask(extra_body={"surprise": 1})
    assert (unknown.value.code, unknown.value.param) == ("unknown_parameter", "surprise")
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        ask(model="other")
    with pytest.raises(openai.BadRequestError) as long:
        ask(messages=[{"role": "user", "content": "x" * 2000}])
    assert long.value.code == "context_length_exceeded"
    wrong: dict[str, Any]
    for wrong in ({"temperature": 3}, {"n": 0}, {"messages": []}, {"logit_bias": {"9999": 1}}):
        with pytest.raises(openai.BadRequestError):
            ask(**wrong)
    with pytest.raises(openai.BadRequestError, match="reads text"):
        ask(
            messages=[
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ]
        )
    # These are accepted and ignored, and so is what is unknown inside messages.
    ignored = {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto"}
    extra = {"prompt_cache_key": "k", "safety_identifier": "s"}
    answer = ask(
        **ignored,
        extra_body=extra,
        messages=[{**HELLO[0], "annotations": [], "cache_control": {"type": "ephemeral"}}],
        max_tokens=1,
    )
    assert answer.choices[0].finish_reason == "length"
    with pytest.raises(anthropic.BadRequestError) as refused:
        other.messages.create(model="tiny", max_tokens=-2, messages=HELLO)
    assert refused.value.body["type"] == "error"
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        other.messages.create(model="other", max_tokens=1, messages=HELLO)
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="tiny", input="x", previous_response_id="resp_1")


def test_texts_are_embedded(client: Any, plan: Path, openai: Any) -> None:
    # The client asks for base64 when nobody says what he wants.
    texts = ["hello", "hello you", "hello"]
    found = client.embeddings.create(model="tiny", input=texts, user="me")
    vectors = [item.embedding for item in found.data]
    with pi2.load(plan) as model:
        expected = [model.embed(text).tolist() for text in texts]
        ids = model.encode("hello you")
        last = model.embed(ids, pooling="last")
    assert vectors == expected and vectors[0] == vectors[2] != vectors[1]
    assert [round(sum(x * x for x in vector), 5) for vector in vectors] == [1.0] * 3
    assert [item.index for item in found.data] == [0, 1, 2]
    assert found.usage.prompt_tokens == found.usage.total_tokens == 6 + 10 + 6

    asked: dict[str, Any] = {"model": "tiny", "input": ids, "extra_body": {"pooling": "last"}}
    short = client.embeddings.create(**asked, encoding_format="float", dimensions=8)
    assert len(short.data) == 1
    values = short.data[0].embedding
    assert sum(x * x for x in values) == pytest.approx(1)
    assert values[0] / values[1] == pytest.approx(last[0] / last[1], rel=1e-4)

    refused: list[dict[str, Any]] = [
        {"input": []},
        {"input": "x", "dimensions": 65},
        {"input": "x", "extra_body": {"unheard": 1}},
        {"input": "x" * 2000},
    ]
    for wrong in refused:
        with pytest.raises(openai.BadRequestError) as error:
            client.embeddings.create(model="tiny", **wrong)
        assert error.value.body["type"] == "invalid_request_error", wrong


def test_numbers_for_prometheus_have_their_usual_names(address: str, client: Any) -> None:
    client.completions.create(model="tiny", prompt="a", max_tokens=2)
    # An answer is sent a moment before its place is free again.
    wait_until_idle(address)
    text = get(f"{address}/metrics").text
    for name in (
        'vllm:num_requests_running{model_name="tiny"} 0.0',
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_bucket",
        'vllm:request_success_total{finished_reason="length"',
        "pi2:flash_read_bytes_total",
        'pi2:memory_segment_bytes{model_name="tiny",segment="kv"}',
    ):
        assert name in text, name


def test_every_path_of_a_served_gguf_file_answers(tmp_path: Path) -> None:
    shape = {"hidden": 64, "ffn": 96, "layers": 1, "context": 256}
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    file = write_random_gguf(tmp_path, shape, template=template)
    asked: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
        "/v1/completions": {"prompt": "hello", "max_tokens": 2},
        "/v1/embeddings": {"input": "hello"},
        "/v1/responses": {"input": "hello", "max_output_tokens": 2},
        "/v1/messages": {"messages": HELLO, "max_tokens": 2},
        "/v1/messages/count_tokens": {"messages": HELLO},
        "/tokenize": {"prompt": "hello"},
        "/detokenize": {"tokens": [5]},
        "/api/chat": {"messages": HELLO, "options": {"num_predict": 2}},
        "/api/generate": {"prompt": "hello", "options": {"num_predict": 2}},
        "/api/embed": {"input": "hello"},
        "/api/embeddings": {"prompt": "hello"},
        "/api/show": {},
    }
    assert set(asked) == {operation.path for operation in OPERATIONS}
    paths = [path for path, methods in describe_interface()["paths"].items() if "get" in methods]
    with serve(list_plans((file,), {})) as address:
        for path, body in asked.items():
            answer = post(f"{address}{path}", json={"model": "model", **body})
            assert answer.is_success, (path, answer.text)
        for path in ("/", "/openapi.json", "/v1/models/model", *paths):
            answer = get(f"{address}{path}")
            assert answer.is_success, (path, answer.text)
        numbers = get(f"{address}/metrics").text
    assert 'pi2:predicted_neurons_total{model_name="model"} 0.0' in numbers
    assert "pi2:active_neurons" not in numbers, "kernels of blocks do not count them"


def test_clients_of_ollama_can_chat(address: str) -> None:
    assert get(f"{address}/api/tags").json()["models"][0]["name"] == "tiny:latest"
    body = {"model": "tiny:latest", "messages": HELLO, "options": {"num_predict": 4, "seed": 1}}
    lines = post(f"{address}/api/chat", json=body).text.splitlines()
    pieces = [json.loads(line) for line in lines]
    assert [piece["done"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    whole = post(f"{address}/api/chat", json={**body, "stream": False}).json()
    assert whole["message"]["content"] == "".join(piece["message"]["content"] for piece in pieces)
    assert whole["eval_count"] == 4


def test_penalties_without_a_window_are_off(address: str) -> None:
    def say(path: str, **more: Any) -> Any:
        options = {"temperature": 0, "repeat_penalty": 1.9, **more}
        body: dict[str, Any] = {"model": "tiny", "messages": HELLO}
        if path == "/api/chat":
            body |= {"stream": False, "options": {**options, "num_predict": 12}}
            return post(f"{address}{path}", json=body).json()["message"]["content"]
        found = post(f"{address}{path}", json={**body, **options, "max_tokens": 12}).json()
        return found["choices"][0]["message"]["content"]

    for path in ("/api/chat", "/v1/chat/completions"):
        plain, whole = say(path, repeat_penalty=1.0), say(path)
        assert say(path, repeat_last_n=0) == plain != whole == say(path, repeat_last_n=-1)


def test_texts_become_tokens_and_tokens_texts(address: str) -> None:
    found = post(f"{address}/tokenize", json={"prompt": "häh"}).json()
    assert found["count"] == len(found["tokens"]) == 5
    back = post(f"{address}/detokenize", json={"tokens": found["tokens"][1:]}).json()
    assert back["prompt"] == "häh"
    chat = post(f"{address}/tokenize", json={"messages": HELLO}).json()
    assert chat["count"] > 5
    assert post(f"{address}/tokenize", json={}).status_code == 400
