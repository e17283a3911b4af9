"""Answers that must be of a certain form: JSON of a schema, or calls of tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pi2.engine.answer import Constraint
from pi2.engine.sampling import Bias
from pi2.serving.errors import ApiError
from pi2.serving.tool_formats import ToolFormat

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from tokenizers import Tokenizer

_COMPACT: Mapping[str, Any] = {
    "x-guidance": {
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",
    }
}
"""JSON on one line, as models are used to it: with any white space, some would never end."""
_FORBIDDEN = np.float32(-np.inf)


def load_vocabulary(tokenizer: Tokenizer, vocab: int, eos: Sequence[int]) -> LLTokenizer:
    """What the grammar library knows of a model's tokens: takes a second for large ones."""
    from llguidance import LLTokenizer

    size = max(vocab, tokenizer.get_vocab_size())
    return LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=list(eos) or None)


def write_json_grammar(schema: Mapping[str, Any] | None) -> str:
    """The grammar of JSON documents of ``schema``; None stands for any object.  ApiError 400 for
    what is no schema that can be kept to."""
    from llguidance import LLMatcher

    wanted = {"type": "object"} if schema is None else schema
    try:
        grammar: str = LLMatcher.grammar_from_json_schema(json.dumps({**wanted, **_COMPACT}))
    except ValueError as error:
        raise ApiError(400, f"the JSON schema cannot be used: {error}") from None
    return _check(grammar, "response_format")


def write_call_grammar(
    format: ToolFormat, tools: Sequence[Mapping[str, Any]], *, parallel: bool
) -> str:
    """The grammar of an answer that is nothing but calls of ``tools`` (OpenAI's ``function``
    objects); one, or with ``parallel`` one or more."""
    from llguidance import LLMatcher

    before, middle, after, between = format.write
    alternatives = []
    rules = []
    for number, tool in enumerate(tools):
        schema = tool.get("parameters") or {"type": "object"}
        name = str(tool["name"])
        name_text = json.dumps(name) if format.name != "fenced" else name
        alternatives.append(f"call{number}")
        rules.append(
            f"call{number}: {json.dumps(before + name_text + middle)} args{number} "
            f"{json.dumps(after)}\nargs{number}: %json {json.dumps({**schema, **_COMPACT})}"
        )
    more = ""
    if parallel and format.name in ("tagged", "bare"):
        more = f" ({json.dumps(between)} call)*"
    lark = "\n".join([f"start: call{more}", f"call: {' | '.join(alternatives)}", *rules])
    try:
        grammar: str = LLMatcher.grammar_from_lark(lark)
    except ValueError as error:
        raise ApiError(400, f"the parameters of the tools cannot be used: {error}") from None
    return _check(grammar, "tools")


def _check(grammar: str, param: str) -> str:
    from llguidance import LLMatcher

    if problem := LLMatcher.validate_grammar(grammar):
        raise ApiError(400, f"the schema cannot be used: {problem}", param=param)
    return grammar


class Grammar(Constraint):
    """Lets those tokens come that go on with a grammar."""

    def __init__(self, matcher: LLMatcher, size: int) -> None:
        self._matcher = matcher
        self._size = size

    def find_bias(self) -> Bias | None:
        """Minus infinity for every token that does not go on with it."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: self._size].astype(bool)
        if not allowed.any():
            return None
        return np.where(allowed, np.float32(0), _FORBIDDEN)

    def accept(self, token: int) -> None:
        """Go on by a token."""
        self._matcher.consume_token(token)


class AfterReasoning(Constraint):
    """Lets a model reason first: ``inner`` counts from the mark that ends it."""

    def __init__(self, inner: Constraint, end_token: int) -> None:
        self._inner = inner
        self._end_token = end_token
        self._reasons = True

    def find_bias(self) -> Bias | None:
        """Nothing while the model reasons."""
        return None if self._reasons else self._inner.find_bias()

    def accept(self, token: int) -> None:
        """Go on by a token."""
        if not self._reasons:
            self._inner.accept(token)
        elif token == self._end_token:
            self._reasons = False


def make_constraint(
    vocabulary: LLTokenizer, grammar: str, size: int, *, reasoning_end: int | None = None
) -> Callable[[], Constraint]:
    """What makes a constraint for each of the sequences of a request; ``reasoning_end``: the token
    that ends the reasoning with which the answer begins."""
    from llguidance import LLMatcher

    def make() -> Constraint:
        found = Grammar(LLMatcher(vocabulary, grammar), size)
        return found if reasoning_end is None else AfterReasoning(found, reasoning_end)

    return make
