"""Bytes that a plan's segments and units need, as their backends say."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import ceil
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
    TOKENS_TOGETHER,
    count_chunk_tokens,
    count_piece_bytes,
    count_staged_neurons,
    count_stated_threads,
    need_attention,
    need_cold,
    need_predictor,
)
from pi2.plan.arithmetic.units import Need, Needs, UnitFacts, UnitShare, list_matrices, list_wanted
from pi2.plan.documents.quantities import approximate_bytes
from pi2.plan.weights.layout import align_bytes

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


def compute_needs(resolved: ResolvedPlan) -> Needs:
    """Bytes needed by every segment of a plan whose model has a packable shape."""
    plan, model, arrays = resolved.plan, resolved.model, _count_arrays(resolved)
    copies = 1 if plan.decode.speculation is None else 2  # drafts may have to be taken back
    several = "" if plan.decode.batch == 1 else f"{plan.decode.batch} sequences x "
    states = "nothing, every layer has a KV cache"
    if model.states:
        states = f"{several}{len(model.states)} states" + ", with a copy" * (copies - 1)
    staging = _count_staging(resolved)
    return Needs(
        attention=need_attention(resolved),
        kv=Need(arrays.get("kv", 0), f"{several}{plan.kv.context} tokens"),
        state=Need(copies * arrays.get("state", 0), states),
        predictor=need_predictor(resolved),
        hot=_need_hot(resolved),
        cold=need_cold(resolved),
        workspace=Need(
            arrays["workspace"] + staging,
            f"arrays of {count_chunk_tokens(plan)} tokens "
            f"{approximate_bytes(arrays['workspace'])}, staging of {STAGING_BUFFERS} x "
            f"{count_staged_neurons(resolved)} neurons {approximate_bytes(staging)}",
        ),
    )


def need_beside_whole(resolved: ResolvedPlan) -> Needs:
    """Main memory of a plan whose unit has the whole model: staging buffers of min(f, 512) neurons
    and a piece of a dense tensor, and segments that use main memory."""
    name, stride = resolved.sparse_unit, resolved.bundle.stride
    nothing = Need(0, f"nothing, `{name}` has it in its memory")
    staging = STAGING_BUFFERS * count_staged_neurons(resolved) * stride
    piece = count_piece_bytes(resolved)
    hot = nothing
    if resolved.name_segment(name) == "hot":
        hot = count_unit_needs(resolved)[name]
    grouped = nothing
    if resolved.model.moe is not None and resolved.plan.decode.predictor != "none":
        size = resolved.model.shape.layers * align_bytes(4 * resolved.model.layer_neurons)
        grouped = Need(size, "whose neurons are whose")
    return Needs(
        attention=nothing,
        kv=nothing,
        state=nothing,
        predictor=grouped,
        hot=hot,
        cold=nothing,
        workspace=Need(
            staging + piece,
            f"staging of neurons {approximate_bytes(staging)}, "
            f"pieces of dense tensors {approximate_bytes(piece)}",
        ),
    )


def _need_hot(resolved: ResolvedPlan) -> Need:
    """Resident neurons that no dense unit owns, their number times the stride S, and what dense
    units need that have no memory of their own."""
    stride, units = resolved.bundle.stride, count_unit_needs(resolved)
    neurons = 0
    for layer in resolved.layers:
        # A unit whose backend is not known yet is taken to need what the store has.
        is_known = layer.dense is not None and layer.dense.unit in units
        neurons += len(layer.own_hot) if is_known else layer.hot_neurons
    total, parts = neurons * stride, [f"{neurons} hot neurons of {stride} bytes"]
    for name, need in units.items():
        if resolved.name_segment(name) == "hot":
            total += need.bytes
            parts.append(f"{name}: {need.explanation}")
    return Need(total, "; ".join(parts))


def _find_sparse_backend(resolved: ResolvedPlan) -> ExecutorBackend:
    """The sparse unit's backend; any other if the plan names none that computes models."""
    unit = resolved.sparse_unit
    name = resolved.name_backend(unit) if resolved.has_backend(unit) else "cpu"
    backend = find_executor_backend(name) or find_executor_backend("cpu")
    assert backend is not None, "the CPU's backend computes models"
    return backend


def _count_arrays(
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


def _count_staging(resolved: ResolvedPlan) -> int:
    return STAGING_BUFFERS * count_staged_neurons(resolved) * resolved.bundle.stride


def count_chunks(resolved: ResolvedPlan) -> int:
    """Chunks of a prompt that pass a layer together."""
    return resolved.source.count_chunks(resolved)


def count_store_chunks(resolved: ResolvedPlan) -> int:
    """The same of a store: up to 512 tokens with ``layers-first``."""
    plan = resolved.plan
    if plan.pipeline.prefill == "chunks-first":
        return 1
    room = plan.memory.segments.workspace - _count_staging(resolved)
    most = ceil(TOKENS_TOGETHER / count_chunk_tokens(plan))

    def fits(count: int) -> bool:
        return _count_arrays(resolved, chunks=count)["workspace"] <= room

    return next(filter(fits, range(most, 1, -1)), 1)


def count_threads(resolved: ResolvedPlan, machine: Machine) -> int:
    """Compute threads of a run on ``machine``: as stated, else its cores, as far as the workspace
    has room for them."""
    stated = count_stated_threads(resolved)
    if stated is not None:
        return stated
    room = resolved.plan.memory.segments.workspace - _count_staging(resolved)
    chunks = count_chunks(resolved)

    def fits(count: int) -> bool:
        return _count_arrays(resolved, machine, count, chunks=chunks)["workspace"] <= room

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
        jobs=count_chunks(resolved),
        stretch=min(model.layer_neurons, STAGED_NEURONS),
    )
    return UnitFacts(resolved=resolved, unit=name, share=share)


def list_graph_tokens(resolved: ResolvedPlan, name: str) -> tuple[int, ...]:
    """Numbers of tokens of a unit's graphs, ascending; none if its backend computes any number."""
    backend = find_graph_backend(resolved.name_backend(name))
    return () if backend is None else backend.list_graph_tokens(describe_unit(resolved, name))
