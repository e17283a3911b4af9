"""What is done with prompts: scored, continued, filled in, and read while a client waits."""

import http.client
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("uvicorn", reason="needs the extra serve")

import pi2
from pi2.backends.blocks.contract import CONTEXT_BLOCK
from pi2.engine.sequences import Sequences
from pi2.serving import requests
from tests.helpers.models import make_tokenizer
from tests.helpers.patience import PATIENCE_S
from tests.helpers.servers import HELLO, describe_plan, make_chat_plan, post, serve, wait_until_idle

TEXTS = ["The capital", "of häh"]
CONTEXTS = [4, 1]
"""Tokens of each text that are given; the others are what is scored."""


def score(model: Any, ids: list[int]) -> list[float]:
    """Log probabilities of the tokens of a text, but of the first one."""
    logits = model.logits(ids).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return [float(row[token]) for row, token in zip(logits, ids[1:], strict=False)]


@pytest.mark.parametrize("most", [0, 1])
@pytest.mark.parametrize("as_ids", [False, True])
def test_prompts_are_scored_as_the_model_scores_them(
    client: Any, plan: Path, most: int, as_ids: bool
) -> None:
    with pi2.load(plan) as model:
        ids = [model.encode(text) for text in TEXTS]
        expected = [score(model, tokens) for tokens in ids]
    found = client.completions.create(
        model="tiny", prompt=ids if as_ids else TEXTS, echo=True, logprobs=1, max_tokens=most,
        temperature=0,
    )  # fmt: skip
    assert found.usage.completion_tokens == most * len(TEXTS)
    for choice, tokens, values, given in zip(found.choices, ids, expected, CONTEXTS, strict=True):
        told = choice.logprobs
        assert len(told.tokens) == len(tokens) + most
        assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
        assert told.token_logprobs[1 : len(tokens)] == pytest.approx(values, abs=1e-4)
        # As lm_eval adds them up.
        end = len(tokens) + most if most == 0 else -1
        likelihood = sum(told.token_logprobs[given:end])
        assert likelihood == pytest.approx(sum(values[given - 1 :]), abs=1e-3)
        for value, top in zip(told.token_logprobs[1:], told.top_logprobs[1:], strict=True):
            assert len(top) == 1 and value <= max(top.values()) + 1e-9
        assert choice.text.startswith("<begin>" if as_ids else TEXTS[choice.index])
        assert told.text_offset[: 2 - as_ids] == [0, 0][: 2 - as_ids]
        # Parts of a character begin where it does.
        assert told.text_offset == sorted(told.text_offset)
        echoed = len("<begin>" * as_ids + TEXTS[choice.index])
        assert told.text_offset[len(tokens) - 1 :] == [echoed - 1, echoed][: most + 1]
        letters = "".join(told.tokens[: len(tokens)]).replace("\ufffd\ufffd", "ä")
        assert letters == "<begin>" + TEXTS[choice.index]


def test_one_prompt_of_ids_is_scored_in_a_stream_as_well(client: Any, plan: Path) -> None:
    with pi2.load(plan) as model:
        ids = model.encode(TEXTS[0])
        expected = score(model, ids)
    asked = {"model": "tiny", "prompt": ids, "max_tokens": 2, "logprobs": 0, "echo": True, "n": 2}
    pieces: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            if choice.logprobs is not None:
                pieces[choice.index] += choice.logprobs.token_logprobs
    for choice in client.completions.create(**asked).choices:
        assert choice.logprobs.token_logprobs[1 : len(ids)] == pytest.approx(expected, abs=1e-4)
        values = choice.logprobs.token_logprobs
        assert pieces[choice.index][0] is values[0] is None
        assert pieces[choice.index][1:] == pytest.approx(values[1:], abs=1e-4)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
