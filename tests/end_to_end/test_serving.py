"""The server, through clients that others wrote."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the extra serve")
openai = pytest.importorskip("openai", reason="needs OpenAI's client")
anthropic = pytest.importorskip("anthropic", reason="needs Anthropic's client")

import pi2  # noqa: E402
from pi2.engine.forward import Forward  # noqa: E402
from pi2.serving.calls import Limits  # noqa: E402
from tests.helpers.servers import (  # noqa: E402
    HELLO,
    SCHEMA,
    TOOLS,
    describe_plan,
    get,
    make_chat_plan,
    post,
    serve,
    wait_until_idle,
)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_plan(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def address(plan: Path) -> Iterator[str]:
    with serve([describe_plan(plan, overrides={"decode.batch": 4})]) as address:
        yield address


@pytest.fixture(scope="module")
def client(address: str) -> Any:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def other(address: str) -> Any:
    return anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)


def test_a_chat_is_answered_whole_and_in_pieces(client: Any, plan: Path) -> None:
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "temperature": 1, "seed": 7}
    whole = client.chat.completions.create(**asked, n=2)
    assert [choice.finish_reason for choice in whole.choices] == ["length", "length"]
    assert whole.usage.completion_tokens == 24
    chunks = list(
        client.chat.completions.create(
            **asked, n=2, stream=True, stream_options={"include_usage": True}
        )
    )
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 24
    with pi2.load(plan) as model:
        ids = model.encode_chat(HELLO)
        alone = [
            model.generate(ids, max_tokens=12, temperature=1, seed=seed).result for seed in (7, 8)
        ]
    assert texts == [result.text for result in alone]
    assert whole.usage.prompt_tokens == len(ids)


def test_events_are_written_to_the_byte(address: str) -> None:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 3, "temperature": 0, "stream": True}
    answer = post(f"{address}/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.content.split(b"\n\n")
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


def test_log_probabilities_are_those_of_the_model(client: Any, plan: Path) -> None:
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 4, "temperature": 0}
    scores = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3).choices[0]
    for score in scores.logprobs.content:
        assert len(score.top_logprobs) == 3
        assert score.top_logprobs[0].token == score.token
        assert score.logprob == score.top_logprobs[0].logprob
        assert 0 >= score.logprob >= score.top_logprobs[1].logprob
    streamed = [
        score
        for chunk in client.chat.completions.create(**asked, logprobs=True, stream=True)
        if chunk.choices[0].logprobs
        for score in chunk.choices[0].logprobs.content
    ]
    assert [score.logprob for score in streamed] == [
        score.logprob for score in scores.logprobs.content
    ]
    text = client.completions.create(
        model="tiny", prompt="ab", max_tokens=3, logprobs=2, echo=True, temperature=0
    ).choices[0]
    assert text.text.startswith("ab")
    assert text.logprobs.text_offset[0] == 2
    assert len(text.logprobs.top_logprobs) == len(text.logprobs.tokens) == 3


def test_a_conversation_reads_only_what_is_new(client: Any) -> None:
    end = {"257": 4.0}
    asked = {"model": "tiny", "temperature": 1, "seed": 3, "logit_bias": end, "max_tokens": 300}
    first = client.chat.completions.create(messages=HELLO, **asked)
    assert first.choices[0].finish_reason == "stop"
    assert first.usage.completion_tokens > 3
    said = {"role": "assistant", "content": first.choices[0].message.content}
    second = client.chat.completions.create(
        messages=[*HELLO, said, {"role": "user", "content": "and?"}], **asked
    )
    # All but the end token has gone through the model.
    known = second.usage.prompt_tokens_details.cached_tokens
    assert known == first.usage.total_tokens - 1


def test_tokens_are_drawn_as_it_is_asked(client: Any, address: str) -> None:
    asked = {"model": "tiny", "prompt": "ab", "max_tokens": 8, "temperature": 0}
    plain = client.completions.create(**asked).choices[0].text
    question = {"prompt": plain[0], "add_special_tokens": False}
    (token,) = post(f"{address}/tokenize", json=question).json()["tokens"]
    bias = {str(token): -100}
    forbidden = client.completions.create(**asked, logit_bias=bias).choices[0].text
    assert plain[0] not in forbidden
    varied = client.completions.create(**asked, frequency_penalty=2, presence_penalty=2)
    assert len(set(varied.choices[0].text)) > len(set(plain))
    stopped = client.completions.create(**asked, stop=[plain[2:4]]).choices[0]
    assert stopped.finish_reason == "stop"
    assert plain[2:4] not in stopped.text
    several = client.completions.create(model="tiny", prompt=["a", "b"], n=2, max_tokens=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    best = client.completions.create(
        model="tiny", prompt="a", n=1, best_of=3, temperature=1, max_tokens=2
    )
    assert len(best.choices) == 1
    before = wait_until_idle(address)["rounds"]["prompt_tokens"]
    shared = {"prompt": "a prompt of its own, read once", "n": 3, "max_tokens": 2}
    usage = client.completions.create(model="tiny", **shared).usage
    read = wait_until_idle(address)["rounds"]["prompt_tokens"] - before
    assert read == usage.prompt_tokens, "once for all three"
    ids = client.completions.create(**asked, extra_body={"return_token_ids": True}).choices[0]
    back = post(f"{address}/detokenize", json={"tokens": ids.token_ids}).json()
    assert back["prompt"] == ids.text == plain


def test_answers_keep_to_a_json_schema(client: Any) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    for seed in range(3):
        choice = client.chat.completions.create(
            model="tiny", messages=HELLO, temperature=1, seed=seed, response_format=wanted
        ).choices[0]
        assert choice.finish_reason == "stop"
        found = json.loads(choice.message.content)
        assert set(found) == {"a", "b"} and 0 <= found["a"] <= 9 and found["b"] in "xy"
    response = client.responses.create(
        model="tiny",
        input="hello",
        text={"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}},
    )
    assert set(json.loads(response.output_text)) == {"a", "b"}
    with pytest.raises(openai.BadRequestError, match="schema"):
        client.chat.completions.create(
            model="tiny",
            messages=HELLO,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": {"type": "nonsense"}},
            },
        )


def test_tools_are_called_and_their_results_read(client: Any, other: Any) -> None:
    asked = {"model": "tiny", "messages": HELLO, "tools": TOOLS, "temperature": 1, "seed": 3}
    whole = client.chat.completions.create(
        **asked, tool_choice="required", parallel_tool_calls=False
    ).choices[0]
    assert whole.finish_reason == "tool_calls"
    (call,) = whole.message.tool_calls
    assert call.function.name == "get"
    assert set(json.loads(call.function.arguments)) == {"a", "b"}
    name = {"type": "function", "function": {"name": "get"}}
    pieces = client.chat.completions.create(
        **asked, tool_choice=name, parallel_tool_calls=False, stream=True
    )
    arguments = ""
    for chunk in pieces:
        for delta in chunk.choices[0].delta.tool_calls or ():
            arguments += delta.function.arguments
    assert arguments == call.function.arguments
    again = client.chat.completions.create(
        model="tiny",
        messages=[
            *HELLO,
            whole.message.model_dump(exclude_none=True) | {"content": None},
            {"role": "tool", "tool_call_id": call.id, "content": "42"},
        ],
        tools=TOOLS,
        tool_choice="none",
        max_tokens=2,
    )
    assert again.choices[0].finish_reason == "length"
    message = other.messages.create(
        model="tiny",
        max_tokens=300,
        messages=HELLO,
        tools=[{"name": "get", "input_schema": SCHEMA}],
        tool_choice={"type": "tool", "name": "get", "disable_parallel_tool_use": True},
    )
    assert message.stop_reason == "tool_use"
    assert set(message.content[0].input) == {"a", "b"}
    response = client.responses.create(
        model="tiny",
        input="hello",
        tools=[{"type": "function", "name": "get", "parameters": SCHEMA, "strict": True}],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    assert response.output[0].type == "function_call"
    follow = client.responses.create(
        model="tiny",
        max_output_tokens=2,
        input=[
            {"role": "user", "content": "hello"},
            response.output[0].model_dump(exclude_none=True),
            {"type": "function_call_output", "call_id": "x", "output": "42"},
        ],
    )
    assert follow.status == "incomplete"


CALLING = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% if m.tool_calls %}{% for c in m.tool_calls %}
<tool_call>{{ c.function | tojson(indent=2) }}</tool_call>{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A template that writes calls otherwise than they are sampled."""


