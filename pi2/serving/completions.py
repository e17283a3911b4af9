"""``/v1/completions``."""

import re
import time
import tomllib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pi2.diagnostics import UserError
from pi2.engine.answer import TokenDecoder, TokenScore
from pi2.engine.loaded_model import LoadedModel
from pi2.serving.calls import Ask, Collected, Delta, Finished
from pi2.serving.errors import DONE, ApiError, explain_user_error, write_event
from pi2.serving.hosts import Host
from pi2.serving.openai_schema import ChatRequest, CompletionRequest
from pi2.serving.requests import (
    Operation,
    Writer,
    answer_with,
    describe_ask,
    describe_usage,
    make_id,
)
from pi2.tokens.table_tokenizer import map_bytes

LEAST = -9999.0
"""Stands for what cannot be written: the logarithm of nothing."""


def _limit(value: float) -> float:
    return max(value, LEAST)


_BYTES = {character: byte for byte, character in enumerate(map_bytes())}
_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


def list_token_bytes(written: str | None, text: str) -> list[int]:
    """UTF-8 bytes of a token by ``text`` or vocabulary: parts of characters have no text."""
    if written is not None and "\ufffd" in text:
        fallback = _FALLBACK.fullmatch(written)
        if fallback:
            return [int(fallback[1], 16)]
        if all(character in _BYTES for character in written):
            return [_BYTES[character] for character in written]
    return list(text.encode("utf-8"))


def _read_token(model: LoadedModel, token: int) -> str:
    """The text of a token inside a text: at its beginning some decoders leave spaces out."""
    return model.decode([token, token], special=True)[len(model.decode([token], special=True)) :]


def _describe(model: LoadedModel, token: int, value: float) -> dict[str, Any]:
    text = _read_token(model, token)
    written = model.coder.id_to_token(token)
    return {"token": text, "logprob": _limit(value), "bytes": list_token_bytes(written, text)}


def _describe_alternatives(
    model: LoadedModel, alternatives: Sequence[tuple[int, float]]
) -> dict[str, float]:
    """Log probabilities by text; the highest one if several tokens have the same text."""
    found: dict[str, float] = {}
    for token, value in alternatives:
        text = _read_token(model, token)
        found[text] = max(_limit(value), found.get(text, LEAST))
    return found


def describe_chat_scores(model: LoadedModel, scores: Sequence[TokenScore]) -> dict[str, Any]:
    """``logprobs`` of a chat's choice."""
    return {
        "content": [
            {
                **_describe(model, score.token, score.log_probability),
                "top_logprobs": [_describe(model, *other) for other in score.alternatives],
            }
            for score in scores
        ],
        "refusal": None,
    }


class CompletionScores:
    """Writes ``logprobs`` of a completion's choice, part by part."""

    def __init__(self, model: LoadedModel, prompt_ids: Sequence[int], echo: str) -> None:
        """``echo``: what the choice's text has of the prompt."""
        self._model = model
        self._prompt_ids = prompt_ids
        self._decoder = TokenDecoder(partial(model.decode, special=True))
        self._offset = len(echo)
        # The text of a token may depend on the one before it.
        self._decoder.push(prompt_ids[-1])
        self._echo = echo

    def write_prompt(self, scores: Sequence[TokenScore]) -> dict[str, Any]:
        """Log probabilities of the prompt; ``scores`` are of all its tokens but the first."""
        first, *_ = self._prompt_ids
        whole = self._model.decode(self._prompt_ids, special=True)
        # A begin token that the tokenizer has added is not in the text.
        offset = len(self._echo) - len(whole)
        decoder, offsets = TokenDecoder(partial(self._model.decode, special=True)), []
        for token in self._prompt_ids:
            offsets.append(max(0, offset))
            offset += len(decoder.push(token))
        found = self._write(scores, offsets[1:])
        return {
            "tokens": [_read_token(self._model, first), *found["tokens"]],
            "token_logprobs": [None, *found["token_logprobs"]],
            "top_logprobs": [None, *found["top_logprobs"]],
            "text_offset": offsets,
        }

    def write(self, scores: Sequence[TokenScore]) -> dict[str, Any]:
        offsets = []
        for score in scores:
            offsets.append(self._offset)
            self._offset += len(self._decoder.push(score.token))
        return self._write(scores, offsets)

    def _write(self, scores: Sequence[TokenScore], offsets: Sequence[int]) -> dict[str, Any]:
        model = self._model
        return {
            "tokens": [_read_token(model, score.token) for score in scores],
            "token_logprobs": [_limit(score.log_probability) for score in scores],
            "top_logprobs": [_describe_alternatives(model, score.alternatives) for score in scores],
            "text_offset": list(offsets),
        }


