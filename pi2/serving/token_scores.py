"""Log probabilities as OpenAI's interfaces write them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pi2.engine.answer import TokenScore
from pi2.engine.loaded_model import LoadedModel

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


def _describe(model: LoadedModel, token: int, value: float) -> dict[str, Any]:
    text = model.decode([token], special=True)
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
        text = model.decode([token], special=True)
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


def describe_completion_scores(
    model: LoadedModel, scores: Sequence[TokenScore], offset: int
) -> dict[str, Any]:
    """``logprobs`` of a completion's choice; ``offset``: characters before it."""
    texts = [model.decode([score.token], special=True) for score in scores]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [_limit(score.log_probability) for score in scores],
        "top_logprobs": [_describe_alternatives(model, score.alternatives) for score in scores],
        "text_offset": offsets,
    }
