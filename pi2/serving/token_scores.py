"""Log probabilities as OpenAI's interfaces write them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from pi2.engine.answer import TokenScore
from pi2.engine.loaded_model import LoadedModel
from pi2.engine.text import TokenDecoder

LEAST = -9999.0
"""Stands for what cannot be written: the logarithm of nothing."""


def _limit(value: float) -> float:
    return max(value, LEAST)


def _list_byte_characters() -> dict[str, int]:
    """What tokenizers of bytes write for each byte: visible characters for themselves, and those
    from 256 on for the others, in their order."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in visible)
    return {chr(byte): byte for byte in visible} | {
        chr(256 + number): byte for number, byte in enumerate(others)
    }


_BYTES = _list_byte_characters()
_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


def list_token_bytes(written: str | None, text: str) -> list[int]:
    """UTF-8 bytes of a token that its tokenizer's vocabulary has ``written`` so, and whose ``text``
    stands alone so: a part of a character has bytes and no text."""
    if written is not None and "\ufffd" in text:
        fallback = _FALLBACK.fullmatch(written)
        if fallback:
            return [int(fallback[1], 16)]
        if all(character in _BYTES for character in written):
            return [_BYTES[character] for character in written]
    return list(text.encode("utf-8"))


def _read_token(model: LoadedModel, token: int) -> str:
    """The text of a token within a text: where one begins, some decoders leave spaces out."""
    return model.decode([token, token], special=True)[len(model.decode([token], special=True)) :]


def _describe(model: LoadedModel, token: int, value: float) -> dict[str, Any]:
    text = _read_token(model, token)
    written = model.tokenizer.id_to_token(token)
    return {
        "token": text,
        "logprob": _limit(value),
        "bytes": list_token_bytes(written, text),
    }


def _describe_alternatives(
    model: LoadedModel, alternatives: Sequence[tuple[int, float]]
) -> dict[str, float]:
    """Log probabilities by text; of tokens with the same one that of the likeliest."""
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
        """Those of the prompt, whose ``scores`` are those of all its tokens but the first."""
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
        """Those of the next generated tokens."""
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