_DEFAULT_TOKENS = 16
_FILLING: Mapping[str, Any] = tomllib.loads(
    Path(__file__).with_name("filling.toml").read_text("utf-8")
)


def list_prompts(
    host: Host, prompt: str | list[int] | list[str] | list[list[int]], *, whole: bool = False
) -> list[Any]:
    """Token ids of each prompt, or of each ``whole`` text; ApiError 400 for anything else."""
    texts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    encode = partial(host.model.encode, whole=whole)
    try:
        return [
            encode(item) if isinstance(item, str) else [int(token) for token in item]
            for item in texts
            if isinstance(item, (str, list))
        ]
    except UserError as error:
        raise explain_user_error(error) from None


def fill_gap(host: Host, before: Any, after: str) -> list[int]:
    """The prompt for the text between two others; ApiError 400 without tokens for filling in."""
    model = host.model
    if not isinstance(before, str):
        raise ApiError(400, "With 'suffix', 'prompt' is one text.", param="suffix")
    marks = next(filter(None, (_find_tokens(host, names) for names in _FILLING["marks"])), None)
    brackets = _find_tokens(host, _FILLING["brackets"])
    if marks is None and brackets is None:
        message = f"The model '{host.plan.name}' has no tokens for filling in: leave 'suffix' out."
        raise ApiError(400, message, param="suffix", code="unsupported_parameter")
    begin, settings = [], model.plan.model.tokenizer
    if settings.add_bos and settings.bos is not None:
        begin = [settings.bos]
    first, last = model.encode_text(before), model.encode_text(after)
    if marks is not None:
        return [*begin, marks[0], *first, marks[1], *last, marks[2]]
    assert brackets is not None
    return [*begin, brackets[0], *last, brackets[1], *first]


def _find_tokens(host: Host, names: Sequence[str]) -> list[int] | None:
    found = [host.model.texts.find_token(name) for name in names]
    return [token for token in found if token is not None] if None not in found else None


def can_fill(host: Host) -> bool:
    return any(_find_tokens(host, names) for names in (*_FILLING["marks"], _FILLING["brackets"]))


async def prepare(host: Host, body: CompletionRequest, client: str) -> Writer:
    if body.suffix:
        prompts = [fill_gap(host, body.prompt, body.suffix)]
    else:
        prompts = list_prompts(host, body.prompt)
    # Tokens themselves are needed for these two.
    needs_tokens = body.best_of is not None or body.return_token_ids
    most = _DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    stated = describe_ask(host, body, client, most)
    asks = [
        Ask(
            prompt_ids=ids,
            count=body.best_of or body.n or 1,
            alternatives=0 if body.logprobs is None and needs_tokens else body.logprobs,
            scores_prompt=bool(body.echo) and body.logprobs is not None,
            ignore_eos=bool(body.ignore_eos),
            **stated,
        )
        for ids in prompts
    ]
    return _CompletionWriter(host, body, asks)


class ChunkWriter(Writer):
    """Writes chunks of choices, as OpenAI's clients expect them."""

    kind: ClassVar[str]
    """The object that a chunk is."""

    def __init__(
        self, host: Host, asks: Sequence[Ask], body: ChatRequest | CompletionRequest, prefix: str
    ) -> None:
        """``prefix``: the beginning of the answer's id."""
        super().__init__(host, asks)
        self._includes_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._head = {
            "id": make_id(prefix),
            "created": int(time.time()),
            "model": host.plan.name,
            # It changes when answers may change.
            "system_fingerprint": f"fp_{host.model.plan.digest[:12]}",
        }

    def write_chunk(self, choice: Mapping[str, Any]) -> bytes:
        chunk = {**self._head, "object": self.kind, "choices": [choice]}
        return write_event({**chunk, "usage": None} if self._includes_usage else chunk)

    def write_end(self) -> bytes:
        if not self._includes_usage:
            return DONE
        last = {**self._head, "object": self.kind, "choices": [], "usage": self.describe_usage()}
        return write_event(last) + DONE

    def describe_usage(self) -> Mapping[str, Any]:
        raise NotImplementedError


