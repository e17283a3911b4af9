"""Grammars of answers that must be calls, or JSON, in the marks of a model's family."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pi2.engine.answer import Bias, Constraint
from pi2.serving.answer_reader import Pair
from pi2.serving.call_patterns import CallForm, describe_kind, split_pattern
from pi2.serving.chat_facts import ChatFacts
from pi2.serving.errors import ApiError
from pi2.serving.literals import Schema, list_parameters, list_types, resolve, write_literal

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from tokenizers import Tokenizer


COMPACT: Mapping[str, Any] = {
    "x-guidance": {"whitespace_flexible": True, "whitespace_pattern": " ?"}
}
"""JSON on one line, as models are used to it: with any white space, some would never end."""
_TERMS = r"""
TEXT: /(?s:.+)/
SPACE: /[ \n]{1,4}/
WORD: /[A-Za-z0-9_.:-]+/
pyvalue: pytext | pynumber | pyword | pylist | pydict
pytext: %json {"type": "string"}
pynumber: %json {"type": "number"}
pyword: "True" | "False" | "None"
pylist: "[" (pyvalue (", " pyvalue)*)? "]"
pydict: "{" (pytext ": " pyvalue (", " pytext ": " pyvalue)*)? "}"
"""


class GrammarWriter:
    """Writes a grammar, rule by rule."""

    def __init__(self, facts: ChatFacts, *, prompt: str, may_reason: bool = False) -> None:
        """``may_reason``: whether the model may reason first if the prompt has not begun that."""
        self._prompt = prompt
        self._may_reason = may_reason or bool(facts.format.reasoning)
        self._marks = facts.marks
        self._facts = facts
        self._rules: list[str] = []
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
        body = self.write_json_value(schema, schema)
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
        return f"start: {before} {body}\n" + "\n".join(self._rules) + _TERMS

    def _write_rest(self, pair: Pair) -> str:
        skips = "".join(f" ({self.write_text(mark)})?" for mark in self._facts.format.skip)
        return f"{self.write_until(pair[1])} SPACE?{skips}"

    def add_rule(self, body: str, options: str = "") -> str:
        """A rule of its own; returns its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def write_text(self, text: str) -> str:
        parts, at = [], 0
        for found in self._tokens.finditer(text):
            if found.start() > at:
                parts.append(_quote(text[at : found.start()]))
            parts.append(f"<[{self._marks[found[0]]}]>")
            at = found.end()
        if at < len(text):
            parts.append(_quote(text[at:]))
        return " ".join(parts)

    def write_until(self, close: str) -> str:
        """Any text up to ``close``, which is part of it."""
        found = self._tokens.search(close.lstrip())
        if found is not None and found.start() == 0:
            return f"TEXT? {self.write_text(close.lstrip())}"
        # Up to the first mark that is a token, if there is one.
        cut = len(close) if found is None else len(close) - len(close.lstrip()) + found.start()
        rule = self.add_rule("/(?s:.*)/", f"[suffix={json.dumps(close[:cut])}]")
        return f"{rule} {self.write_text(close[cut:])}"

    def write_json_value(self, root: Schema, schema: Any) -> str:
        """JSON of a schema that may refer to parts of ``root``."""
        own = dict(schema) if isinstance(schema, Mapping) else {}
        for key in ("$defs", "definitions"):
            if key in root:
                own.setdefault(key, root[key])
        return self.add_rule(f"%json {json.dumps({**own, **COMPACT})}")

    def _write_call(self, form: CallForm, tool: Mapping[str, Any]) -> str:
        name = str(tool["name"])
        parts = []
        for part in split_pattern(form.call):
            match part:
                case "$name":
                    parts.append(_quote(name))
                case "$index":
                    parts.append("/[0-9]{1,2}/")
                case "$id":
                    parts.append("/[A-Za-z0-9]{9}/")
                case "$arguments":
                    schema = _close_schema(tool.get("parameters") or {"type": "object"})
                    parts.append(self.write_json_value(schema, schema))
                case "$parameters":
                    write = self._choose_tag_writer(form)
                    parts.append(self._write_items(tool, "", write))
                case "$keywords":
                    parts.append(self._write_items(tool, ", ", self._write_keyword))
                case "$pairs":
                    items = self._write_items(tool, ",", self._choose_pair_writer(form))
                    parts.append(f'"{{" {items} "}}"')
                case _:
                    parts.append(self.write_text(part))
        return self.add_rule(" ".join(parts))

    def _write_items(
        self, tool: Mapping[str, Any], between: str, write: Callable[[Schema, str, Any], str]
    ) -> str:
        """Parameters in their schema's order; optional ones may be left out."""
        root, parameters = list_parameters(tool)
        return self.write_sequence(
            [(write(root, name, schema), needed) for name, schema, needed in parameters], between
        )

    def write_sequence(self, items: Sequence[tuple[str, bool]], between: str) -> str:
        """Items one after the other, ``between`` between two; those not needed may be missing."""
        first = after = '""'
        for item, is_needed in reversed(items):
            follows = f"{_quote(between)} {item} {after}" if between else f"{item} {after}"
            begins = f"{item} {after}"
            first = self.add_rule(begins if is_needed else f"{begins} | {first}")
            after = self.add_rule(follows if is_needed else f"{follows} | {after}")
        return first

    def _choose_tag_writer(self, form: CallForm) -> Callable[[Schema, str, Any], str]:
        opening, _, closing = form.parameter.partition("$value")

        def write(root: Schema, name: str, schema: Any) -> str:
            types = list_types(root, schema)
            kind = describe_kind(form.parameter, "string" if "string" in types else _name(types))
            head = opening.replace("$key", name).replace("$kind", kind)
            tail = closing.replace("$key", name)
            written = []
            if values := _list_values(root, schema):
                texts = (item if isinstance(item, str) else json.dumps(item) for item in values)
                written.append(f"({' | '.join(map(_quote, texts))}) {self.write_text(tail)}")
            elif "string" in types:
                written.append(self.write_until(tail))
            else:
                value = self.write_json_value(root, schema)
                written.append(f"{value} {self.write_text(tail)}")
            return self.add_rule(f"{self.write_text(head)} ({' | '.join(written)})")

        return write

    def _write_keyword(self, root: Schema, name: str, schema: Any) -> str:
        types = list_types(root, schema)
        names = {"boolean": '("True" | "False")', "null": '"None"'}
        if values := _list_values(root, schema):
            written = " | ".join(_quote(write_literal(value)) for value in values)
        elif not types or {"array", "object"} & set(types):
            written = "pyvalue"
        else:
            plain = [kind for kind in types if kind not in names]
            written = " | ".join(names[kind] for kind in types if kind in names)
            if plain:
                value = self.write_json_value(root, _keep_types(root, schema, plain))
                written = f"{value} | {written}" if written else value
        return self.add_rule(f"{_quote(name + '=')} ({written})")

    def _choose_pair_writer(self, form: CallForm) -> Callable[[Schema, str, Any], str]:
        quote = self.write_text(form.quote)
        text = f"{quote} {self.write_until(form.quote)}"

        def write_value(root: Schema, schema: Any, depth: int = 0) -> str:
            schema = resolve(root, schema)
            if values := _list_values(root, schema):
                return self.add_rule(
                    " | ".join(
                        f"{quote} {_quote(item)} {quote}"
                        if isinstance(item, str)
                        else _quote(json.dumps(item))
                        for item in values
                    )
                )
            choices = []
            for kind in list_types(root, schema) or ("string", "number", "boolean"):
                own = schema if isinstance(schema, Mapping) else {}
                if kind == "string":
                    choices.append(text)
                elif kind == "object" and depth < 8:
                    _, items = list_parameters({"parameters": {**root, **own}})
                    pairs = [
                        (f"{_quote(key + ':')} {write_value(root, item, depth + 1)}", needed)
                        for key, item, needed in items
                    ]
                    inner = self.write_sequence(pairs, ",") if pairs else '""'
                    choices.append(f'"{{" {inner} "}}"')
                elif kind == "array" and depth < 8:
                    item = write_value(root, own.get("items"), depth + 1)
                    choices.append(f'"[" ({item} ("," {item})*)? "]"')
                elif kind not in ("object", "array"):
                    choices.append(self.write_json_value(root, {"type": kind}))
            return self.add_rule(" | ".join(choices) or '"{}"')

        def write(root: Schema, name: str, schema: Any) -> str:
            return self.add_rule(f"{_quote(name + ':')} {write_value(root, schema)}")

        return write


