"""Bytes that a plan's run has resident, and what no segment holds."""

from __future__ import annotations

from math import ceil

from pi2.costs.settings import POSITION
from pi2.memory.context import count_lent_bytes
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.runtime import count_libraries
from pi2.plan.arithmetic.sizes import (
    LOGIT_ROWS,
    STAGING_BUFFERS,
    count_chunk_tokens,
    count_staged_neurons,
)


def count_memory(resolved: ResolvedPlan, tokens: int = POSITION) -> int:
    """Bytes that are resident after ``tokens`` of context: what the segments need, and the cache.

    Of keys and values only what was used is, and of the rest what it lends to neurons.
    """
    segments = resolved.plan.memory.segments
    needs = dict(resolved.needs.items())
    names = ("attention", "kv", "state", "predictor", "hot", "workspace")
    fixed = sum(needs[name].bytes for name in names) - _count_untouched(resolved)
    stride = resolved.bundle.stride
    absent = sum(
        resolved.model.layer_neurons - resolved.layers[number].hot_neurons
        for number in resolved.named_layers
    )
    lent = count_lent_bytes(resolved, tokens)
    # Nothing is put there of layers that stream by.
    cold = min(segments.cold + lent, absent * stride)
    share = min(1.0, tokens / resolved.plan.kv.context)
    untouched = needs["kv"].bytes * (1.0 - share)
    libraries = count_libraries(resolved.model, _measure_tokenizer(resolved))
    if resolved.has_whole_unit:
        libraries = segments.runtime  # the driver's part is as the plan states it
    return ceil(libraries + fixed + cold - untouched)


def _count_untouched(resolved: ResolvedPlan) -> int:
    """Bytes of the workspace that generating does not use: logits of more than one token of a
    chunk, and staging where every neuron is resident."""
    plan, model = resolved.plan, resolved.model
    if resolved.has_whole_unit:
        return 0
    rows = min(count_chunk_tokens(plan), LOGIT_ROWS) - min(plan.decode.batch, LOGIT_ROWS)
    untouched = 4 * rows * model.shape.vocab
    if all(layer.hot_neurons == model.layer_neurons for layer in resolved.layers):
        untouched += STAGING_BUFFERS * count_staged_neurons(resolved) * resolved.bundle.stride
    return untouched


def _measure_tokenizer(resolved: ResolvedPlan) -> int | None:
    """Bytes of the store's file; None where the store is not here."""
    try:
        return (resolved.store_path / resolved.model.tokenizer.file).stat().st_size
    except OSError:
        return None
