"""What keys and values take of their segment, and what of it no token has used yet."""

from __future__ import annotations

from dataclasses import dataclass

from pi2.memory.budget import PAGE
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.weights.projections import list_kept_vectors

MEAN_TOKENS = 256
"""Tokens of context that a mean token is taken to have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextMemory:
    """What keys and values take."""

    total_bytes: int
    """Bytes of full contexts of all sequences."""
    context: int
    """Tokens of all sequences."""
    runs: int
    """Stretches that tokens fill one after the other: the last page of each is partly used."""

    def count_unused(self, tokens: int) -> int:
        """Bytes that no token has touched while there are at most ``tokens``."""
        used = -(-self.total_bytes * tokens // self.context) + self.runs * PAGE
        return max(0, self.total_bytes - used)


def describe_context(resolved: ResolvedPlan) -> ContextMemory:
    """What keys and values take of their segment."""
    runs = 0
    for view, layers in resolved.model.list_views():
        kinds, vectors, _ = list_kept_vectors(view)
        runs += kinds * layers * vectors
    # Scales lie apart from what they belong to.
    runs *= 2 if resolved.plan.kv.type == "int8" else 1
    return ContextMemory(
        total_bytes=resolved.needs.kv.bytes,
        context=resolved.plan.decode.batch * resolved.plan.kv.context,
        runs=resolved.plan.decode.batch * runs,
    )


def count_lent_bytes(resolved: ResolvedPlan, tokens: int = MEAN_TOKENS) -> int:
    """Bytes that cold neurons borrow of contexts while each has ``tokens``; 0 where the plan does
    not lend them, or nothing is put into the cache."""
    if not resolved.plan.kv.lend or resolved.plan.decode.predictor == "none":
        return 0
    each = min(tokens, resolved.plan.kv.context)
    return describe_context(resolved).count_unused(resolved.plan.decode.batch * each)
