"""Grammars of answers that must be calls, or JSON, in the marks of a model's family."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pi2.engine.answer import Constraint
from pi2.engine.sampling import Bias
from pi2.serving.answer_reader import Pair
from pi2.serving.call_patterns import CallForm, describe_kind, split_pattern
from pi2.serving.chat_facts import ChatFacts
from pi2.serving.errors import ApiError
from pi2.serving.literals import Schema, name_type
from pi2.serving.schema_grammars import (
    JSON,
    NO_VALUE,
    PYTHON,
    TERMS,
    Notation,
    SchemaWriter,
    list_members,
    quote,
    write_content,
    write_sequence,
)
from pi2.serving.schemas import list_alternatives

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from tokenizers import Tokenizer


_TERMS = rf"""
TEXT: /(?s:.+)/
SPACE: /[ \n]{{1,4}}/
{TERMS}"""


WriteMember = Callable[[Schema, str, Any], str | None]
"""Writes a parameter, of its schema's root, name and schema; None if it can have no value."""


class GrammarWriter:
    def __init__(self, facts: ChatFacts, *, prompt: str, may_reason: bool = False) -> None:
        """``may_reason``: whether the model may reason first if the prompt has not begun that."""
        self._prompt = prompt
        self._may_reason = may_reason or bool(facts.format.reasoning)
        self._marks = facts.marks
        self._facts = facts
        self._rules: dict[str, str] = {}
        """Names by bodies."""
        self._tokens = re.compile(
            "|".join(map(re.escape, sorted(filter(None, facts.marks), key=len, reverse=True)))
            or r"(?!)"
        )

    def write_calls(self, tools: Sequence[Mapping[str, Any]], *, is_parallel: bool) -> str:
        """An answer that is one call of ``tools`` (OpenAI's ``function`` objects), or several."""
        form = self._facts.format.calls[0]
        calls = " | ".join(self._write_call(form, tool) for tool in tools)
        call = self.add_rule(calls)
        begin, end = self.write_text(form.begin), self.write_text(form.end)
        if self._facts.format.is_channels:
            body = f"{begin} {call}"
        elif form.is_list or form.is_shared:
            between = self.write_text(form.between or (", " if form.is_list else ""))
            more = f"({between} {call})*" if is_parallel else ""
            opening, closing = ('"["', '"]"') if form.is_list else ("", "")
            body = f"{begin} {opening} {call} {more} {closing} {end}"
        else:
            one = self.add_rule(f"{begin} {call} {end}")
            more = f"({self.write_text(form.between)} {one})*" if is_parallel else ""
            body = f"{one} {more}"
        return self._finish(body)

    def write_json(self, schema: Mapping[str, Any]) -> str:
        """An answer that is JSON of ``schema``."""
        body = SchemaWriter(schema, JSON, self.add_rule).write(schema)
        if self._facts.format.is_channels:
            head = self.write_text("<|channel|>final")
            kind = self.write_text(" <|constrain|>json")
            body = f"{head} ({kind})? {self.write_text('<|message|>')} {body}"
        elif wraps := [pair for pair in self._facts.content if self._tokens.match(pair[0])]:
            begin, end = wraps[0]
            body = f"{self.write_text(begin)} {body} {self.write_text(end)}"
        return self._finish(body)

    def _finish(self, body: str) -> str:
        before, prompt = "", self._prompt
        opened = self._facts.find_open_reasoning(prompt)
        if self._facts.format.is_channels:
            if "<|message|>" not in prompt.rpartition("<|start|>")[2]:
                head = self.write_text("<|channel|>analysis<|message|>")
                end = self.write_until("<|end|>")
                again = self.write_text("<|start|>assistant")
                before = f"({head} {end} {again})?"
        elif opened is not None:
            before = self._write_rest(opened)
        elif (pairs := self._facts.reasoning) and self._may_reason:
            if not prompt.rstrip().endswith(tuple(end for _, end in pairs)):
                thoughts = (
                    f"{self.write_text(pair[0])} {self._write_rest(pair)}" for pair in pairs
                )
                before = f"({' | '.join(thoughts)})?"
        return (
            f"start: {before} {body}\n"
            + "\n".join(f"{name}{body}" for body, name in self._rules.items())
            + _TERMS
        )

    def _write_rest(self, pair: Pair) -> str:
        skips = "".join(f" ({self.write_text(mark)})?" for mark in self._facts.format.skip)
        return f"{self.write_until(pair[1])} SPACE?{skips}"

    def add_rule(self, body: str, options: str = "", *, is_terminal: bool = False) -> str:
        """A rule of its own, or a terminal; returns its name."""
        if len(self._rules) == _MOST_RULES:
            raise ValueError(f"it has more than {_MOST_RULES} parts")
        name = f"{'T' if is_terminal else 'r'}{len(self._rules)}"
        return self._rules.setdefault(f"{options}: {body}", name)

    def write_text(self, text: str) -> str:
        parts, at = [], 0
        for found in self._tokens.finditer(text):
            if found.start() > at:
                parts.append(quote(text[at : found.start()]))
            parts.append(f"<[{self._marks[found[0]]}]>")
            at = found.end()
        if at < len(text):
            parts.append(quote(text[at:]))
        return " ".join(parts)

    def write_until(self, close: str, content: str | None = None) -> str:
        """A text up to ``close``, which is part of it: any, or as a terminal ``content`` has it."""
        found = self._tokens.search(close.lstrip())
        space = len(close) - len(close.lstrip())
        if found is not None and found.start() == 0:
            own = content and f"({content}) {quote(close[:space])}?"
            text = "TEXT?" if own is None else self.add_rule(own, is_terminal=True)
            return f"{text} {self.write_text(close[space:])}"
        own = None if content is None else self.add_rule(content, is_terminal=True)
        # Up to the first mark that is a token, if there is one.
        cut = len(close) if found is None else space + found.start()
        rule = self.add_rule(own or "/(?s:.*)/", f"[suffix={json.dumps(close[:cut])}]")
        return f"{rule} {self.write_text(close[cut:])}"

    def _write_call(self, form: CallForm, tool: Mapping[str, Any]) -> str:
        name = str(tool["name"])
        parts = []
        for part in split_pattern(form.call):
            match part:
                case "$name":
                    parts.append(quote(name))
                case "$index":
                    parts.append("/[0-9]{1,2}/")
                case "$id":
                    parts.append("/[A-Za-z0-9]{9}/")
                case "$arguments":
                    parts.append(self._write_arguments(tool, JSON))
                case "$pairs":
                    parts.append(self._write_arguments(tool, self._describe_pairs(form)))
                case "$parameters":
                    parts.append(self._write_members(tool, "", partial(self._write_tag, form)))
                case "$keywords":
                    parts.append(self._write_members(tool, '"," " "?', self._write_keyword))
                case _:
                    parts.append(self.write_text(part))
        return self.add_rule(" ".join(parts))

    def _write_arguments(self, tool: Mapping[str, Any], notation: Notation) -> str:
        root = _find_parameters(tool)
        return SchemaWriter(root, notation, self.add_rule).write(_want_object(root))

    def _describe_pairs(self, form: CallForm) -> Notation:
        mark, rest = self.write_text(form.quote), partial(self.write_until, form.quote)
        return replace(JSON, comma='","', colon='":"', mark=mark, write_rest=rest)

    def _write_members(self, tool: Mapping[str, Any], between: str, write: WriteMember) -> str:
        """Parameters in their schema's order; optional ones may be left out."""
        root, found = _find_parameters(tool), []
        for plain in list_alternatives(root, _want_object(root)):
            members = list_members(plain, partial(write, root))
            if members is not None:
                found.append(write_sequence(members, between, self.add_rule))
        if not found:
            raise ValueError(NO_VALUE)
        return f"({' | '.join(found)})"

    def _write_tag(self, form: CallForm, root: Schema, name: str, schema: Any) -> str | None:
        opening, _, closing = form.parameter.replace("$key", name).partition("$value")
        plains = list_alternatives(root, schema)
        any_text = [plain for plain in plains if plain.get("type") == "string"]
        if "$kind" not in opening and any(write_content(plain) is None for plain in any_text):
            plains = any_text[:1]  # whatever else it may be is a text, too
        written = []
        for plain in plains:
            values = plain.get("enum", ())
            kind = name_type(values[0]) if values else plain["type"]
            value = self._write_tagged(root, plain, closing)
            if value is not None:
                head = opening.replace("$kind", describe_kind(opening, kind))
                written.append(f"{self.write_text(head)} {value}")
        return self.add_rule(" | ".join(written)) if written else None

    def _write_tagged(self, root: Schema, plain: Schema, closing: str) -> str | None:
        """A value and the text after it: texts are written as they are."""
        if values := plain.get("enum"):
            texts = (item if isinstance(item, str) else json.dumps(item) for item in values)
            body: str | None = " | ".join(map(quote, texts))
        elif plain["type"] == "string":
            return self.write_until(closing, write_content(plain))
        else:
            body = SchemaWriter(root, JSON, self.add_rule).write_plain(plain)
        return None if body is None else f"({body}) {self.write_text(closing)}"

    def _write_keyword(self, root: Schema, name: str, schema: Any) -> str | None:
        value = SchemaWriter(root, PYTHON, self.add_rule).find(schema)
        return None if value is None else self.add_rule(f"{quote(name + '=')} {value}")


