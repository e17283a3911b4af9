"""Answers that must be calls or JSON, in the marks of every format, whatever tokens these are."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from pi2.engine.answer import Constraint
from pi2.serving.call_grammars import (
    Grammar,
    load_vocabulary,
    make_constraint,
    write_call_grammar,
    write_json_grammar,
)
from pi2.serving.chat_facts import ChatFacts, describe_family
from pi2.serving.errors import ApiError
from tests.helpers.answers import (
    ARGUMENTS,
    END,
    FORMATS,
    OTHER,
    TOOL,
    Kind,
    list_marks,
    make_tokenizer,
    read,
    write_reasoning,
    write_template,
)
from tests.helpers.slow import keep_quick

pytest.importorskip("llguidance")
KINDS: tuple[Kind, ...] = ("special", "added", "plain")
CALL: tuple[str, Any] = ("get_weather", dict(ARGUMENTS))


class Family:
    """A format with a tokenizer that has its marks as tokens of a kind."""

    def __init__(self, name: str, kind: Kind) -> None:
        self.format = FORMATS[name]
        marks = list_marks(self.format)
        self.tokenizer = make_tokenizer([] if kind == "plain" else marks, kind)
        added = self.tokenizer.get_added_tokens_decoder()
        self.end = self.find(END)
        self.facts: ChatFacts = describe_family(
            write_template(self.format),
            {token.content: number for number, token in added.items()},
            frozenset(number for number, token in added.items() if token.special),
            frozenset([self.end]),
        )
        self.vocabulary = load_vocabulary(self.tokenizer, 0, [self.end])
        self._makers: dict[str, Callable[[], Constraint]] = {}

    def find(self, mark: str) -> int:
        token = self.tokenizer.token_to_id(mark)
        assert token is not None
        return token

    def follow(self, grammar: str, text: str) -> str | None:
        """Where a grammar forbids a text or its end; None if it lets it be."""
        if grammar not in self._makers:
            size = self.tokenizer.get_vocab_size()
            self._makers[grammar] = make_constraint(self.vocabulary, grammar, size)
        constraint = self._makers[grammar]()
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        for place, token in enumerate([*ids, self.end]):
            bias = constraint.find_bias()
            if bias is None or bias[token] != 0:
                return str(self.tokenizer.decode(ids[:place], skip_special_tokens=False))
            constraint.accept(token)
        return None

    def read(self, text: str, prompt: str = "") -> tuple[str, str, list[tuple[str, Any]]]:
        return read(self.facts.make_reader(tools=[TOOL, OTHER], prompt=prompt), text, 1)


@pytest.mark.parametrize("kind", keep_quick(KINDS, KINDS[:1]))
@pytest.mark.parametrize("name", FORMATS)
def test_forced_calls_are_written_in_the_familys_own_marks(name: str, kind: Kind) -> None:
    family = Family(name, kind)
    form = family.format.calls[0]
    calls: list[list[tuple[str, Any]]] = [[CALL], [("get_weather", {"city": "P"})], [("other", {})]]
    grammar = write_call_grammar(family.facts, [TOOL, OTHER], prompt="", is_parallel=True)
    several = [CALL, ("other", {})]
    for wanted in calls if family.format.is_channels else [*calls, several]:
        written = form.write(wanted)
        assert family.follow(grammar, written) is None
        assert family.read(written) == ("", "", wanted)
    thought = write_reasoning(family.facts, "hm")
    if thought is not None:
        asked: dict[str, Any] = {"prompt": "", "is_parallel": True, "may_reason": True}
        thinking = write_call_grammar(family.facts, [TOOL, OTHER], **asked)
        assert family.follow(thinking, thought + form.write([CALL])) is None
    assert family.follow(grammar, "Hello") is not None
    assert family.follow(grammar, form.write([("nobody", {})])) is not None
    assert family.follow(grammar, form.write([("get_weather", {})])) is not None
    single = write_call_grammar(family.facts, [TOOL, OTHER], prompt="", is_parallel=False)
    assert family.follow(single, form.write([CALL])) is None
    if not family.format.is_channels:
        assert family.follow(single, form.write(several)) is not None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["channels", "hermes", "cohere", "mistral", "gemma4", "kimi3"])
def test_forced_json_is_what_is_said(name: str, kind: Kind) -> None:
    family = Family(name, kind)
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    grammar = write_json_grammar(family.facts, schema, prompt="", may_reason=True)
    body, before, after = '{"a": 1}', "", ""
    if family.format.is_channels:
        before = "<|channel|>final <|constrain|>json<|message|>"
    elif family.facts.content and family.facts.content[0][0].startswith(tuple(family.facts.marks)):
        before, after = family.facts.content[0]
    thought = write_reasoning(family.facts, "hm") or ""
    for text in (before + body + after, thought + before + body + after):
        assert family.follow(grammar, text) is None and family.read(text)[1:] == (body, [])
    assert family.follow(grammar, before + '{"a": "x"}' + after) is not None


@pytest.mark.parametrize("kind", KINDS)
def test_a_reasoning_that_the_prompt_began_goes_on(kind: Kind) -> None:
    family = Family("glm", kind)
    family.facts = describe_family(
        write_template(family.format), family.facts.marks, family.facts.shown_ids, frozenset()
    )
    prompt = "<|assistant|>\n<think>"
    grammar = write_call_grammar(family.facts, [OTHER], prompt=prompt, is_parallel=False)
    written = family.format.calls[0].write([("other", {})])
    text = f"I think < so.</think>\n\n{written}"
    assert family.follow(grammar, text) is None
    assert family.read(text, prompt) == ("I think < so.", "", [("other", {})])
    assert family.follow(grammar, written) is not None, "it has not ended"


def test_a_token_that_does_not_go_on_is_an_error() -> None:
    from llguidance import LLMatcher

    family = Family("hermes", "special")
    grammar = write_json_grammar(family.facts, {"type": "object"}, prompt="")
    constraint = Grammar(LLMatcher(family.vocabulary, grammar), 300)
    with pytest.raises(RuntimeError, match="does not go on with it"):
        constraint.accept(family.find("<tool_call>"))


def test_tools_that_state_nothing_else_have_no_other_parameters() -> None:
    family = Family("hermes", "plain")
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}
    grammar = write_call_grammar(family.facts, [tool], prompt="", is_parallel=False)
    form = family.format.calls[0]
    assert family.follow(grammar, form.write([("f", {"a": 1})])) is None
    assert family.follow(grammar, form.write([("f", {"b": 1})])) is not None
    free = {"name": "f", "parameters": {"type": "object"}}
    grammar = write_call_grammar(family.facts, [free], prompt="", is_parallel=False)
    assert family.follow(grammar, form.write([("f", {"b": 1})])) is None


def test_schemas_that_cannot_be_kept_to_are_the_clients_mistake() -> None:
    facts = Family("hermes", "plain").facts
    with pytest.raises(ApiError, match="JSON schema cannot be used") as caught:
        write_json_grammar(facts, {"type": "nonsense"}, prompt="")
    assert caught.value.status == 400
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "?"}}}}
    with pytest.raises(ApiError, match="parameters of the tools cannot be used"):
        write_call_grammar(facts, [tool], prompt="", is_parallel=False)


def test_json_may_stand_with_or_without_spaces() -> None:
    family = Family("hermes", "plain")
    grammar = write_json_grammar(family.facts, {"type": "object"}, prompt="")
    value = {"a": [1, "x"], "b": None}
    for text in (json.dumps(value), json.dumps(value, separators=(",", ":"))):
        assert family.follow(grammar, text) is None
    assert family.follow(grammar, "{" + " " * 9) is not None, "it would never end"
