"""Log probabilities as OpenAI's interfaces write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pi2.engine.answer import TokenScore
from pi2.engine.loaded_model import LoadedModel

LEAST = -9999.0
"""Stands for what cannot be written: the logarithm of nothing."""


def _limit(value: float) -> float:
    return max(value, LEAST)


def _describe(model: LoadedModel, token: int, value: float) -> dict[str, Any]:
    text = model.decode([token], special=True)
    return {"token": text, "logprob": _limit(value), "bytes": list(text.encode("utf-8"))}


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
        "top_logprobs": [
            {
                model.decode([token], special=True): _limit(value)
                for token, value in score.alternatives
            }
            for score in scores
        ],
        "text_offset": offsets,
    }