def test_the_assistants_last_message_is_continued(address: str, plan: Path, path: str) -> None:
    said = {"role": "assistant", "content": "Well, "}
    with pi2.load(plan) as model:
        ids = model.begin(model.encode_text(model.render_chat(HELLO) + "Well, "))
        expected = model.generate(ids, max_tokens=4, temperature=0).result.text
    body: dict[str, Any] = {"model": "tiny", "messages": [*HELLO, said], "max_tokens": 4}
    if path == "/api/chat":
        body = {**body, "stream": False, "options": {"num_predict": 4}}
    found = post(f"{address}{path}", json=body).json()
    if path == "/api/chat":
        told, count = found["message"]["content"], found["prompt_eval_count"]
    elif path == "/v1/messages":
        usage = found["usage"]
        told = found["content"][0]["text"]
        count = usage["input_tokens"] + usage["cache_read_input_tokens"]
    else:
        told, count = found["choices"][0]["message"]["content"], found["usage"]["prompt_tokens"]
    assert (told, count) == (expected, len(ids))


def test_a_message_is_not_continued_where_a_client_says_so(address: str) -> None:
    url = f"{address}/v1/chat/completions"
    said = {"role": "assistant", "content": "Well, "}
    body = {"model": "tiny", "messages": [*HELLO, said], "max_tokens": 1}

    def count(**more: Any) -> int:
        return int(post(url, json={**body, **more}).json()["usage"]["prompt_tokens"])

    assert count(continue_final_message=False) > count(continue_final_message=True) == count()
    own = {"model": "tiny", "messages": HELLO, "max_tokens": 1}
    assert post(url, json={**own, "continue_final_message": True}).status_code == 400


