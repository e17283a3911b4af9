"""How many tokens of a prompt should go through a layer together.

Weights are read and unpacked once for a chunk.  Of a mixture with many experts each has only a few
of a chunk's tokens, so that longer chunks pay there that would only take memory elsewhere.
"""

from __future__ import annotations

from pi2.plan.arithmetic.sizes import TOKENS_TOGETHER
from pi2.plan.documents.model import Model

SHORT_CHUNK, USUAL_CHUNK, LONG_CHUNK = 32, 128, TOKENS_TOGETHER
"""Tokens."""
EXPERT_TOKENS = 32
"""Tokens of an expert beyond which unpacking its weights is a small part of computing them."""


def list_chunks(model: Model, context: int) -> tuple[int, ...]:
    """Numbers of tokens of a chunk that plans for ``model`` should choose from, ascending and at
    most the tokens of ``context``."""
    chunks = [SHORT_CHUNK, USUAL_CHUNK]
    moe = model.moe
    if moe is not None:
        share = (moe.active_experts + moe.shared_experts) / (moe.experts + moe.shared_experts)
        if USUAL_CHUNK * share < EXPERT_TOKENS:
            chunks.append(LONG_CHUNK)
    return tuple(dict.fromkeys(min(chunk, context) for chunk in chunks))