@pytest.mark.parametrize("template", ["chatml", CALLING.replace("{% if tools %}", "{% if 0 %}")])
def test_calls_are_read_again_as_they_were_sampled(tmp_path: Path, template: str) -> None:
    plan = make_chat_plan(tmp_path, template=template, context=2048)
    with serve([describe_plan(plan)]) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        asked: dict[str, Any] = {"model": "tiny", "tools": TOOLS, "max_tokens": 300}
        messages = list(HELLO)
        for turn in range(2):
            first = client.chat.completions.create(
                **asked, messages=messages, tool_choice="required", temperature=1, seed=turn
            )
            said = first.choices[0].message
            assert first.choices[0].finish_reason == "tool_calls"
            again = said.model_dump(exclude_none=True)
            for call in again["tool_calls"]:
                # Frameworks read arguments, and write them again.
                arguments = json.loads(call["function"]["arguments"])
                call["function"]["arguments"] = json.dumps(arguments, indent=3)
            result = {"role": "tool", "tool_call_id": again["tool_calls"][0]["id"], "content": "1"}
            messages += [again, result]
        second = client.chat.completions.create(**{**asked, "max_tokens": 2}, messages=messages)
        # All but the end token of the last answer is known.
        known = first.usage.prompt_tokens + first.usage.completion_tokens - 1
        assert second.usage.prompt_tokens_details.cached_tokens == known

        # Another call is another text.
        messages[-2]["tool_calls"][0]["function"]["arguments"] = '{"a": 5, "b": "x", "c": 0}'
        other = client.chat.completions.create(**{**asked, "max_tokens": 2}, messages=messages)
        assert other.usage.prompt_tokens_details.cached_tokens < known


