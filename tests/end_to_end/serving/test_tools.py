"""Answers that keep to a schema, and calls of tools."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the extra serve")

from tests.helpers.scripted import make_scripted_plan
from tests.helpers.servers import HELLO, SCHEMA, TOOLS, describe_plan, make_chat_plan, serve


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
    assert message.stop_reason == "tool_use" and set(message.content[0].input) == {"a", "b"}
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


TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}<assistant>"
ONE = '<tool_call>\n{"name": "get", "arguments": {"a": 1, "b": "x"}}\n</tool_call>'
ASKED: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "tools": TOOLS,
    "temperature": 0,
}
FAMILIES = {
    "gpt-oss": (
        "<|channel|> <|message|>",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get <|constrain|>json<|message|>{"a": 1, "b": "x"}',
        ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>"],
    ),
    "tokens": (
        "<think> <tool_call>",
        f"<think>hm</think>{ONE}",
        ["<think>", "</think>", "<tool_call>", "</tool_call>"],
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_marks_that_are_tokens_are_read_and_forced(
    tmp_path: Path, family: str, openai: Any
) -> None:
    marks, answer, tokens = FAMILIES[family]
    template = f"{TURNS}{{# tools {marks} #}}"
    plan = make_scripted_plan(tmp_path, template, "<user>hi</><assistant>", answer, tokens)
    with serve([describe_plan(plan)]) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        for choice in ("auto", "required", {"type": "function", "function": {"name": "get"}}):
            found = client.chat.completions.create(
                **ASKED, tool_choice=choice, reasoning_effort="high"
            ).choices[0]
            assert found.finish_reason == "tool_calls"
            assert found.message.reasoning_content == "hm" and not found.message.content
            (call,) = found.message.tool_calls
            assert json.loads(call.function.arguments) == {"a": 1, "b": "x"}
        cut = client.chat.completions.create(**ASKED, max_tokens=len(answer) // 2).choices[0]
        assert cut.finish_reason == "length"


def test_an_answer_has_one_call_where_several_are_not_wanted(tmp_path: Path, openai: Any) -> None:
    template = f"{TURNS}{{# tools <tool_call> #}}"
    plan = make_scripted_plan(tmp_path, template, "<user>hi</><assistant>", f"{ONE}\n{ONE}")
    with serve([describe_plan(plan)]) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        for forced in ("auto", "required"):
            for parallel, count in ((True, 2), (False, 1)):
                choice = client.chat.completions.create(
                    **ASKED, parallel_tool_calls=parallel, tool_choice=forced
                ).choices[0]
                assert choice.finish_reason == "tool_calls"
                assert len(choice.message.tool_calls) == count


def test_a_template_that_joins_arguments_as_text_gets_text(tmp_path: Path, openai: Any) -> None:
    template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
        "{% for t in m.tool_calls or [] %}"
        "{{ '<tool_call>' + t.function.name + t.function.arguments + '</tool_call>' }}{% endfor %}"
        "{{ m.content }}</>{% endfor %}<assistant>"
    )
    plan = make_scripted_plan(tmp_path, template, "x", "ok")
    call = {"id": "c", "type": "function", "function": {"name": "get", "arguments": '{"a": 1}'}}
    messages: list[Any] = [
        *ASKED["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    ]
    with serve([describe_plan(plan)]) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        for _ in range(2):
            asked = {**ASKED, "messages": messages, "max_tokens": 2}
            assert client.chat.completions.create(**asked).choices[0].finish_reason == "length"
