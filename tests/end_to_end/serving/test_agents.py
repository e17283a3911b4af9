"""What agents and Ollama's clients send."""

from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the extra serve")

from tests.helpers.servers import HELLO, SCHEMA, TOOLS, get, post


@pytest.fixture(scope="module")
def llamas(address: str) -> Any:
    return pytest.importorskip("ollama", reason="needs Ollama's client").Client(host=address)


def test_fields_of_agents_are_accepted(client: Any, other: Any) -> None:
    asked = {"model": "tiny", "messages": HELLO}
    sent: list[dict[str, Any]] = [
        {"context_management": {"edits": []}, "betas": ["context-management-2025-06-27"]},
        {"output_config": {"effort": "low"}},
        {"cache_control": {"type": "ephemeral"}},
        {"inference_geo": "eu"},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"mcp_servers": [{"type": "url", "url": "https://x.test", "name": "x"}]},
    ]
    for more in sent:
        answer = other.beta.messages.create(**asked, **more, max_tokens=2)
        assert answer.usage.output_tokens == 2
        if "inference_geo" not in more:
            assert other.beta.messages.count_tokens(**asked, **more).input_tokens > 2
    read = other.messages.create(**asked, max_tokens=0)
    assert (read.usage.output_tokens, read.stop_reason) == (0, "max_tokens")
    extras: list[dict[str, Any]] = [
        {"tools": [{"type": "web_search"}, {"type": "custom", "name": "p"}]},
        {"extra_body": {"client_metadata": {}, "tools": [{"type": "namespace", "name": "m"}]}},
        {"include": ["reasoning.encrypted_content"], "prompt_cache_key": "k"},
    ]
    for more in extras:
        found = client.responses.create(model="tiny", input="hi", max_output_tokens=2, **more)
        assert found.usage.output_tokens == 2 and not found.tools
    chats: list[dict[str, Any]] = [
        {"prediction": {"type": "content", "content": "x"}, "prompt_cache_retention": "24h"},
        {"web_search_options": {}, "extra_body": {"top_k": -1, "seed": -1, "cache_prompt": True}},
        {"top_p": None, "stop": None, "tools": [], "max_completion_tokens": 2},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": "x", "tool_calls": None}]},
    ]
    for more in chats:
        answer = client.chat.completions.create(**{**asked, "max_tokens": 2, **more})
        assert answer.usage.completion_tokens == 2
    whole = client.chat.completions.create(
        **asked, max_tokens=-1, extra_body={"logit_bias": {"257": 100}}
    )
    assert whole.choices[0].finish_reason == "stop"


def test_what_would_change_the_answer_is_refused(
    client: Any, other: Any, openai: Any, anthropic: Any
) -> None:
    chats: list[dict[str, Any]] = [
        {"extra_body": {"audio": {"voice": "a", "format": "mp3"}}},
        {"extra_body": {"guided_json": SCHEMA}},
        {"extra_body": {"min_tokens": 5}},
        {"tools": [{"type": "custom", "custom": {"name": "p"}}], "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "p"}}},
        {"response_format": {"type": "grammar"}},
    ]
    for more in chats:
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="tiny", messages=HELLO, **more)
    for more in ({"background": True}, {"include": ["message.output_text.logprobs"]}):
        with pytest.raises(openai.BadRequestError):
            client.responses.create(model="tiny", input="x", **more)
    search = {"type": "web_search_20250305", "name": "web_search"}
    for choice in ({"type": "tool", "name": "web_search"}, {"type": "any"}):
        with pytest.raises(anthropic.BadRequestError, match="tool"):
            other.messages.create(
                model="tiny", max_tokens=1, messages=HELLO, tools=[search], tool_choice=choice
            )


def test_schemas_are_kept_to_wherever_they_are_stated(client: Any, other: Any) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO}
    form: Any = {"type": "json_object", "schema": SCHEMA}
    chat = client.chat.completions.create(**asked, response_format=form)
    assert '"a"' in chat.choices[0].message.content and '"b"' in chat.choices[0].message.content
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    message = other.messages.create(**asked, max_tokens=200, output_config=config)
    assert '"a"' in message.content[0].text
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": TOOLS}}
    more = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
    call = client.chat.completions.create(
        **asked, tools=[more, *TOOLS], tool_choice=allowed, parallel_tool_calls=False
    )
    assert call.choices[0].message.tool_calls[0].function.name == "get"


def test_ollamas_client_finds_models_and_what_they_can_do(llamas: Any) -> None:
    (listed,) = llamas.list().models
    assert listed.model == "tiny:latest" and len(listed.digest) == 64
    shown = llamas.show("tiny:latest")
    assert {"completion", "tools", "embedding"} <= set(shown.capabilities)
    assert "insert" not in shown.capabilities
    name = shown.modelinfo["general.architecture"]
    assert shown.modelinfo[f"{name}.context_length"] == 1024
    assert "im_start" in shown.template
    (running,) = llamas.ps().models
    assert (running.model, running.context_length) == ("tiny:latest", 1024)


def test_ollamas_client_generates_chats_and_embeds(llamas: Any, client: Any) -> None:
    options = {"num_predict": 4, "temperature": 0, "num_ctx": 512, "mirostat": 0, "top_k": -1}
    whole = llamas.generate("tiny", "hello", options=options)
    assert whole.eval_count == 4 and whole.done_reason == "length"
    assert whole.eval_duration > 0 and whole.prompt_eval_duration > 0
    pieces = llamas.generate("tiny", "hello", options=options, stream=True)
    assert "".join(piece.response for piece in pieces) == whole.response
    chat = llamas.chat("tiny", HELLO, options=options, logprobs=True, top_logprobs=2)
    assert chat.message.content == whole.response, "a prompt is a message"
    assert [len(score.top_logprobs) for score in chat.logprobs] == [2] * 4
    raw = llamas.generate("tiny", "ab", raw=True, options=options)
    plain = client.completions.create(model="tiny", prompt="ab", max_tokens=4, temperature=0)
    assert raw.response == plain.choices[0].text
    found = llamas.embed("tiny", ["hello", "you"]).embeddings
    assert [len(values) for values in found] == [64, 64]
    assert llamas.embeddings("tiny", "hello").embedding == pytest.approx(found[0])
    assert llamas.embed("tiny", "x" * 3000).prompt_eval_count == 1024


def test_ollamas_client_loads_a_model_and_is_refused_others(llamas: Any, address: str) -> None:
    for loaded in (llamas.generate("tiny"), llamas.chat("tiny"), llamas.chat("tiny", [])):
        assert (loaded.done, loaded.done_reason) == (True, "load")
    (line,) = post(f"{address}/api/chat", json={"model": "tiny", "messages": []}).text.splitlines()
    assert '"done":true' in line
    import ollama

    with pytest.raises(ollama.ResponseError, match="pi2 pull"):
        llamas.pull("other")
    with pytest.raises(ollama.ResponseError, match="does not exist") as missing:
        llamas.show("other")
    assert missing.value.status_code == 404
    wrong: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]},
        {"messages": HELLO, "options": {"mirostat": 2}},
    ]
    for body in wrong:
        answer = post(f"{address}/api/chat", json={"model": "tiny", **body})
        assert answer.status_code == 400 and "not supported" in answer.json()["error"]
    assert get(f"{address}/api/version").json()["version"].count(".") == 2
