"""Answers that must be of a certain form: JSON of a schema, or calls of tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pi2.engine.answer import Constraint
from pi2.engine.sampling import Bias
from pi2.serving.call_grammars import GrammarWriter
from pi2.serving.chat_facts import ChatFacts
from pi2.serving.errors import ApiError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from tokenizers import Tokenizer

_FORBIDDEN = np.float32(-np.inf)


def load_vocabulary(tokenizer: Tokenizer, vocab: int, eos: Sequence[int]) -> LLTokenizer:
    """What the grammar library knows of a model's tokens: takes a second for large ones."""
    from llguidance import LLTokenizer

    size = max(vocab, tokenizer.get_vocab_size())
    return LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=list(eos) or None)


def write_json_grammar(
    facts: ChatFacts, schema: Mapping[str, Any], *, prompt: str, may_reason: bool = False
) -> str:
    """The grammar of JSON documents of ``schema``.  ApiError 400 for what is no schema that can be
    kept to."""
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
    """The grammar of an answer that is calls of ``tools`` (OpenAI's ``function`` objects); one, or
    with ``is_parallel`` one or more."""
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
        """Minus infinity for every token that does not go on with it."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: self._size].astype(bool)
        if not allowed.any():
            if self._matcher.is_stopped() and not self._matcher.is_error():
                return None  # it has ended, and the request ignores end tokens
            raise self._explain("no token goes on with it")
        return np.where(allowed, np.float32(0), _FORBIDDEN)

    def accept(self, token: int) -> None:
        """Go on by a token."""
        if self._matcher.is_stopped() and not self._matcher.is_error():
            return
        if not self._matcher.consume_token(token):
            raise self._explain(f"token {token} does not go on with it")

    def _explain(self, problem: str) -> RuntimeError:
        said = " ".join(self._matcher.get_error().split())[:300]
        return RuntimeError(f"the grammar of an answer has failed: {problem}; {said}")


def make_constraint(vocabulary: LLTokenizer, grammar: str, size: int) -> Callable[[], Constraint]:
    """What makes a constraint for each of the sequences of a request."""
    from llguidance import LLMatcher

    return lambda: Grammar(LLMatcher(vocabulary, grammar), size)
