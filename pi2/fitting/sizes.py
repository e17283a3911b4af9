"""Bytes that a plan's segments and units need, as their backends say."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from pi2.fitting import (
    find_alone_backend,
    find_executor_backend,
    find_graph_backend,
    find_unit_backend,
)
from pi2.plan.arithmetic.sizes import (
    STAGED_NEURONS,
    STAGING_BUFFERS,
    count_chunk_tokens,
    count_staged_neurons,
    count_stated_threads,
)
from pi2.plan.arithmetic.units import Need, UnitFacts, UnitShare, list_matrices, list_wanted

if TYPE_CHECKING:
    from pi2.backends.protocol import ExecutorBackend
    from pi2.machine import Machine
    from pi2.plan.arithmetic.resolved import ResolvedPlan


def count_unit_needs(resolved: ResolvedPlan) -> Mapping[str, Need]:
    """Bytes that each dense unit needs, and one that has the whole model, by its name, as its
    backend says; units whose backends serve no such units are left out."""
    needs = {}
    for name in resolved.source.whole_units:
        whole = find_alone_backend(resolved.name_backend(name))
        assert whole is not None, name
        needs[name] = whole.need_unit_memory(describe_unit(resolved, name))
    for name in resolved.dense_units:
        backend = find_unit_backend(resolved.name_backend(name))
        if backend is not None:
            needs[name] = backend.need_unit_memory(describe_unit(resolved, name))
    return needs


def _find_sparse_backend(resolved: ResolvedPlan) -> ExecutorBackend:
    """The sparse unit's backend; any other if the plan names none that computes models."""
    unit = resolved.sparse_unit
    name = resolved.name_backend(unit) if resolved.has_backend(unit) else "cpu"
    backend = find_executor_backend(name) or find_executor_backend("cpu")
    assert backend is not None, "the CPU's backend computes models"
    return backend


def count_arrays(
    resolved: ResolvedPlan,
    machine: Machine | None = None,
    threads: int | None = None,
    *,
    chunks: int = 1,
) -> Mapping[str, int]:
    """Bytes that an executor takes by segment, on ``machine`` or on any that the device may be;
    ``threads`` where none are stated."""
    unit = resolved.device.units.get(resolved.sparse_unit)
    architecture: str | None = None if unit is None else unit.architecture
    features: Collection[str] | None = None if unit is None else unit.features
    if machine is not None:
        architecture = architecture or machine.architecture
        features = machine.features if features is None else features
    return _find_sparse_backend(resolved).count_segments(
        resolved,
        threads=count_stated_threads(resolved) or threads,
        chunks=chunks,
        architecture=architecture,
        features=features,
    )


def count_staging(resolved: ResolvedPlan) -> int:
    return STAGING_BUFFERS * count_staged_neurons(resolved) * resolved.bundle.stride


def count_threads(resolved: ResolvedPlan, machine: Machine) -> int:
    """Compute threads of a run on ``machine``: as stated, else its cores, as far as the workspace
    has room for them."""
    stated = count_stated_threads(resolved)
    if stated is not None:
        return stated
    room = resolved.plan.memory.segments.workspace - count_staging(resolved)

    def fits(count: int) -> bool:
        return count_arrays(resolved, machine, count, chunks=resolved.chunks)["workspace"] <= room

    return next(filter(fits, range(machine.cores, 1, -1)), 1)


def describe_unit(resolved: ResolvedPlan, name: str) -> UnitFacts:
    """What the backend of a unit is asked about."""
    if name == resolved.sparse_unit:
        return UnitFacts(resolved=resolved, unit=name, share=None)
    plan, model, rows = resolved.plan, resolved.model, resolved.divided_rows
    settings, owners = plan.units.get(name), [layer.dense for layer in resolved.layers]
    share = UnitShare(
        unit=resolved.device.units[name],
        model=model,
        bundle=resolved.bundle,
        neurons=tuple(0 if own is None or own.unit != name else own.kept for own in owners),
        wanted=list_wanted(resolved, name),
        graphs=None if settings is None else settings.graphs,
        matrices={} if rows is None or rows.unit != name else list_matrices(model, rows),
        chunk=count_chunk_tokens(plan),
        jobs=resolved.chunks,
        stretch=min(model.layer_neurons, STAGED_NEURONS),
    )
    return UnitFacts(resolved=resolved, unit=name, share=share)


def list_graph_tokens(resolved: ResolvedPlan, name: str) -> tuple[int, ...]:
    """Numbers of tokens of a unit's graphs, ascending; none if its backend computes any number."""
    backend = find_graph_backend(resolved.name_backend(name))
    return () if backend is None else backend.list_graph_tokens(describe_unit(resolved, name))
