"""A plan that computes every neuron has no cache of cold ones.

Why: with ``decode.predictor = "none"`` what is not hot streams by for every token, and nothing of
it is kept: memory of the segment ``cold`` stays empty.  As hot neurons it would save reads.

Example: ``cold = "1000 MiB"`` with ``predictor = "none"``.

Fix: give the segment's memory to ``hot``, and raise ``layers.hot``; `pi2 run --memory` does both.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding, Origin
from pi2.plan.documents.quantities import approximate_bytes

CODE = "P205"
SEVERITY = "warning"
NEEDS = ("resolved",)
_LEAST_BYTES = 1 << 20


def check(facts: Facts) -> Iterator[Finding]:
    """Compare the segment with what such plans need of it."""
    resolved = facts.resolved
    plan, size = resolved.plan, resolved.plan.memory.segments.cold
    if plan.decode.predictor != "none" or resolved.file is not None:  # a ring of what streams by
        return
    wasted = size - resolved.needs.cold.bytes
    whole_in_memory = all(layer.hot >= 1.0 for layer in resolved.layers)
    if whole_in_memory or wasted <= _LEAST_BYTES:
        return
    whole = resolved.model.shape.layers * resolved.model.layer_neurons * resolved.bundle.stride
    hot = sum(layer.hot for layer in resolved.layers) / len(resolved.layers)
    more = min(hot + wasted / whole, 1.0)
    yield Finding(
        path=("memory", "segments", "cold"),
        message=f"{approximate_bytes(wasted)} of the segment cold stay empty: where every neuron "
        "is computed, what is not hot streams by",
        help=f"add them to memory.segments.hot, and write layers.hot = {int(more * 1000) / 1000:g}",
        origins=(Origin(document="plan", path=("decode", "predictor"), text='predictor = "none"'),),
    )
