"""Conversations with calls, in the shape that each template wants."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pi2.diagnostics import UserError
from pi2.engine.message_shapes import ShapedTemplate, complete_messages, shorten_id
from pi2.engine.model_texts import ChatTemplate, make_staying_child
from tests.helpers.tables import in_table

TURN = (
    "{% for m in messages %}<{{ m.role }}>{% for t in m.tool_calls or [] %}{CALL}{% endfor %}"
    "{{ m.content }}</>{% endfor %}"
)
ID = "call_0123"
MESSAGES: Sequence[dict[str, Any]] = (
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": ID, "type": "function", "function": {"name": "get", "arguments": {"a": "é"}}}
        ],
    },
    {"role": "tool", "tool_call_id": ID, "content": "42"},
)


class Counted:
    def __init__(self, source: str) -> None:
        self.shaped = ShapedTemplate(source)
        self.template = ChatTemplate(Path("t"), source, {})
        self.rendered = 0

    def render(self, messages: Sequence[Any] = MESSAGES, write_calls: Any = None) -> str:
        return self.shaped.render(messages, self._render, write_calls)

    def _render(self, messages: Sequence[Any]) -> str:
        self.rendered += 1
        return self.template.render(messages, child=CHILD)


CHILD = make_staying_child()


@pytest.fixture(scope="module", autouse=True)
def _end() -> Any:
    yield
    CHILD.close()


def with_text(messages: Sequence[dict[str, Any]] = MESSAGES) -> list[dict[str, Any]]:
    call = messages[1]["tool_calls"][0]
    function = {**call["function"], "arguments": '{"a": "é"}'}
    return [
        messages[0],
        {**messages[1], "tool_calls": [{**call, "function": function}]},
        messages[2],
    ]


WANTED = {
    "objects": ("{{ t.function.name }}{{ t.function.arguments | tojson }}", 'get{"a": "é"}'),
    "items": (
        "{{ t.function.name }}{% for k, v in t.function.arguments | items %}{{ k }}={{ v }}"
        "{% endfor %}",
        "geta=é",
    ),
    "joined as texts": ("{{ t.function.name + t.function.arguments }}", 'get{"a": "é"}'),
    "written as they are": ("{{ t.function.name }}{{ t.function.arguments }}", 'get{"a": "é"}'),
    "short ids": (
        "{% if t.id | length != 9 %}{{ raise_exception('nine!') }}{% endif %}"
        "{{ t.id }}{{ t.function.name }}{{ t.function.arguments | tojson }}",
        f'{shorten_id(ID)}get{{"a": "é"}}',
    ),
}


@pytest.mark.parametrize("case", WANTED)
def test_arguments_are_as_the_template_wants_them(case: str) -> None:
    call, expected = WANTED[case]
    counted = Counted(TURN.replace("{CALL}", call))
    whole = f"<user>Weather?</><assistant>{expected}</><tool>42</>"
    assert counted.render() == whole
    before = counted.rendered
    assert counted.render(with_text()) == whole
    assert counted.rendered == before + 1, "it remembers"


def test_a_template_that_wants_no_content_beside_calls_loses_none() -> None:
    counted = Counted(
        "{% for m in messages %}{% if m.content is none %}{% for t in m.tool_calls %}"
        "<call>{{ t.function.name }}{{ t.function.arguments }}{% endfor %}{% else %}"
        "<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
    )
    assert counted.render() == '<user>Weather?<call>get{"a": "é"}<tool>42'
    said = [MESSAGES[0], {**MESSAGES[1], "content": "Wait."}, MESSAGES[2]]
    assert counted.render(said) == '<user>Weather?<assistant>Wait.<call>get{"a": "é"}<tool>42'


def test_contents_are_lists_of_parts_for_templates_that_read_nothing_else() -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}"
        "{% endfor %}"
    )
    counted = Counted(source)
    assert counted.render(MESSAGES[:1]) == "<user>Weather?"
    assert (counted.render(MESSAGES[:1]), counted.rendered) == ("<user>Weather?", 3)


def test_thoughts_and_words_beside_a_call_are_joined_where_both_are_refused() -> None:
    counted = Counted(
        "{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}"
        "{{ raise_exception('not both') }}{% endif %}<{{ m.role }}>{{ m.thinking or '' }}|"
        "{{ m.content }}{% for t in m.tool_calls or [] %}{{ t.function.name }}"
        "{{ t.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    said = {**MESSAGES[1], "content": "Wait.", "reasoning_content": "hm"}
    found = counted.render([MESSAGES[0], said, MESSAGES[2]])
    assert found == '<user>|Weather?<assistant>hm\n\nWait.|get{"a": "é"}<tool>|42'


def test_calls_and_results_that_a_template_would_leave_out_are_written() -> None:
    counted = Counted(
        "{% for m in messages %}{% if m.role == 'user' %}U:{{ m.content }}"
        "{% elif m.role == 'assistant' %}A:{{ m.content }}{% endif %}{% endfor %}"
    )
    found = counted.render(write_calls=lambda calls: f"<call>{calls[0][0]} {calls[0][1]['a']}")
    assert found == ("U:Weather?A:<call>get éU:<tool_response>\n42\n</tool_response>")


def test_a_template_that_refuses_whatever_comes_says_why() -> None:
    counted = Counted("{{ raise_exception('never') }}")
    with pytest.raises(UserError, match="P608") as caught:
        counted.render()
    assert "never" in caught.value.diagnostics[0].message
    assert counted.rendered < 10


def test_results_have_the_names_of_their_tools() -> None:
    assert complete_messages(MESSAGES)[2]["name"] == "get"
    without = [*MESSAGES[:2], {"role": "tool", "content": "42"}]
    assert complete_messages(without)[2] | {"content": ""} == {
        "role": "tool",
        "content": "",
        "tool_call_id": ID,
        "name": "get",
    }
    thought = complete_messages([{"role": "assistant", "content": "", "reasoning_content": "hm"}])
    assert thought[0]["thinking"] == thought[0]["reasoning"] == "hm"


SAY = "<{{ m.role }}>{{ m.content }}"
REFUSE = "{{ raise_exception('no') }}{% endif %}"
ORDERS = {
    "all places": "{% for m in messages %}" + SAY + "{% endfor %}",
    "the first place only": "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    + REFUSE + SAY + "{% endfor %}",
    "the first places only": "{% set n = namespace(said=false) %}{% for m in messages %}"
    "{% if m.role == 'system' and n.said %}" + REFUSE
    + "{% if m.role != 'system' %}{% set n.said = true %}{% endif %}" + SAY + "{% endfor %}",
    "others dropped": "{% for m in messages %}{% if m.role != 'system' or loop.first %}" + SAY
    + "{% endif %}{% endfor %}",
    "none": "{% for m in messages %}{% if m.role == 'system' %}" + REFUSE + SAY + "{% endfor %}",
    "turns": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}" + REFUSE
    + SAY + "{% endfor %}", "turns after a system": "{% if messages[0].role == 'system' %}<system>"
    "{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}" + REFUSE + SAY + "{% endfor %}",
}  # fmt: skip
"""Templates by the places in which they take system messages."""


def talk(*turns: str) -> list[dict[str, Any]]:
    """Messages of texts such as ``s1``: the first letter is the role's."""
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}
    return [{"role": roles[text[0]], "content": text} for text in turns]


