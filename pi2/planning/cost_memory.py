"""Bytes that a plan's run has resident, and what no segment holds."""

from __future__ import annotations

from math import ceil

from pi2.costs.settings import POSITION
from pi2.memory.context import count_lent_bytes
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.sizes import NEURON_TABLE_BYTES
from pi2.plan.documents.model import Model

RUNTIME_BYTES = 81 << 20
"""Python and libraries of a run with the cpu backend whose kernels are compiled already: resident
set of the demo model's run, less what its segments hold."""


def count_memory(resolved: ResolvedPlan, tokens: int = POSITION) -> int:
    """Bytes that are resident after ``tokens`` of context: what the segments need, and the cache.

    Of keys and values only what was used is, and of the rest what it lends to neurons.
    """
    segments = resolved.plan.memory.segments
    needs = dict(resolved.needs.items())
    fixed = sum(needs[name].bytes for name in ("attention", "kv", "predictor", "hot", "workspace"))
    stride = resolved.bundle.stride
    absent = sum(resolved.model.layer_neurons - layer.hot_neurons for layer in resolved.layers)
    lent = count_lent_bytes(resolved, tokens)
    cold = min(segments.cold + lent, absent * stride)
    if resolved.plan.decode.predictor == "none":
        cold = 0  # everything streams by; nothing is put there
    share = min(1.0, tokens / resolved.plan.kv.context)
    untouched = needs["kv"].bytes * (1.0 - share)
    return ceil(count_runtime(resolved.model) + fixed + cold - untouched)


def count_runtime(model: Model) -> int:
    """Bytes of Python, the libraries, and the tables that the neuron cache keeps."""
    return RUNTIME_BYTES + NEURON_TABLE_BYTES * model.shape.layers * model.layer_neurons
