"""Memory of the reference backend's dense units."""

from __future__ import annotations

from pi2.plan.arithmetic.needs import Need
from pi2.plan.arithmetic.rows import list_matrices
from pi2.plan.arithmetic.sizes import (
    LOGIT_ROWS,
    STAGED_NEURONS,
    STAGING_BUFFERS,
    count_chunk_tokens,
    count_chunks,
)
from pi2.plan.arithmetic.units import UnitFacts
from pi2.plan.documents.quantities import approximate_bytes
from pi2.plan.weights.layout import ALIGNMENT, Precision, round_up, scale_bytes, weight_bytes

PAGE_BYTES = 4096


def count_unit_memory(facts: UnitFacts) -> Need:
    """Bytes that a unit in numpy needs, by the process that it works in."""
    resolved = facts.resolved
    settings, model = resolved.plan.units.get(facts.unit), resolved.model
    matrices = {} if facts.rows is None else list_matrices(model, facts.rows)
    rows = sum(_count_matrix(*sizes) for sizes in matrices.values())
    besides = f", {len(matrices)} matrices of {approximate_bytes(rows)}" if rows else ""
    counts = facts.neurons or ()
    if settings is None or settings.process == "same":
        stride = resolved.bundle.stride
        kept = sum(round_up(count * stride, PAGE_BYTES) for count in counts)
        return Need(
            kept + rows,
            f"{sum(counts)} neurons of {stride} bytes, by layers in whole pages{besides}",
        )
    stride = resolved.bundle.stride
    if resolved.bundle.scales == "resident":
        stride = resolved.bundle.inline.stride
    tokens = count_chunk_tokens(resolved.plan)
    inputs = results = tokens * model.stored_neuron_width
    for name, (count, length, _) in matrices.items():
        together = tokens if name.startswith("layers.") else min(tokens, LOGIT_ROWS)
        inputs, results = max(inputs, together * length), max(results, together * count)
    job = round_up(4 * inputs, ALIGNMENT) + round_up(4 * results, ALIGNMENT)
    job += round_up(4 * tokens * max(1, model.expert_count), ALIGNMENT)
    jobs = count_chunks(resolved)
    neurons = min(model.layer_neurons, STAGED_NEURONS)
    total = sum(round_up(count * stride, PAGE_BYTES) for count in counts) + jobs * job + rows
    total += STAGING_BUFFERS * round_up(neurons * stride, ALIGNMENT)
    return Need(
        total,
        f"{sum(counts)} neurons of {stride} bytes, {jobs} x inputs and sums of {tokens} tokens, "
        f"{STAGING_BUFFERS} x {neurons} neurons that are sent to it{besides}",
    )


def _count_matrix(rows: int, length: int, precision: Precision) -> int:
    """Bytes of packed weights and of scales, each at a multiple of 64 bytes."""
    weights = round_up(rows * weight_bytes(length, precision), ALIGNMENT)
    return weights + round_up(rows * scale_bytes(length, precision), ALIGNMENT)
