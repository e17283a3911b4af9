"""Answers that keep to a schema, and calls of tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the extra serve")

from tests.helpers.servers import (
    HELLO,
    SCHEMA,
    TOOLS,
    describe_plan,
    make_chat_plan,
    serve,
)


def test_answers_keep_to_a_json_schema(client: Any, openai: Any) -> None:
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
def test_calls_are_read_again_as_they_were_sampled(
    tmp_path: Path, template: str, openai: Any
) -> None:
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
