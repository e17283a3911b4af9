"""How the text of an answer is divided into reasoning, content and calls of tools."""

from __future__ import annotations

import json

import pytest

from pi2.serving.answer_reader import AnswerReader, Fragment
from pi2.serving.replay import Replay
from pi2.serving.tool_formats import (
    BARE,
    BARS,
    BRACKETS,
    FENCED,
    TAGGED,
    ToolCall,
    ToolFormat,
    find_tool_format,
    knows_tools,
)

THINK = ("<think>", "</think>")
WEATHER = '{"city": "Ulm", "days": 2}'

WRITTEN = {
    "tagged": (TAGGED, f'<tool_call>\n{{"name": "w", "arguments": {WEATHER}}}\n</tool_call>'),
    "functions": (
        TAGGED,
        "<tool_call>\n<function=w>\n<parameter=city>\nUlm\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>",
    ),
    "brackets": (BRACKETS, f'[TOOL_CALLS][{{"name": "w", "arguments": {WEATHER}}}]'),
    "brackets with names": (BRACKETS, f"[TOOL_CALLS]w[ARGS]{WEATHER}"),
    "bare": (BARE, f'{{"name": "w", "parameters": {WEATHER}}}'),
    "bare after a mark": (BARE, f'<|python_tag|>{{"name": "w", "parameters": {WEATHER}}}'),
    "bars": (BARS, f'<|tool_call|>[{{"name": "w", "arguments": {WEATHER}}}]<|/tool_call|>'),
    "fenced": (
        FENCED,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>w\n```json\n"
        f"{WEATHER}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
}


def read(reader: AnswerReader, text: str, size: int) -> tuple[str, str, list[ToolCall]]:
    """Reasoning, content and calls of ``text`` that comes in pieces."""
    items = []
    for start in range(0, len(text), size):
        items += reader.push(text[start : start + size])
    items += reader.flush()
    parts = {"reasoning": "", "content": ""}
    for item in items:
        if isinstance(item, Fragment):
            parts[item.part] += item.text
    calls = [item for item in items if isinstance(item, ToolCall)]
    return parts["reasoning"], parts["content"], calls


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize("name", WRITTEN)
def test_calls_of_every_family_are_read_however_they_come(name: str, size: int) -> None:
    format, text = WRITTEN[name]
    _, content, calls = read(AnswerReader(tools=format), text, size)
    assert calls == [ToolCall("w", WEATHER)]
    assert content == ""
    before = "" if format is BARE and not text.startswith("<") else "Let me see. "
    if before:
        _, content, calls = read(AnswerReader(tools=format), before + text, size)
        assert calls == [ToolCall("w", WEATHER)]
        assert content == before


@pytest.mark.parametrize("size", [1, 1000])
def test_several_calls_are_several(size: int) -> None:
    one = WRITTEN["tagged"][1]
    _, content, calls = read(AnswerReader(tools=TAGGED), f"{one}\n{one}", size)
    assert len(calls) == 2
    assert content == ""
    two = '[TOOL_CALLS][{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]'
    _, _, calls = read(AnswerReader(tools=BRACKETS), two, size)
    assert [call.name for call in calls] == ["a", "b"]
    bare = '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}'
    assert [call.name for call in read(AnswerReader(tools=BARE), bare, size)[2]] == ["a", "b"]


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_what_is_no_call_is_shown_as_it_is(size: int) -> None:
    for text in ("a <tool_cal b", "x <tool_call>no JSON</tool_call>", "{not a call"):
        shown = text.replace("</tool_call>", "")
        assert read(AnswerReader(tools=TAGGED), text, size)[1] == shown
    assert read(AnswerReader(tools=BARE), '{"a": 1}', size)[1] == "<|python_tag|>" * 0 + '{"a": 1}'
    assert read(AnswerReader(), "<tool_call>{}</tool_call>", size)[1] == "<tool_call>{}</tool_call>"


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_reasoning_is_apart(size: int) -> None:
    text = "<think>\nhm, <b>\n</think>\n\nYes."
    assert read(AnswerReader(reasoning=THINK), text, size)[:2] == ("hm, <b>\n", "Yes.")
    # The prompt may have begun it, and a model need not reason, or end it.
    inside = AnswerReader(reasoning=THINK, begins_inside=True)
    assert read(inside, "hm\n</think>\n\nYes.", size)[:2] == ("hm\n", "Yes.")
    assert read(AnswerReader(reasoning=THINK), "Yes <think>.", size)[:2] == ("", "Yes <think>.")
    open_end = AnswerReader(reasoning=THINK, begins_inside=True)
    assert read(open_end, "hm", size)[:2] == ("hm", "")
    both = AnswerReader(reasoning=THINK, tools=TAGGED)
    text = "<think>a</think>\n" + WRITTEN["tagged"][1]
    assert read(both, text, size) == ("a", "", [ToolCall("w", WEATHER)])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if tools %}<tool_call>{% endif %}", TAGGED),
        ("{{ '[TOOL_CALLS]' }}", BRACKETS),
        ("<|python_tag|>", BARE),
        ("<|tool_call|>", BARS),
        ("<｜tool▁calls▁begin｜>", FENCED),
        ("{{ messages[0].content }}", TAGGED),
    ],
)
def test_the_family_is_known_by_its_template(template: str, expected: ToolFormat) -> None:
    assert find_tool_format(template) is expected
    assert knows_tools(template) == ("tools" in template)


def test_a_conversation_that_goes_on_has_the_tokens_that_were_sampled() -> None:
    def encode(text: str) -> list[int]:
        return [ord(sign) for sign in text]

    replay = Replay()
    assert replay.encode("ab", encode) == [97, 98]
    # The model has drawn one token for both letters.
    replay.note("ab", [1])
    replay.note("abcd", [1, 2])
    assert replay.encode("abc", encode) == [1, 99]
    assert replay.encode("abcde", encode) == [1, 2, 101]
    assert replay.encode("abcd", encode) == [1, 2]
    assert replay.encode("xab", encode) == [120, 97, 98]
    for number in range(64):
        replay.note(f"other {number}", [number])
    assert replay.encode("abc", encode) == [97, 98, 99], "only the latest are remembered"


def test_calls_are_remembered_by_what_they_call() -> None:
    replay = Replay()
    replay.note_calls("well\n", [("get", {"b": 1, "a": [2]})], "well\n<tool_call>{...}")
    assert replay.recall("well", [("get", {"a": [2], "b": 1})]) == "well\n<tool_call>{...}"
    assert replay.recall("well", [("get", {"a": [2], "b": 2})]) is None
    assert replay.recall("", [("get", {"a": [2], "b": 1})]) is None
    for number in range(1024):
        replay.note_calls("", [("get", number)], "x")
    assert replay.recall("well", [("get", {"a": [2], "b": 1})]) is None


@pytest.mark.parametrize("kind", [TAGGED, BRACKETS, BARE, BARS, FENCED], ids=lambda kind: kind.name)
def test_calls_that_are_written_are_read_as_the_same(kind: ToolFormat) -> None:
    written = kind.write_calls([("w", json.loads(WEATHER))])
    reasoning, content, calls = read(AnswerReader(tools=kind), written, 5)
    assert (reasoning, content.strip()) == ("", "")
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("w", json.loads(WEATHER))
    ]