def _close_schema(schema: Schema) -> Schema:
    """A tool's schema: unnamed parameters are forbidden, unless it allows them."""
    open_keys = ("additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref")
    if "properties" not in schema or any(key in schema for key in open_keys):
        return schema
    return {**schema, "additionalProperties": False}


def _quote(text: str) -> str:
    return json.dumps(text)


def _name(types: Sequence[str]) -> str:
    return types[0] if types else "object"


def _list_values(root: Schema, schema: Any) -> list[Any]:
    found = resolve(root, schema)
    if not isinstance(found, Mapping):
        return []
    return [found["const"]] if "const" in found else list(found.get("enum") or ())


def _keep_types(root: Schema, schema: Any, types: Sequence[str]) -> Any:
    found = resolve(root, schema)
    stated = found.get("type") if isinstance(found, Mapping) else None
    if isinstance(stated, str) and [stated] == list(types):
        return schema
    return {"type": list(types)}


_FORBIDDEN = np.float32(-np.inf)


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
    return _compile(writer.write_json(schema), "response_format")


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
    return _compile(writer.write_calls(tools, is_parallel=is_parallel), "tools")


def _compile(lark: str, param: str) -> str:
    from llguidance import LLMatcher

    try:
        grammar: str = LLMatcher.grammar_from_lark(lark)
        problem = LLMatcher.validate_grammar(grammar)
    except ValueError as error:
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
        said = " ".join(self._matcher.get_error().split())[:300]
        return RuntimeError(f"the grammar of an answer has failed: {problem}; {said}")


def make_constraint(vocabulary: LLTokenizer, grammar: str, size: int) -> Callable[[], Constraint]:
    from llguidance import LLMatcher

    return lambda: Grammar(LLMatcher(vocabulary, grammar), size)
