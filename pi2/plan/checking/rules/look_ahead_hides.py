"""Reads that are to hide behind attention take no longer than attention.

Why: ``look_ahead = "attention"`` asks for a layer's neurons before its attention, so that the reads
are done when the FFN begins.  Where they take much longer, the FFN waits all the same.  Times are
estimates from the device's figures and the model's statistics.

Example: ``look_ahead = "attention"`` where attention takes 0.4 ms and the reads 6 ms.

Fix: ``look_ahead = "layer"``, which begins a layer earlier, or more memory for ``hot`` and
``cold``, so that less is read.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.arithmetic.expectations import (
    count_absent,
    count_attention_bytes,
    find_memory_rate,
    find_read_rate,
)
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.checking.findings import Facts, Finding, Origin
from pi2.plan.documents.quantities import approximate_number

CODE = "P237"
SEVERITY = "warning"
NEEDS = ("resolved",)

PATIENCE = 2.0
"""Reads may take this many times as long as attention: estimates are rough."""


def check(facts: Facts) -> Iterator[Finding]:
    """Compare the times of one layer."""
    resolved = facts.resolved
    memory_rate, read_rate = find_memory_rate(facts.device), find_read_rate(facts.device)
    if resolved.plan.decode.look_ahead != "attention" or not memory_rate or not read_rate:
        return
    attention_s = count_attention_bytes(resolved) / memory_rate
    read_s = _count_read_bytes(resolved) / read_rate
    if read_s <= PATIENCE * attention_s:
        return
    yield Finding(
        path=("decode", "look_ahead"),
        message="a layer's attention takes about "
        f"{approximate_number(attention_s * 1e3, 2)} ms and its reads "
        f"{approximate_number(read_s * 1e3, 2)} ms: attention cannot hide them",
        help='write look_ahead = "layer", or give hot and cold more memory',
        origins=(
            Origin(
                document="device",
                path=("storage", "reads"),
                text=f"{approximate_number(read_rate / 1e6, 4)} MB/s",
            ),
        ),
    )


def _count_read_bytes(resolved: ResolvedPlan) -> float:
    """Bytes that a layer reads for a token, if the cache holds any cold neuron alike."""
    stride, neurons = resolved.bundle.stride, resolved.model.layer_neurons
    absent = sum(neurons - layer.hot_neurons for layer in resolved.layers)
    if absent == 0:
        return 0.0
    cached = min(1.0, resolved.plan.memory.segments.cold / stride / absent)
    wanted = sum(count_absent(resolved, layer) or 0.0 for layer in range(len(resolved.layers)))
    return wanted * (1 - cached) * stride / len(resolved.layers)