FIRST_ONLY = """{% for m in messages %}{% if m.role == 'system' and not loop.first %}
{{ raise_exception('System message must be at the beginning.') }}{% endif -%}
<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
TURNS = """{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate.') }}{% endif -%}
<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
WRITTEN = {
    FIRST_ONLY: "<system>One.\n\nTwo.<user>Hi.<assistant>Yes.<user>Three.<user>So?<assistant>",
    TURNS: "<user>One.\n\nTwo.\n\nHi.<assistant>Yes.<user>Three.\n\nSo?<assistant>",
}


@pytest.mark.parametrize("template", WRITTEN, ids=["in the first place only", "not at all"])
def test_system_messages_of_all_interfaces_reach_templates_that_refuse_them(
    tmp_path: Path, template: str
) -> None:
    def say(role: str, text: str) -> dict[str, str]:
        return {"role": role, "content": text}

    later = [say("user", "Hi."), say("assistant", "Yes."), say("system", "Three.")]
    later.append(say("user", "So?"))
    talk = [say("system", "One."), say("developer", "Two."), *later]
    asked: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": talk, "max_tokens": 1},
        "/v1/responses": {"input": talk, "max_output_tokens": 1},
        "/v1/messages": {"system": "One.\n\nTwo.", "messages": later, "max_tokens": 1},
        "/api/chat": {"messages": talk, "stream": False, "options": {"num_predict": 1}},
    }
    counts = {"prompt_tokens", "input_tokens", "cache_read_input_tokens", "prompt_eval_count"}
    with serve([describe_plan(make_chat_plan(tmp_path, template=template))]) as address:
        tokens = post(f"{address}/tokenize", json={"prompt": WRITTEN[template]}).json()["count"]
        for path, body in asked.items():
            answer = post(f"{address}{path}", json={"model": "tiny", **body})
            assert answer.is_success, answer.text
            found = answer.json()
            usage = {**found, **found.get("usage", {})}
            assert sum(value for key, value in usage.items() if key in counts) == tokens, path
        # A first turn's prompt is read once.
        talk = [*talk[:2], say("user", "Another. " * 9), *talk[3:]]
        for count in (3, 6):
            body = {"model": "tiny", "messages": talk[:count], "max_tokens": 1}
            usage = post(f"{address}/v1/chat/completions", json=body).json()["usage"]
            if count == 3:
                known = usage["prompt_tokens"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > known - CONTEXT_BLOCK


@pytest.fixture
def filling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    def make_with_marks(vocab: int) -> bytes:
        text = make_tokenizer(vocab)
        for number, part in enumerate(("prefix", "suffix", "middle")):
            text = text.replace(f"<filler {260 + number}>".encode(), f"<fim_{part}>".encode())
        return text

    monkeypatch.setattr("tests.helpers.models.make_tokenizer", make_with_marks)
    with serve([describe_plan(make_chat_plan(tmp_path))]) as address:
        yield address


def test_gaps_are_filled_in(filling: str, address: str) -> None:
    body = {"model": "tiny", "max_tokens": 3, "temperature": 0}
    asked = {**body, "prompt": "ab", "suffix": "yz"}
    found = post(f"{filling}/v1/completions", json=asked).json()
    begin, a, b, y, z = post(f"{filling}/tokenize", json={"prompt": "abyz"}).json()["tokens"]
    ids = [begin, 260, a, b, 261, y, z, 262]
    plain = post(f"{filling}/v1/completions", json={**body, "prompt": ids}).json()
    assert found["choices"][0]["text"] == plain["choices"][0]["text"] != ""
    assert found["usage"]["prompt_tokens"] == len(ids)
    asked = {"model": "tiny", "prompt": "ab", "suffix": "yz", "stream": False}
    asked["options"] = {"num_predict": 3, "temperature": 0}
    told = post(f"{filling}/api/generate", json=asked).json()
    assert told["response"] == found["choices"][0]["text"]
    assert "insert" in post(f"{filling}/api/show", json={"model": "tiny"}).json()["capabilities"]
    refused = post(f"{address}/v1/completions", json={**body, "prompt": "ab", "suffix": "yz"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "suffix"


@pytest.fixture
def read_on(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Prompts are read when it is set."""
    event, prefill = threading.Event(), Sequences.prefill

    def wait(
        self: Sequences, tokens: Any, *, progress: Callable[[float], None], **more: Any
    ) -> Any:
        while not event.wait(0.01):
            progress(0.5)
        return prefill(self, tokens, progress=progress, **more)

    monkeypatch.setattr(Sequences, "prefill", wait)
    monkeypatch.setattr(requests, "FIRST_PING_S", 0.02)
    monkeypatch.setattr(requests, "PING_S", 0.02)
    return event


def ask(address: str, path: str) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=PATIENCE_S)
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 3, "stream": True}
    if path == "/v1/completions":
        body["prompt"] = "hello"
    elif path == "/v1/responses":
        body = {"model": "tiny", "input": "hello", "stream": True, "max_output_tokens": 3}
    elif path == "/api/generate":
        body = {"model": "tiny", "prompt": "hello", "options": {"num_predict": 3}}
    else:
        body["messages"] = HELLO
    connection.request("POST", path, json.dumps(body))
    return connection


PINGS = {
    "/v1/chat/completions": b": ping\n",
    "/v1/completions": b": ping\n",
    "/v1/responses": b": ping\n",
    "/v1/messages": b"event: ping\n",
    "/api/generate": b'"response":"","done":false}\n',
}


@pytest.mark.parametrize("path", PINGS)
def test_a_stream_gives_signs_of_life_while_the_prompt_is_read(
    address: str, path: str, read_on: threading.Event
) -> None:
    connection = ask(address, path)
    answer = connection.getresponse()  # the header comes first
    assert answer.status == 200
    seen = 0
    while seen < 3:
        seen += answer.readline().endswith(PINGS[path])
    read_on.set()
    rest = answer.read()
    assert b'"error":{' not in rest and len(rest) > 100
    connection.close()


def test_a_prompt_is_not_read_on_when_its_client_has_gone(
    address: str, read_on: threading.Event
) -> None:
    connection = ask(address, "/v1/chat/completions")
    assert connection.getresponse().status == 200
    before = time.monotonic()
    connection.close()
    wait_until_idle(address)
    assert time.monotonic() - before < 50
    read_on.set()
    again = ask(address, "/v1/chat/completions")
    assert b"[DONE]" in again.getresponse().read()
    again.close()


def test_what_cannot_be_asked_is_refused_before_a_stream_begins(address: str) -> None:
    body = {"model": "tiny", "prompt": "x" * 2000, "stream": True}
    answer = post(f"{address}/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    # The words by which agents know that they have to shorten a conversation.
    assert re.search(r"prompt is too long: \d+ tokens > \d+ maximum", answer.text)