def _find_parameters(tool: Mapping[str, Any]) -> Schema:
    """The schema of a tool's arguments; if it has none, there are none."""
    return tool.get("parameters") or {"type": "object", "properties": {}}


def _want_object(schema: Schema) -> Schema:
    return {"type": "object", "allOf": [schema]}


_FORBIDDEN = np.float32(-np.inf)
_MOST_RULES = 20_000
"""The grammar library ends the process at some ten thousand more."""


def load_vocabulary(tokenizer: Tokenizer, vocab: int, eos: Sequence[int]) -> LLTokenizer:
    """What the grammar library knows of a model's tokens: takes a second for large ones."""
    from llguidance import LLTokenizer

    size = max(vocab, tokenizer.get_vocab_size())
    return LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=list(eos) or None)


def write_json_grammar(
    facts: ChatFacts, schema: Mapping[str, Any], *, prompt: str, may_reason: bool = False
) -> str:
    """The grammar of JSON documents of ``schema``; ApiError 400 for an unusable schema."""
    writer = GrammarWriter(facts, prompt=prompt, may_reason=may_reason)
    return _compile(lambda: writer.write_json(schema), "response_format")


def write_call_grammar(
    facts: ChatFacts,
    tools: Sequence[Mapping[str, Any]],
    *,
    prompt: str,
    is_parallel: bool,
    may_reason: bool = False,
) -> str:
    """The grammar of an answer that calls ``tools``: one, or with ``is_parallel`` one or more."""
    writer = GrammarWriter(facts, prompt=prompt, may_reason=may_reason)
    return _compile(lambda: writer.write_calls(tools, is_parallel=is_parallel), "tools")


