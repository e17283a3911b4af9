"""What llama.cpp does with a mapped file that does not fit into memory: the baseline of others.

Every page that is missing stops the thread that needs it.  Linux reads around a fault only while
that pays: a file of whose faults a hundred more missed than hit is read page by page
(``MMAP_LOTSAMISS`` in mm/filemap.c).  A mixture's experts do that, and each page that comes takes
the place of another, which has to be found and unmapped.  A dense model is walked through in order,
so that it is read ahead, and never finds a page again if it does not fit.
"""

from __future__ import annotations

from pi2.costs.activity import describe_routing
from pi2.costs.constants import Constants, Flash
from pi2.costs.cost import cost_description
from pi2.costs.description import Description
from pi2.costs.rates import check_flash
from pi2.plan.arithmetic.resolved import ResolvedPlan

PAGE_BYTES = 4096
FAULT_S = 2.6e-6
"""The kernel's work for a page of a mapped file.  Estimated, 0.5 to 4 us."""
RECLAIM_S = 25e-6
"""Finding a page to drop, and telling all cores that it is unmapped.  Estimated, 5 to 40 us."""
CACHE_SHARE, PHONE_SHARE = 0.93, 0.5
"""Part of the free memory that the system fills with pages before it takes some back.  Android
keeps room for apps in the background, and takes pages back for good.  Estimated, 0.4 to 0.7."""
AHEAD_BYTES = 128 << 10
"""What is read around a fault of a file that is read in order: Linux's default."""


def predict_mapped(resolved: ResolvedPlan, description: Description, memory_bytes: float) -> float:
    """Tokens per second of a plan with all of the model in a mapped file, while pages may have
    ``memory_bytes``."""
    flash = check_flash(description.rates, resolved.device)
    return 1.0 / (
        cost_description(description).token_s
        + _time_faults(resolved, description, flash, memory_bytes)
    )


def _time_faults(
    resolved: ResolvedPlan, description: Description, flash: Flash, memory_bytes: float
) -> float:
    """Seconds of a token's faults."""
    model, sizes = resolved.model, description.sizes
    is_phone = resolved.device.storage.kind == "ufs"
    capacity = (PHONE_SHARE if is_phone else CACHE_SHARE) * memory_bytes
    neuron = resolved.bundle.stride
    dense = float(model.shape.layers * sizes.projections + sizes.head)
    neurons = float(model.shape.layers * model.layer_neurons)
    if dense + neurons * neuron <= capacity:
        return 0.0
    if model.moe is None or dense > capacity:
        pages_s = AHEAD_BYTES / PAGE_BYTES * (FAULT_S + RECLAIM_S)
        block_s = flash.latency_s + AHEAD_BYTES / flash.find_rate_bytes_s("sequential", AHEAD_BYTES)
        size = dense + model.token_neurons * neuron
        return size / AHEAD_BYTES * max(block_s, pages_s)
    share = (capacity - dense) / neuron / neurons
    layers, _ = describe_routing(model, None, Constants())
    missing = sum(layer.count_missing(0.0, share, "lru") for layer in layers)
    # Threads wait for the storage together, and for the lists of pages one after the other.
    page_s = (flash.latency_s + FAULT_S) / description.settings.threads + RECLAIM_S
    return missing * neuron / PAGE_BYTES * page_s
