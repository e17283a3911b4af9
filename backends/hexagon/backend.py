"""The backend for Hexagon NPUs (`pi2.backends.protocol`): units next to an executor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pi2.plan.arithmetic.units import GraphFacts, Need, UnitFacts, Verdict
from pi2.plan.documents.device import Unit, UnitKind
from pi2.plan.documents.quantities import approximate_bytes

if TYPE_CHECKING:
    from pi2.backends.hexagon.arrays import UnitArrays
    from pi2.backends.units import DenseUnit, UnitRequest

VERDICT: Verdict = "runs"
NATIVE = False
KINDS: tuple[UnitKind, ...] = ("npu",)
ONLY_EMULATED = True


def find_obstacles(features: frozenset[str], architecture: str) -> list[str]:
    """Return nothing: what an NPU needs depends on the unit (`find_unit_obstacles`)."""
    return []


def find_unit_obstacles(unit: Unit) -> list[str]:
    """Return what keeps the unit from being used here, and what to install."""
    from pi2.backends.hexagon.session import find_unit_obstacles

    return find_unit_obstacles(unit)


def find_limits(facts: UnitFacts) -> list[str]:
    """Return precisions and operators that it does not know: it computes the neurons and matrices
    of every other model that the plan language can state."""
    from pi2.plan.arithmetic.units import list_unknown_weights

    return list_unknown_weights(facts.resolved.model)


def need_unit_memory(facts: UnitFacts) -> Need:
    """Return the bytes of neurons and matrices in the NPU's layout, of jobs, of neurons that are
    added, and of a layer's neurons as they come."""
    share, arrays = facts.share, _lay_out(facts)
    assert share is not None, facts.unit
    return Need(
        arrays.bytes + arrays.loading_bytes,
        f"{sum(share.neurons)} neurons in tiles of 32, {share.jobs} x inputs and sums of "
        f"{share.chunk} tokens, {approximate_bytes(arrays.scratch_bytes)} while a graph runs, "
        f"runs of {share.stretch} neurons that are sent to it, and a layer as it is loaded",
    )


def list_graphs(facts: UnitFacts) -> tuple[GraphFacts, ...]:
    return tuple(
        GraphFacts(tokens=own.tokens, neurons=own.neurons, own_bytes=own.scratch.bytes)
        for own in _lay_out(facts).spec.graphs
    )


def list_graph_tokens(facts: UnitFacts) -> tuple[int, ...]:
    """Return the numbers of tokens that its graphs have, ascending."""
    return _lay_out(facts).tokens


def _lay_out(facts: UnitFacts) -> UnitArrays:
    from pi2.backends.hexagon.arrays import UnitArrays

    assert facts.share is not None, facts.unit
    return UnitArrays(facts.share)


def build_unit(request: UnitRequest) -> DenseUnit:
    """Compile or load graphs, start the worker, and make the unit."""
    from pi2.backends.hexagon.dense_unit import HexagonUnit

    return HexagonUnit(request)