def _set_limits() -> LLParserLimits:
    """Enough for choices among some ten thousand texts, keys or tools."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_items_in_row=100_000, step_max_items=2_000_000)


def _compile(write: Callable[[], str], param: str) -> str:
    from llguidance import LLMatcher

    try:
        grammar: str = LLMatcher.grammar_from_lark(write())
        problem = LLMatcher.validate_grammar(grammar, limits=_set_limits())
    except (ValueError, re.error, RecursionError) as error:
        problem = str(error)
    if problem:
        what = "JSON schema" if param == "response_format" else "parameters of the tools"
        raise ApiError(400, f"the {what} cannot be used: {problem}", param=param)
    return grammar


class Grammar(Constraint):
    """Lets those tokens come that go on with a grammar."""

    def __init__(self, matcher: LLMatcher, size: int) -> None:
        self._matcher = matcher
        self._size = size

    def find_bias(self) -> Bias | None:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: self._size].astype(bool)
        if not allowed.any():
            if self._matcher.is_stopped() and not self._matcher.is_error():
                return None  # it has ended, and the request ignores end tokens
            raise self._explain("no token goes on with it")
        return np.where(allowed, np.float32(0), _FORBIDDEN)

    def accept(self, token: int) -> None:
        if self._matcher.is_stopped() and not self._matcher.is_error():
            return
        if not self._matcher.consume_token(token):
            raise self._explain(f"token {token} does not go on with it")

    def _explain(self, problem: str) -> RuntimeError:
        said = _read_error(self._matcher)
        return RuntimeError(f"the grammar of an answer has failed: {problem}; {said}")


def _read_error(matcher: LLMatcher) -> str:
    return " ".join(matcher.get_error().partition("<backtrace>")[0].split())[:300]


def make_constraint(vocabulary: LLTokenizer, grammar: str, size: int) -> Callable[[], Constraint]:
    from llguidance import LLMatcher

    begun = LLMatcher(vocabulary, grammar, limits=_set_limits())
    if begun.is_error():
        raise ApiError(400, f"the schema of the answer is too large: {_read_error(begun)}")
    return lambda: Grammar(begun.deep_copy(), size)
