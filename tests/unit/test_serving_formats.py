"""Every format of answers: reasoning apart, calls as calls, and nothing that is said lost."""

import json
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
from tests.helpers.slow import keep_quick

SIZES = (1, 3, 10**6)
ONE = [("get_weather", dict(ARGUMENTS))]
TWO = [*ONE, ("other", {})]
WRITTEN = json.loads((Path(__file__).parents[1] / "golden/answers.json").read_text("utf-8"))
"""Answers as models write them, with what is read of them; values of parameters by schema."""


def check(name: str, text: str, expected: tuple[str, str, list[Any]]) -> None:
    facts = describe(FORMATS[name])
    for size in SIZES:
        assert read(facts.make_reader(tools=[TOOL, OTHER]), text, size) == expected, (size, text)


@pytest.mark.parametrize("name", FORMATS)
def test_a_family_is_known_by_its_template(name: str) -> None:
    assert find_format(write_template(FORMATS[name])).name == name


@pytest.mark.parametrize("name", keep_quick(FORMATS, list(FORMATS)[::3]))
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


@pytest.mark.parametrize("name", keep_quick(FORMATS, list(FORMATS)[1::3]))
def test_a_whole_call_that_is_cut_in_its_closing_mark_is_a_call(name: str) -> None:
    """An answer of the most tokens may end there."""
    form = FORMATS[name].calls[0]
    written = form.write(ONE)
    cuts = [written[:-missing] for missing in range(1, len(form.end))]
    for cut in cuts if written.endswith(form.end) else []:
        reasoning, content, calls = read(
            describe(FORMATS[name]).make_reader(tools=[TOOL, OTHER]), cut, 3
        )
        assert (reasoning, content, calls) in (("", "", ONE), ("", cut, [])), cut


@pytest.mark.parametrize("name", FORMATS)
def test_without_tools_a_call_is_content(name: str) -> None:
    format = FORMATS[name]
    written = format.calls[0].write(ONE)
    assert read(describe(format).make_reader(), written, 3) == ("", written, [])


@pytest.mark.parametrize("answer", WRITTEN["answers"], ids=lambda answer: answer["case"])
def test_answers_as_models_write_them(answer: dict[str, Any]) -> None:
    calls = [(name, arguments) for name, arguments in answer["calls"]]
    check(answer["format"], answer["text"], (answer["reasoning"], answer["content"], calls))


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
    facts = describe(FORMATS["hermes"], {"<|new_mark|>": 7, "<think>": 8})
    assert facts.shown_ids == {7, 8}
    assert read(facts.make_reader(tools=[OTHER]), "a<|new_mark|>b", 1)[1] == "a<|new_mark|>b"


@pytest.mark.parametrize("written", WRITTEN["types"], ids=lambda written: written["text"])
def test_the_schema_decides_the_type_of_a_parameter(written: dict[str, Any]) -> None:
    schema, text, expected = written["schema"], written["text"], written["expected"]
    defs = {"Text": {"type": "string"}, "Count": {"type": "integer"}}
    properties = {} if schema is None else {"p": schema}
    tool = {"name": "f", "parameters": {"type": "object", "properties": properties, "$defs": defs}}
    for name in ("qwen_coder", "glm", "minimax", "seed"):
        call = FORMATS[name].calls[0].write([("f", {"p": text})])
        reader = describe(FORMATS[name]).make_reader(tools=[tool])
        assert read(reader, call, 1)[2] == [("f", {"p": expected})]


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
