"""Making the units beside the executor, and loading the neurons that they own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from pi2.arrays import U8
from pi2.backends.dense_unit import DenseUnit, UnitFailed, UnitRequest
from pi2.backends.protocol import BuildRequest, Executor, RowDivider, Tensor
from pi2.diagnostics import UserError
from pi2.engine.dense_shares import BesideUnit, DenseShares
from pi2.engine.divided_rows import SharedRows, WholeRows
from pi2.logging import get_logger
from pi2.memory.budget import Budget
from pi2.memory.flash import FlashReader
from pi2.memory.null_reader import NullReader
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.rows import list_matrices, name_head
from pi2.plan.arithmetic.sizes import STAGED_NEURONS, count_chunk_tokens, count_chunks
from pi2.plan.arithmetic.units import describe_unit, list_wanted
from pi2.plan.documents.backends import find_unit_backend
from pi2.progress import Progress


def build_shares(
    resolved: ResolvedPlan,
    executor: Executor,
    request: BuildRequest,
    budget: Budget,
    progress: Progress,
    *,
    alone: bool = False,
) -> DenseShares:
    """Make the units that the plan names beside the executor, or none if it shall work ``alone``;
    UserError P320 where one cannot be had."""
    units: dict[str, BesideUnit] = {}
    try:
        for name in () if alone else resolved.dense_units:
            settings = resolved.plan.units.get(name)
            units[name] = BesideUnit(
                name=name,
                unit=_build_unit(resolved, name, request, budget, progress),
                goes_on=settings is not None and settings.on_failure == "cpu",
                streams=resolved.plan.prefill.unit == name,
            )
    except BaseException:
        for made in units.values():
            made.unit.close()
        raise
    layers = [layer.dense for layer in resolved.layers]
    neurons = resolved.model.layer_neurons
    return DenseShares(executor, units, layers, neurons, on_lost=_report_lost)


def make_rows(resolved: ResolvedPlan, executor: Executor, shares: DenseShares) -> WholeRows:
    """Return what computes projections and the head."""
    rows = resolved.divided_rows
    if rows is None or rows.unit not in shares.units or not isinstance(executor, RowDivider):
        return WholeRows(executor)
    return SharedRows(executor, shares.units[rows.unit], rows, name_head(resolved.model))


def _cut_matrices(resolved: ResolvedPlan, name: str, request: BuildRequest) -> Mapping[str, Tensor]:
    """Rows of projections and of the head that a unit has."""
    rows = resolved.divided_rows
    if rows is None or rows.unit != name:
        return {}
    return {
        matrix: request.tensors[matrix].take_rows(0, count)
        for matrix, (count, *_) in list_matrices(resolved.model, rows).items()
        if matrix in request.tensors
    }


def _build_unit(
    resolved: ResolvedPlan, name: str, build: BuildRequest, budget: Budget, progress: Progress
) -> DenseUnit:
    plan, model = resolved.plan, resolved.model
    backend = find_unit_backend(resolved.name_backend(name))
    # The rules of the plan language have seen to it (P265).
    assert backend is not None, name
    kept = describe_unit(resolved, name).neurons
    assert kept is not None, name
    settings = plan.units.get(name)
    request = UnitRequest(
        name=name,
        unit=resolved.device.units[name],
        model=model,
        bundle=resolved.bundle,
        scales=build.scales,
        neurons=kept,
        wanted=list_wanted(resolved, name),
        graphs=None if settings is None else settings.graphs,
        matrices=_cut_matrices(resolved, name, build),
        chunk=count_chunk_tokens(plan),
        jobs=count_chunks(resolved),
        stretch=min(model.layer_neurons, STAGED_NEURONS),
        process="same" if settings is None else settings.process,
        allocate=partial(budget.allocate, resolved.name_segment(name)),
        adopt=partial(budget.adopt, resolved.name_segment(name)),
        count=partial(budget.charge, resolved.name_segment(name)),
        progress=progress,
    )
    try:
        return backend.build_unit(request)
    except UnitFailed as error:
        raise UserError.of(
            "P320", f"the unit {name!r} cannot be used: {error}", help=error.help
        ) from None


def load_shares(
    shares: DenseShares,
    resolved: ResolvedPlan,
    reader: FlashReader | NullReader,
    staging: U8,
    progress: Progress,
) -> None:
    """Read the neurons that units own from flash: to where they stay, if the unit offers its
    memory, else through ``staging`` [2, n, stride].  UserError P614 if a unit fails."""
    count = len(resolved.layers)
    for number, layer in enumerate(resolved.layers):
        if layer.dense is None or layer.dense.unit not in shares.units:
            continue
        unit, kept = shares.units[layer.dense.unit], layer.dense.kept
        try:
            _load_layer(unit.unit, number, kept, reader, staging)
        except UnitFailed as error:
            raise UserError.of("P614", f"the unit {unit.name!r} has failed: {error}") from None
        progress(f"loading neurons of {unit.name}", (number + 1) / count)


def _load_layer(
    unit: DenseUnit, layer: int, kept: int, reader: FlashReader | NullReader, staging: U8
) -> None:
    room = unit.offer_room(layer) if kept else None
    if room is not None:
        reader.start_run(layer, 0, room[:kept]).result()
        unit.keep(layer, 0, room[:kept])
        return
    size = staging.shape[1]
    for first in range(0, kept, size):
        piece = staging[0, : min(size, kept - first)]
        reader.start_run(layer, first, piece).result()
        unit.keep(layer, first, piece)


def _report_lost(unit: BesideUnit) -> None:
    get_logger().warning("the run goes on without a unit", unit=unit.name, reason=unit.lost)
