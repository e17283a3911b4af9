"""Memory of the reference backend's dense units."""

from __future__ import annotations

from pi2.plan.arithmetic.sizes import ALIGNMENT, STAGED_NEURONS, STAGING_BUFFERS, Need, count_chunks
from pi2.plan.arithmetic.units import UnitFacts
from pi2.plan.weights.layout import round_up

PAGE_BYTES = 4096


def count_unit_memory(facts: UnitFacts) -> Need:
    """Bytes that a unit in numpy needs, by the process that it works in."""
    resolved = facts.resolved
    settings = resolved.plan.units.get(facts.unit)
    counts = facts.neurons or ()
    if settings is None or settings.process == "same":
        stride = resolved.bundle.stride
        kept = sum(round_up(count * stride, PAGE_BYTES) for count in counts)
        return Need(kept, f"{sum(counts)} neurons of {stride} bytes, by layers in whole pages")
    stride = resolved.bundle.stride
    if resolved.bundle.scales == "resident":
        stride = resolved.bundle.inline.stride
    tokens = max(resolved.plan.prefill.chunk, resolved.plan.decode.batch)
    model = resolved.model
    job = 2 * round_up(4 * tokens * model.shape.stored_hidden, ALIGNMENT)
    job += round_up(4 * tokens * max(1, model.expert_count), ALIGNMENT)
    jobs = count_chunks(resolved)
    neurons = min(model.layer_neurons, STAGED_NEURONS)
    total = sum(round_up(count * stride, PAGE_BYTES) for count in counts) + jobs * job
    total += STAGING_BUFFERS * round_up(neurons * stride, ALIGNMENT)
    return Need(
        total,
        f"{sum(counts)} neurons of {stride} bytes, {jobs} x inputs and sums of {tokens} tokens, "
        f"{STAGING_BUFFERS} x {neurons} neurons that are sent to it",
    )
