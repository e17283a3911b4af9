"""The backend for Hexagon NPUs (`pi2.backends.protocol`): units next to an executor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pi2.plan.arithmetic.sizes import STAGED_NEURONS, count_chunk_tokens
from pi2.plan.arithmetic.units import GraphFacts, Need, UnitFacts, Verdict, list_wanted
from pi2.plan.documents.device import Unit, UnitKind
from pi2.plan.documents.quantities import approximate_bytes

if TYPE_CHECKING:
    from pi2.backends.hexagon.sizes import UnitSizes
    from pi2.backends.units import DenseUnit, UnitRequest

VERDICT: Verdict = "runs"
NATIVE = False
KINDS: tuple[UnitKind, ...] = ("npu",)
ONLY_EMULATED = True
FIXED: Mapping[str, tuple[object, ...]] = {}


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
    sizes = describe_sizes(facts)
    return Need(
        sizes.shared_bytes + sizes.loading_bytes,
        f"{sum(sizes.counts)} neurons in tiles of 32, {sizes.jobs} x inputs and sums of "
        f"{sizes.chunk} tokens, {approximate_bytes(sizes.scratch_bytes)} while a graph runs, "
        f"runs of {sizes.stretch} neurons that are sent to it, and a layer as it is loaded",
    )


def list_graphs(facts: UnitFacts) -> tuple[GraphFacts, ...]:
    from pi2.backends.hexagon.sizes import lay_out_scratch, list_ffn_graphs

    sizes = describe_sizes(facts)
    return tuple(
        GraphFacts(
            tokens=graph.tokens, neurons=graph.neurons, own_bytes=lay_out_scratch(graph).bytes
        )
        for graph in list_ffn_graphs(sizes.graph_tokens, sizes.graph_neurons)
    )


def list_graph_tokens(facts: UnitFacts) -> tuple[int, ...]:
    """Return the numbers of tokens that its graphs have, ascending."""
    return describe_sizes(facts).graph_tokens


def describe_sizes(facts: UnitFacts) -> UnitSizes:
    from pi2.backends.hexagon.sizes import UnitSizes, describe_graphs, describe_shape
    from pi2.plan.arithmetic.units import list_matrices

    resolved = facts.resolved
    settings = resolved.plan.units.get(facts.unit)
    model, bundle = resolved.model, resolved.bundle
    whole = bundle.inline if bundle.scales == "resident" else bundle
    return UnitSizes(
        shape=describe_shape(model, whole),
        stride=whole.stride,
        counts=facts.neurons or (),
        matrices={} if facts.rows is None else list_matrices(model, facts.rows),
        chunk=count_chunk_tokens(resolved.plan),
        jobs=facts.chunks,
        stretch=min(model.layer_neurons, STAGED_NEURONS),
        wanted=list_wanted(resolved, facts.unit),
        **describe_graphs(
            None if settings is None else settings.graphs,
            resolved.device.units[facts.unit],
            model.layer_neurons,
        ),
    )


def build_unit(request: UnitRequest) -> DenseUnit:
    """Compile or load graphs, start the worker, and make the unit."""
    from pi2.backends.hexagon.dense_unit import HexagonUnit

    return HexagonUnit(request)