class _CompletionWriter(ChunkWriter):
    kind = "text_completion"

    def __init__(self, host: Host, body: CompletionRequest, asks: Sequence[Ask]) -> None:
        super().__init__(host, asks, body, "cmpl-")
        self._body = body
        self._scores: dict[int, CompletionScores] = {}

    def _begin(self, index: int, prompt_scores: Sequence[TokenScore]) -> dict[str, Any]:
        number = index // self.asks[0].count
        ids = self.asks[number].prompt_ids
        echo = ""
        if self._body.echo:
            prompt = self._body.prompt
            texts = [prompt] if isinstance(prompt, str) else prompt
            text = texts[number] if isinstance(texts[0], str) else None
            echo = text if isinstance(text, str) else self.host.model.decode(ids, special=True)
        scores = self._scores[index] = CompletionScores(self.host.model, ids, echo)
        told = scores.write_prompt(prompt_scores) if self.asks[number].scores_prompt else None
        return self._add_ids({"text": echo, "logprobs": told}, ())

    def _go_on(self, index: int, text: str, scores: Sequence[TokenScore]) -> dict[str, Any]:
        told = None
        if self._body.logprobs is not None and (scores or not self._body.stream):
            told = self._scores[index].write(scores)
        ids = [score.token for score in scores]
        return self._add_ids({"text": text, "logprobs": told}, ids)

    def _add_ids(self, parts: dict[str, Any], ids: Sequence[int]) -> dict[str, Any]:
        return {**parts, "token_ids": list(ids)} if self._body.return_token_ids else parts

    def write_whole(self, found: Sequence[Collected]) -> dict[str, Any]:
        """The answer, complete; the best sequences of each prompt."""
        each, best = self.asks[0].count, self._body.n or 1
        choices: list[dict[str, Any]] = []
        for first in range(0, len(found), each):
            kept = list(range(first, first + each))
            if each > best:
                kept.sort(key=lambda index: _measure_likelihood(found[index]), reverse=True)
            for index in kept[:best]:
                item = found[index]
                assert item.end is not None
                begun = self._begin(index, item.prompt_scores)
                made = self._go_on(index, item.content, item.scores)
                choices.append(
                    {"index": len(choices), **_join(begun, made), **_describe_end(item.end)}
                )
        answer = {**self._head, "object": self.kind, "choices": choices}
        return {**answer, "usage": self.describe_usage()}

    def write_event(self, event: Delta | Finished) -> bytes:
        index, chunks = event.index, []
        if index not in self._scores:
            begun = self._begin(index, event.prompt_scores if isinstance(event, Delta) else ())
            if begun["text"]:
                chunks.append(self._write_chunk(index, begun))
        if isinstance(event, Finished):
            parts = {"text": "", "logprobs": None, **_describe_end(event)}
            chunks.append(self._write_chunk(index, parts))
        elif event.items or event.scores:
            text = "".join(item.text for item in event.items if hasattr(item, "text"))
            chunks.append(self._write_chunk(index, self._go_on(index, text, event.scores)))
        return b"".join(chunks)

    def _write_chunk(self, index: int, parts: dict[str, Any]) -> bytes:
        return self.write_chunk({"index": index, "finish_reason": None, **parts})

    def describe_usage(self) -> Mapping[str, Any]:
        each = self.asks[0].count
        reused = sum(end.reused_tokens for end in self.ends if end.index % each == 0)
        return describe_usage(self.prompt_tokens, self.tokens, reused, 0)


def _join(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in second.items():
        before = first[key]
        if isinstance(value, dict) and isinstance(before, dict):
            found[key] = _join(before, value)
        else:
            found[key] = value if before is None else before if value is None else before + value
    return found


def _describe_end(end: Finished) -> dict[str, Any]:
    return {**end.describe(), "finish_reason": "stop" if end.reason == "tool_calls" else end.reason}


def _measure_likelihood(item: Collected) -> float:
    values = [score.log_probability for score in item.scores]
    return sum(values) / len(values) if values else 0.0


COMPLETIONS = Operation(
    "/v1/completions",
    CompletionRequest,
    "Continue a prompt.",
    answer_with(prepare),
    "text_completion",
)