def test_messages_and_responses_stream_what_they_answer(client: Any, other: Any) -> None:
    with other.messages.stream(
        model="tiny", max_tokens=6, messages=HELLO, system="Be kind."
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    whole = other.messages.create(model="tiny", max_tokens=6, messages=HELLO, system="Be kind.")
    assert text == final.content[0].text == whole.content[0].text
    assert final.usage.output_tokens == 6
    assert final.stop_reason == "max_tokens"
    counted = other.messages.count_tokens(model="tiny", messages=HELLO, system="Be kind.")
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    stopped = other.messages.create(
        model="tiny",
        max_tokens=6,
        messages=HELLO,
        system="Be kind.",
        stop_sequences=[text[2:4]],
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[2:4])
    asked = {"model": "tiny", "input": "hello", "max_output_tokens": 6, "temperature": 0}
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == client.responses.create(**asked).output_text
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == deltas


def test_mistakes_are_told_in_the_form_of_each_interface(client: Any, other: Any) -> None:
    def ask(**more: Any) -> Any:
        return client.chat.completions.create(**{"model": "tiny", "messages": HELLO, **more})

    with pytest.raises(openai.BadRequestError) as unknown:
        ask(extra_body={"surprise": 1})
    assert unknown.value.code == "unknown_parameter"
    assert unknown.value.param == "surprise"
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
        other.messages.create(model="tiny", max_tokens=0, messages=HELLO)
    assert refused.value.body["type"] == "error"
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        other.messages.create(model="other", max_tokens=1, messages=HELLO)
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="tiny", input="x", previous_response_id="resp_1")


def test_many_clients_get_what_each_would_get_alone(client: Any) -> None:
    def ask(number: int) -> str:
        answer = client.completions.create(
            model="tiny", prompt=f"number {number}", max_tokens=10, temperature=1, seed=number
        )
        return str(answer.choices[0].text)

    alone = [ask(number) for number in range(6)]
    with ThreadPoolExecutor(24) as threads:
        found = list(threads.map(ask, [number % 6 for number in range(48)]))
    assert found == [alone[number % 6] for number in range(48)]


def test_texts_are_embedded(client: Any, plan: Path) -> None:
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


