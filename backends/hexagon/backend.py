"""What `pi2.backends.protocol` asks of the backend for Hexagon NPUs: it serves units beside an
executor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pi2.plan.arithmetic.sizes import STAGED_NEURONS, Need, count_chunks
from pi2.plan.arithmetic.units import UnitFacts
from pi2.plan.documents.device import Unit, UnitKind
from pi2.plan.documents.quantities import approximate_bytes

if TYPE_CHECKING:
    from pi2.backends.dense_unit import DenseUnit, UnitRequest

COMPUTES = True
NATIVE = False
# It has run on an emulated NPU only: a plan has to ask for it.
KINDS: tuple[UnitKind, ...] = ()


def find_obstacles(features: frozenset[str], architecture: str) -> list[str]:
    """Return nothing: what an NPU needs depends on the unit (`find_unit_obstacles`)."""
    return []


def find_unit_obstacles(unit: Unit) -> list[str]:
    """Return what keeps the unit from being used here, and what to install."""
    from pi2.backends.hexagon.machines import find_unit_obstacles

    return find_unit_obstacles(unit)


def find_limits(facts: UnitFacts) -> list[str]:
    """Return nothing: it computes the neurons and matrices of every model that the plan language
    can state."""
    return []


def need_unit_memory(facts: UnitFacts) -> Need:
    """Return the bytes of neurons and matrices in the NPU's layout, of jobs, of neurons that are
    added, and of a layer's neurons as they come."""
    from pi2.backends.hexagon.sizes import UnitSizes, describe_shape
    from pi2.plan.arithmetic.rows import list_matrices

    resolved = facts.resolved
    model, bundle = resolved.model, resolved.bundle
    whole = bundle.inline if bundle.scales == "resident" else bundle
    sizes = UnitSizes(
        shape=describe_shape(model, whole),
        stride=whole.stride,
        counts=facts.neurons or (),
        matrices={} if facts.rows is None else list_matrices(model, facts.rows),
        chunk=max(resolved.plan.prefill.chunk, resolved.plan.decode.batch),
        jobs=count_chunks(resolved),
        stretch=min(model.layer_neurons, STAGED_NEURONS),
    )
    return Need(
        sizes.shared_bytes + sizes.loading_bytes,
        f"{sum(sizes.counts)} neurons in tiles of 32, {sizes.jobs} x inputs and sums of "
        f"{sizes.chunk} tokens, {approximate_bytes(sizes.scratch_bytes)} while a graph runs, "
        f"stretches of {sizes.stretch} neurons that are sent to it, and a layer as it is loaded",
    )


def build_unit(request: UnitRequest) -> DenseUnit:
    """Compile or load graphs, start the worker, and make the unit."""
    from pi2.backends.hexagon.dense_unit import HexagonUnit

    return HexagonUnit(request)
