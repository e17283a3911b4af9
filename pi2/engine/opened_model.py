"""An open store and compiled kernels, made before memory is filled: compilers need over 100 MB."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from pi2.arrays import U8
from pi2.backends.host import HostLoops, load_host_loops
from pi2.backends.protocol import BuildRequest, Executor, RowDivider, Tensor
from pi2.backends.requests import describe_request
from pi2.backends.units import DenseUnit, UnitFailed, UnitRequest
from pi2.diagnostics import UserError
from pi2.engine.dense_shares import BesideUnit, DenseShares, SharedRows
from pi2.engine.loading import open_store
from pi2.fitting import find_backend, find_executor_backend, find_preparer, find_unit_backend
from pi2.fitting.sizes import count_chunks, count_threads, describe_unit
from pi2.logging import get_logger
from pi2.machine import Machine, detect_machine
from pi2.memory.budget import Budget
from pi2.memory.flash import FlashReader, NullReader
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.sizes import STAGED_NEURONS, count_chunk_tokens, count_stated_threads
from pi2.plan.arithmetic.units import list_matrices, list_wanted, name_head
from pi2.progress import Progress
from pi2.store.file_read import split_blocks
from pi2.store.reader import NeuronStore
from pi2.tokens.table_tokenizer import Coder, TableTokenizer, take_library

if TYPE_CHECKING:
    from pi2.engine.model_texts import ModelTexts


def make_request(
    resolved: ResolvedPlan, machine: Machine, tensors: Mapping[str, Tensor]
) -> BuildRequest:
    """A build request without memory, to compile kernels for; gate rows have no layers."""
    unit = resolved.device.units[resolved.sparse_unit]
    features = unit.features if unit.features is not None else machine.features
    threads = count_threads(resolved, machine)
    if count_stated_threads(resolved) is None and threads < machine.cores:
        get_logger().warning(
            "the workspace has room for fewer threads than cores: state threads.compute",
            threads=threads,
            cores=machine.cores,
        )
    return describe_request(
        resolved,
        tensors,
        threads=threads,
        chunks=count_chunks(resolved),
        features=features,
        architecture=unit.architecture or machine.architecture,
    )


def build_shares(
    resolved: ResolvedPlan,
    executor: Executor,
    request: BuildRequest,
    budget: Budget,
    progress: Progress,
    *,
    alone: bool = False,
) -> DenseShares:
    """Make the units that the plan names next to the executor, or none with ``alone``; UserError
    P320 if one is not available."""
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


def make_rows(resolved: ResolvedPlan, executor: Executor, shares: DenseShares) -> SharedRows | None:
    """The rows that are shared with another unit; None if the executor computes all."""
    rows = resolved.divided_rows
    if rows is None or rows.unit not in shares.units or not isinstance(executor, RowDivider):
        return None
    return SharedRows(executor, shares.units[rows.unit], rows, name_head(resolved.model))


def unpack_rows(tensor: Tensor) -> Tensor:
    """Return a tensor as stores have it, which units expect."""
    return tensor if tensor.format is None else split_blocks(tensor)


def _cut_matrices(resolved: ResolvedPlan, name: str, request: BuildRequest) -> Mapping[str, Tensor]:
    rows = resolved.divided_rows
    if rows is None or rows.unit != name:
        return {}
    return {
        matrix: unpack_rows(request.tensors[matrix].take_rows(0, count))
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


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model that is computed layer by layer, before it has memory."""

    resolved: ResolvedPlan
    request: BuildRequest
    """All but what memory is given out for."""
    build: Callable[[BuildRequest], Executor]
    """Makes the executor of the completed request."""
    alone: bool
    """Whether the executor computes everything, including the plan's shares of other units."""
    store: NeuronStore | None
    """None where nothing is computed, as are tokenizer and loops."""
    texts: ModelTexts
    loops: HostLoops | None
    draft: OpenedModel | None
    """The model that drafts tokens, if there is one."""


def open_model(
    resolved: ResolvedPlan, progress: Progress, cleanup: ExitStack, *, alone: bool = False
) -> OpenedModel:
    """Open the parts that a plan names, closed by ``cleanup``, and compile; ``alone``: for one
    executor. UserError P320 if a backend cannot run, P525 for a mixture without predictors,
    P3xx for the machine, P5xx for the store, P605, P618, P651."""
    backend = find_executor_backend(resolved.name_backend(resolved.sparse_unit))
    # The rules of the plan language have seen to it (P265).
    assert backend is not None, resolved.sparse_unit
    if resolved.plan.decode.predictor == "router" and not alone:
        raise _refuse_mixture(resolved)
    machine = detect_machine()
    store, texts = open_store(resolved, machine, cleanup)
    request = make_request(resolved, machine, {} if store is None else store.tensors)
    request = replace(request, progress=progress, rows=None if alone else request.rows)
    check_backends(resolved, request)
    preparer = find_preparer(resolved.name_backend(resolved.sparse_unit))
    build = backend.build if preparer is None else preparer.prepare(request)
    loops = None if store is None else load_host_loops(progress, machine.features)
    draft = None
    if resolved.draft is not None:
        draft = open_model(resolved.draft, progress, cleanup)
        if store is not None:
            check_draft(resolved.draft, resolved, texts.coder, draft.texts.coder)
    return OpenedModel(
        resolved=resolved,
        request=request,
        build=build,
        alone=alone,
        store=store,
        texts=texts,
        loops=loops,
        draft=draft,
    )


def _refuse_mixture(resolved: ResolvedPlan) -> UserError:
    store, name = resolved.store_path, resolved.model.id
    source = str(store) if store.is_dir() else "CHECKPOINT"
    if store.is_dir() and not any(store.glob("*.model.toml")):
        document = resolved.path.parent / (resolved.plan.model or "")
        source += f" --model {document if document.is_file() else resolved.plan.model}"
    return UserError.of(
        "P525",
        f"the router of `{name}` chooses whole experts, and this plan names a store of it",
        help=f"such models run as GGUF files: `pi2 convert {source} -o {name}.gguf`, then write "
        f'weights = "{name}.gguf" instead of model, store and decode.predictor, or '
        f"`pi2 run {name}.gguf`",
        file=str(resolved.path),
    )


def check_backends(resolved: ResolvedPlan, request: BuildRequest) -> None:
    """UserError P320 where the backend of a unit cannot run here."""
    for unit in (resolved.sparse_unit, *resolved.dense_units):
        name = resolved.name_backend(unit)
        obstacles = find_backend(name).find_obstacles(request.features, request.architecture)
        if obstacles:
            raise UserError.of("P320", f"backend {name!r} cannot run here: {'; '.join(obstacles)}")


def check_draft(
    draft: ResolvedPlan, resolved: ResolvedPlan, tokenizer: Coder, guessing: Coder
) -> None:
    """UserError P618 if the draft model has other tokens."""
    if isinstance(tokenizer, TableTokenizer) and isinstance(guessing, TableTokenizer):
        is_same = tokenizer.has_tokens_of(guessing)
    else:
        is_same = take_library(tokenizer).get_vocab() == take_library(guessing).get_vocab()
    if is_same:
        return
    raise UserError.of(
        "P618",
        f"{draft.path} cannot draft for this plan: its tokens are others",
        help="name the plan of a model with the same tokenizer in decode.speculation.plan",
        file=str(resolved.path),
    )
