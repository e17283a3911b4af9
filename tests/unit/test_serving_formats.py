"""Every format of answers: reasoning apart, calls as calls, and nothing that is said lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pi2.serving.answer_reader import find_format
from tests.helpers.answers import (
    ARGUMENTS,
    FORMATS,
    OTHER,
    TOOL,
    describe,
    read,
    write_reasoning,
    write_template,
)

SIZES = (1, 3, 10**6)
ONE = [("get_weather", dict(ARGUMENTS))]
TWO = [*ONE, ("other", {})]


def check(name: str, text: str, expected: tuple[str, str, list[Any]]) -> None:
    """Check what is read of an answer, however it comes."""
    facts = describe(FORMATS[name])
    for size in SIZES:
        reader = facts.make_reader(tools=[TOOL, OTHER])
        assert read(reader, text, size) == expected, (size, text)


@pytest.mark.parametrize("name", FORMATS)
def test_a_family_is_known_by_its_template(name: str) -> None:
    assert find_format(write_template(FORMATS[name])).name == name


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_calls(name: str) -> None:
    format = FORMATS[name]
    form = format.calls[0]
    written = form.write(ONE)
    check(name, written, ("", "", ONE))
    if format.is_channels:
        return  # of these, every answer has one
    check(name, form.write(TWO), ("", "", TWO))
    if form.begin:
        check(name, f"Let me see.\n\n{written}", ("", "Let me see.", ONE))
        check(name, f"{written}\nDone.", ("", "Done.", ONE))


@pytest.mark.parametrize("name", FORMATS)
def test_reasoning_is_apart_and_its_marks_are_text(name: str) -> None:
    facts = describe(FORMATS[name])
    written = FORMATS[name].calls[0].write(ONE)
    said = f"I could {'<|call|>' if facts.format.is_channels else written} now."
    reasoning = write_reasoning(facts, said)
    if reasoning is not None:
        check(name, reasoning + written, (said, "", ONE))


@pytest.mark.parametrize("name", FORMATS)
def test_marks_within_an_argument_are_its_text(name: str) -> None:
    form = FORMATS[name].calls[0]
    marks = (form.begin, form.end, "</parameter>", "<tool_call>", "</arg_value>", "<|end|>", "```")
    for mark in filter(None, marks):
        calls = [("get_weather", {"city": f"a {mark} b", "zip": "1"})]
        check(name, form.write(calls), ("", "", calls))


@pytest.mark.parametrize("name", FORMATS)
def test_a_cut_call_is_content_as_it_was_written(name: str) -> None:
    form = FORMATS[name].calls[0]
    written = form.write(ONE)
    last = len(form.end) + 4
    for cut in (len(written) // 3, len(written) // 2, len(written) - last):
        check(name, written[:cut], ("", written[:cut], []))


@pytest.mark.parametrize("name", FORMATS)
def test_without_tools_a_call_is_content(name: str) -> None:
    format = FORMATS[name]
    written = format.calls[0].write(ONE)
    reader = describe(format).make_reader()
    assert read(reader, written, 3) == ("", written, [])


ANSWERS: dict[str, tuple[str, str, tuple[str, str, list[Any]]]] = {
    "a channel for each": (
        "channels",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "Let me see.<|end|><|start|>assistant<|channel|>commentary to=functions.other "
        '<|constrain|>json<|message|>{"a":"<|call|>"}',
        ("hm", "Let me see.", [("other", {"a": "<|call|>"})]),
    ),
    "several calls in channels": (
        "channels",
        '<|channel|>commentary to=functions.other<|message|>{"a": 1}<|call|><|start|>assistant'
        ' to=functions.other<|channel|>analysis code<|message|>{"a": 2}<|end|>',
        ("", "", [("other", {"a": 1}), ("other", {"a": 2})]),
    ),
    "a channel's mark in what is said": (
        "channels",
        "<|channel|>final<|message|>After <|end|> comes more.",
        ("", "After <|end|> comes more.", []),
    ),
    "a recipient that nobody knows": (
        "channels",
        "<|channel|>commentary to=browser.open<|message|>{}",
        ("", "<|channel|>commentary to=browser.open<|message|>{}", []),
    ),
    "a text without channels": ("channels", "Assist me.", ("", "Assist me.", [])),
    "Mistral's old list": (
        "mistral",
        '[TOOL_CALLS] [{"name": "other", "arguments": {"a": "]"}}, {"name": "other"}]',
        ("", "", [("other", {"a": "]"}), ("other", {})]),
    ),
    "Mistral's names with ids": (
        "mistral_list",
        '[TOOL_CALLS]other[CALL_ID]123456789[ARGS]{"a": 1}[TOOL_CALLS]other[ARGS]{}',
        ("", "", [("other", {"a": 1}), ("other", {})]),
    ),
    "what small Qwens write": (
        "hermes",
        'Sure:\n```json\n{"name": "other", "arguments": {"a": "```"}}\n```\n',
        ("", "Sure:", [("other", {"a": "```"})]),
    ),
    "JSON that is no call": (
        "hermes",
        'Look:\n```json\n{"name": "Ann", "arguments": {}}\n```\nDone.',
        ("", 'Look:\n```json\n{"name": "Ann", "arguments": {}}\n```\nDone.', []),
    ),
    "a call that is shown in a fence": (
        "hermes",
        'Write\n```\n<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>\n```\nso.',
        (
            "",
            'Write\n```\n<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>\n```\nso.',
            [],
        ),
    ),
    "a call after a fence that is never closed": (
        "hermes",
        '```python\nx = 1\n<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>',
        ("", "```python\nx = 1", [("other", {})]),
    ),
    "no call": (
        "hermes",
        "x <tool_call>no JSON</tool_call> y <tool_cal",
        ("", "x <tool_call>no JSON</tool_call> y <tool_cal", []),
    ),
    "functions where JSON is usual": (
        "hermes",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nUlm\n</parameter>\n</function>\n"
        "</tool_call>",
        ("", "", [("get_weather", {"city": "Ulm"})]),
    ),
    "objects one after the other": (
        "llama3",
        '{"name": "other", "parameters": {}}; {"name": "other", "parameters": {"a": 1}}',
        ("", "", [("other", {}), ("other", {"a": 1})]),
    ),
    "Llama's own functions": (
        "llama3",
        '<|python_tag|>other.call(query="a b")',
        ("", "", [("other", {"query": "a b"})]),
    ),
    "an object that answers": ("llama3", '{"name": "Ann"}', ("", '{"name": "Ann"}', [])),
    "texts in single quotes that are not escaped": (
        "lfm2",
        "<|tool_call_start|>[other(a='it's', b=None), other(c=[1, -2.5, {'k': True}])]"
        "<|tool_call_end|>",
        ("", "", [("other", {"a": "it's", "b": None}), ("other", {"c": [1, -2.5, {"k": True}]})]),
    ),
    "a function without parameters": (
        "glm",
        "<tool_call>other</tool_call>",
        ("", "", [("other", {})]),
    ),
    "parameters whose kind the model states": (
        "deepseek32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="other">\n'
        '<｜DSML｜parameter name="a" string="true">1</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="b" string="false">1</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        ("", "", [("other", {"a": "1", "b": 1})]),
    ),
    "what is said between marks": (
        "cohere",
        "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>Hi <|END_RESPONSE|> there"
        "<|END_RESPONSE|>",
        ("hm", "Hi <|END_RESPONSE|> there", []),
    ),
    "parts with a head each": (
        "solar",
        "<|think|>hm<|end|><|begin|>assistant<|content|>Hi<|end|>",
        ("hm", "Hi", []),
    ),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_answers_as_models_write_them(case: str) -> None:
    check(*ANSWERS[case])


def test_a_prompt_may_have_begun_the_reasoning() -> None:
    facts = describe(FORMATS["qwen_coder"])
    for prompt in ("<|assistant|><think>", "<|assistant|>\n<think>\n"):
        reader = facts.make_reader(prompt=prompt)
        assert read(reader, "hm\n</think>\n\nYes.", 2) == ("hm\n", "Yes.", [])
    assert read(facts.make_reader(prompt="<think>\n\n</think>\n"), "Yes.", 1)[1] == "Yes."
    assert read(facts.make_reader(prompt="<think>"), "cut", 1) == ("cut", "", [])
    assert read(facts.make_reader(), "Yes <think>.", 1) == ("", "Yes <think>.", [])
    oss = describe(FORMATS["channels"])
    prompt = "<|start|>assistant<|channel|>analysis<|message|>"
    text = "hm<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    assert read(oss.make_reader(prompt=prompt), text, 1) == ("hm", "Yes.", [])


def test_marks_that_no_format_knows_are_shown() -> None:
    vocabulary = {"<|new_mark|>": 7, "<think>": 8}
    facts = describe(FORMATS["hermes"], vocabulary)
    assert facts.shown_ids == {7, 8}
    assert read(facts.make_reader(tools=[OTHER]), "a<|new_mark|>b", 1)[1] == "a<|new_mark|>b"


TYPES: list[tuple[Any, str, Any]] = [
    ({"type": "string"}, "12345", "12345"),
    ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
    ({"type": "string"}, "true", "true"),
    ({"type": "integer"}, "5", 5),
    ({"type": "integer"}, "5.0", 5),
    ({"type": "integer"}, "five", "five"),
    ({"type": "number"}, "-1e3", -1000.0),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "1", "1"),
    ({"type": "null"}, "null", None),
    ({"type": "object"}, '{"a": [1]}', {"a": [1]}),
    ({"type": "object"}, "{'a': None}", {"a": None}),
    ({"type": "array"}, '["a"]', ["a"]),
    ({"type": "array"}, "a, b", "a, b"),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["string", "null"]}, "12", "12"),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "12", 12),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "x", "x"),
    ({"$ref": "#/$defs/Text"}, "12", "12"),
    ({"$ref": "#/$defs/Count"}, "12", 12),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": [1, 2]}, "1", 1),
    ({"const": True}, "true", True),
    ({"properties": {}}, "{}", {}),
    ({"items": {}}, "[]", []),
    ({}, "12", 12),
    ({}, "a b", "a b"),
    ({}, '"a"', '"a"'),
    (None, '{"a": 1}', {"a": 1}),
]


@pytest.mark.parametrize(("schema", "text", "expected"), TYPES)
def test_the_schema_decides_the_type_of_a_parameter(
    schema: dict[str, Any] | None, text: str, expected: object
) -> None:
    defs = {"Text": {"type": "string"}, "Count": {"type": "integer"}}
    properties = {} if schema is None else {"p": schema}
    tool = {"name": "f", "parameters": {"type": "object", "properties": properties, "$defs": defs}}
    for name in ("qwen_coder", "glm", "minimax", "seed"):
        form = FORMATS[name].calls[0]
        written = form.write([("f", {"p": text})])
        reader = describe(FORMATS[name]).make_reader(tools=[tool])
        assert read(reader, written, 1)[2] == [("f", {"p": expected})]


def test_a_text_keeps_its_white_space() -> None:
    code = "\n  def f():\n\n    return 1\n"
    for name in ("qwen_coder", "glm", "minimax", "deepseek32"):
        calls = [("get_weather", {"city": code})]
        check(name, FORMATS[name].calls[0].write(calls), ("", "", calls))


def test_formats_are_listed_with_the_package() -> None:
    folder = Path(__file__).parents[2] / "pi2/serving/formats"
    named = [line for file in folder.glob("*.toml") for line in file.read_text().splitlines()]
    assert sum(line.startswith("[[formats]]") for line in named) == len(FORMATS) + 1


@pytest.mark.parametrize("name", FORMATS)
def test_long_arguments_are_read_as_they_come(name: str) -> None:
    form = FORMATS[name].calls[0]
    code = "\n".join(f"x[{n}] = {{'a': ({n}, \"{n}\")}}  # </b>" for n in range(150))
    calls = [("get_weather", {"city": code}), ("other", {})]
    written = form.write(calls[:1] if FORMATS[name].is_channels else calls)
    reader = describe(FORMATS[name]).make_reader(tools=[TOOL, OTHER])
    assert read(reader, written, 5)[2] == calls[: 1 if FORMATS[name].is_channels else 2]