@in_table
def test_system_messages_stand_where_the_template_takes_them(
    places: str, turns: str, expected: str
) -> None:
    counted = Counted(ORDERS[places])
    assert counted.render(talk(*turns.split())) == expected
    assert counted.render(talk(*turns.split())) == expected


@pytest.mark.parametrize("places", ORDERS)
def test_a_prompt_is_the_beginning_of_the_next_turns(places: str) -> None:
    counted = Counted(ORDERS[places])
    prompts = [
        counted.render(talk(*turns))
        for turns in (
            ("s1", "d2", "u1"),
            ("s1", "d2", "u1", "a1", "s3", "u2"),
            ("s1", "d2", "u1", "a1", "s3", "u2", "a2", "u3", "u4", "d4"),
        )
    ]
    for before, after in pairwise(prompts):
        assert after.startswith(before) and after != before
    assert all(text in prompts[-1] for text in ("s1", "d2", "s3", "u3", "u4", "d4"))


def test_calls_of_neighbours_that_become_one_are_kept() -> None:
    counted = Counted(
        ORDERS["turns"].replace(
            SAY, SAY + "{% for t in m.tool_calls or [] %}({{ t.id }}){% endfor %}"
        )
    )
    said = [MESSAGES[0], {"role": "assistant", "content": "Wait."}, MESSAGES[1]]
    assert counted.render(said) == f"<user>Weather?<assistant>Wait.({ID})"
    parts = [{"role": "user", "content": [{"type": "text", "text": text}]} for text in "ab"]
    two = counted.render([*parts, {"role": "assistant", "content": "c"}])
    assert two.index("'a'") < two.index("'b'") < two.index("<assistant>c")