def test_models_are_loaded_when_they_are_asked_for(tmp_path: Path) -> None:
    plans = []
    for name in ("one", "two"):
        path = make_chat_plan(tmp_path / name, context=64)
        plans.append(describe_plan(path, name))
    with serve(plans, memory_bytes=3 << 30) as address:

        def list_loaded() -> list[str]:
            found = get(f"{address}/v1/models").json()["data"]
            return [item["id"] for item in found if item["loaded"]]

        assert list_loaded() == ["one"]
        for name in ("two", "one"):
            body = {"model": name, "prompt": "a", "max_tokens": 2}
            assert post(f"{address}/v1/completions", json=body, timeout=60).is_success
            assert list_loaded() == [name]


def test_whoever_wants_another_model_waits_his_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_step, step = threading.Event(), Forward.step

    def step_when_all_have_asked(self: Forward, *arguments: Any) -> Any:
        assert may_step.wait(60)
        return step(self, *arguments)

    monkeypatch.setattr(Forward, "step", step_when_all_have_asked)
    plans = [
        describe_plan(make_chat_plan(tmp_path / name, context=1024), name)
        for name in ("one", "two")
    ]
    memory = max(plan.budget_bytes for plan in plans)
    limits = Limits(waiting=1, time_s=600)
    with serve(plans, memory_bytes=memory, limits=limits) as address, ThreadPoolExecutor() as pool:
        url = f"{address}/v1/completions"

        def ask(name: str) -> tuple[int, float]:
            body = {"model": name, "prompt": "a", "max_tokens": 2}
            answer = post(url, json={**body, "ignore_eos": True}, timeout=600)
            assert "retry-after" in answer.headers or answer.is_success, answer.text
            return answer.status_code, time.monotonic()

        def wait_for(number: int, key: str, value: int) -> None:
            deadline = time.monotonic() + 300
            while time.monotonic() < deadline:
                state = get(f"{address}/api/state", timeout=300).json()["models"][number]
                if state.get(key) == value:
                    return
                time.sleep(0.005)
            raise AssertionError(f"{key} is not {value}")

        first = pool.submit(ask, "one")
        wait_for(0, "running", 1)
        # Whoever hangs up while he waits gives his place in line up.
        gone = http.client.HTTPConnection(address.removeprefix("http://"))
        gone.request("POST", "/v1/completions", json.dumps({"model": "two", "prompt": "a"}))
        wait_for(1, "waiting", 1)
        gone.close()
        wait_for(1, "waiting", 0)
        other = pool.submit(ask, "two")
        wait_for(1, "waiting", 1)
        assert ask("two")[0] == 429
        late = pool.submit(ask, "one")
        wait_for(0, "waiting", 1)
        may_step.set()
        found = [future.result() for future in (first, other, late)]
        assert [status for status, _ in found] == [200] * 3
        assert [at for _, at in found] == sorted(at for _, at in found)


def test_numbers_for_prometheus_have_their_usual_names(address: str, client: Any) -> None:
    client.completions.create(model="tiny", prompt="a", max_tokens=2)
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


def test_clients_of_ollama_can_chat(address: str) -> None:
    assert get(f"{address}/api/tags").json()["models"][0]["name"] == "tiny:latest"
    body = {"model": "tiny:latest", "messages": HELLO, "options": {"num_predict": 4, "seed": 1}}
    lines = post(f"{address}/api/chat", json=body).text.splitlines()
    pieces = [json.loads(line) for line in lines]
    assert [piece["done"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    whole = post(f"{address}/api/chat", json={**body, "stream": False}).json()
    text = "".join(piece["message"]["content"] for piece in pieces)
    assert whole["message"]["content"] == text
    assert whole["eval_count"] == 4


def test_texts_become_tokens_and_tokens_texts(address: str) -> None:
    found = post(f"{address}/tokenize", json={"prompt": "häh"}).json()
    assert found["count"] == len(found["tokens"]) == 5
    back = post(f"{address}/detokenize", json={"tokens": found["tokens"][1:]}).json()
    assert back["prompt"] == "häh"
    chat = post(f"{address}/tokenize", json={"messages": HELLO}).json()
    assert chat["count"] > 5
    assert post(f"{address}/tokenize", json={}).status_code == 400
