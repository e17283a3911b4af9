"""A model that an executor computes layer by layer, built of an open neuron store."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pi2.arrays import U8
from pi2.backends.cpu.request import describe_request
from pi2.backends.executor import Executor
from pi2.backends.host import load_host_loops
from pi2.backends.protocol import BuildRequest
from pi2.backends.units import DenseUnit, UnitFailed, UnitRequest
from pi2.diagnostics import UserError
from pi2.engine.accounts import Account
from pi2.engine.dense_shares import BesideUnit, DenseShares, SharedRows
from pi2.engine.experts import ExpertNeurons
from pi2.engine.feed_forward import FeedForward
from pi2.engine.layer_model import LayerModel, refuse_layers
from pi2.engine.loading import WEIGHTS, load_gates, read_neurons
from pi2.engine.opening import Opening, Parts
from pi2.fitting import (
    count_threads,
    describe_unit,
    find_backend,
    find_executor_backend,
    find_preparer,
    find_unit_backend,
)
from pi2.logging import get_logger
from pi2.machine import Machine, bind_calling_thread, list_allowed_cores
from pi2.memory.arena import allocate_cache, allocate_staging, make_loan
from pi2.memory.budget import Budget
from pi2.memory.bulk_load import Batch, BulkLoad
from pi2.memory.flash import FlashReader
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.sizes import count_stated_threads
from pi2.plan.weights.layout import Tensor
from pi2.progress import Progress
from pi2.store.file_read import BlockTensors, split_blocks

if TYPE_CHECKING:
    from pi2.memory.cache import NeuronCache


class LayersOpening(Opening):
    """Weights of a store, and a compiled executor. UserError P320 if a backend cannot run, P525
    for a mixture without predictors, P3xx, P5xx, P605, P651."""

    def open(self) -> None:
        resolved, progress = self.resolved, self.wish.progress
        # Whoever looks at neurons wants to see them all: then the executor computes everything.
        self._alone = self.wish.make_observer is not None
        name = resolved.name_backend(resolved.sparse_unit)
        backend = find_executor_backend(name)
        # The rules of the plan language have seen to it (P265).
        assert backend is not None, resolved.sparse_unit
        if resolved.source.wants_file(resolved) and not self._alone:
            raise refuse_mixture(resolved)
        self.weights = WEIGHTS[self.verdict](resolved, self.cleanup)
        self.texts = self.weights.texts
        if self._alone and self.verdict == "dry run":
            refuse_layers()
        request = make_request(resolved, self.machine, self.weights.tensors)
        self.request = replace(request, progress=progress)
        check_backends(resolved, self.request)
        preparer = find_preparer(name)
        self._build = backend.build if preparer is None else preparer.prepare(self.request)
        self._loops = load_host_loops(progress, self.machine.features)

    def build(self) -> Parts:
        resolved, weights, budget, cleanup = self.resolved, self.weights, self.budget, self.cleanup
        progress, plan = self.wish.progress, self.resolved.plan
        finish_hashes = weights.begin_hashes(reads_all=True)
        embedding, layer_embedding = weights.open_embeddings(budget)
        grouped = weights.group_by_expert(budget)
        bulk = BulkLoad(progress)
        cleanup.callback(bulk.close)
        dense, neurons, blocks = Batch(bulk), Batch(bulk), BlockTensors()
        rows = [own for own in (embedding, layer_embedding) if own is not None]
        request = weights.complete_request(self.request, rows, grouped, budget, dense, blocks)
        cache = allocate_cache(
            resolved, budget, self._loops, by_hotness=weights.is_by_hotness, alone=self._alone
        )
        reader = weights.open_reader(cache)
        # Its reads end before their files are closed.
        cleanup.callback(bulk.close)
        weights.begin_neurons(reader, cache, neurons)
        # Neurons are read while the executor is built, which may look at dense weights.
        dense.finish()
        blocks.arrange()
        executor = self._build(request)
        cleanup.callback(executor.close)
        observe = self.wish.make_observer
        observer = None if observe is None else observe(executor, request)
        if observer is not None:
            executor.observe(observer)
        shares = build_shares(resolved, executor, request, budget, progress, alone=self._alone)
        cleanup.callback(shares.close)
        staging = allocate_staging(resolved, budget)
        load_shares(shares, resolved, reader, staging, progress)
        neurons.finish()
        load_gates(reader, cache, request, staging, progress)
        finish_hashes()
        lock_fallback = budget.lock() if plan.memory.lock == "locked" else None
        feed_forward = FeedForward(
            executor,
            cache,
            reader,
            staging,
            layers=len(resolved.layers),
            decode=plan.decode,
            token_neurons=[
                resolved.model.shape.ffn * resolved.model.blocks[layer].ffn.active
                for layer in range(len(resolved.layers))
            ],
            separate_scales=request.scales is not None,
            shares=shares,
            in_order=observer is not None,
            whole=resolved.whole_layers,
            keeps_bits=resolved.names_by_cutoff,
            experts=None
            if grouped is None
            else ExpertNeurons(grouped, resolved.model.expert_count),
        )
        _bind_first_thread(request, cleanup)
        hot = cache.arena[: sum(map(len, cache.hot_slots))]
        resident = [hot, *(tensor.weights for tensor in request.tensors.values())]
        model = LayerModel(
            executor,
            feed_forward,
            layers=len(resolved.layers),
            chunk=plan.prefill.chunk,
            rows=make_rows(resolved, executor, shares) if request.tensors else None,
            embedding=embedding,
            layer_embedding=layer_embedding,
            is_single=max(plan.decode.batch, plan.decode.step_tokens) == 1,
            neuron_bytes=resolved.bundle.neuron_bytes,
        )
        parts = self.finish(
            model,
            _describe_build(resolved, request, cache),
            loan=make_loan(resolved, cache, budget),
            account=Account(resolved, self.verdict),
            reader=reader,
            units=shares.units,
            loaded_bytes=bulk.total_bytes,
            resident=[array.reshape(-1).view(np.uint8) for array in resident],
            compute_threads=request.threads,
            lock_fallback=lock_fallback,
            show_layers=lambda: model,
        )
        _report_fallbacks(reader)
        return parts


def _bind_first_thread(request: BuildRequest, cleanup: ExitStack) -> None:
    """Bind the calling thread, the first compute thread, to its core; ``cleanup`` lets it go."""
    if request.cores:
        free = list_allowed_cores()
        try:
            bind_calling_thread(request.cores[:1])
        except OSError as error:
            core, reason = request.cores[0], error.strerror
            get_logger().warning("thread not bound to its core", core=core, reason=reason)
            return
        cleanup.callback(bind_calling_thread, free)


def _describe_build(
    resolved: ResolvedPlan, request: BuildRequest, cache: NeuronCache
) -> dict[str, object]:
    return {
        "backend": resolved.name_backend(resolved.sparse_unit),
        "units": list(resolved.dense_units),
        "threads": request.threads,
        "architecture": request.architecture,
        "hot_neurons": sum(len(slots) for slots in cache.hot_slots),
        "cold_slots": cache.cold_capacity,
        "neurons": cache.neurons * len(cache.hot_slots),
        "predictor": resolved.plan.decode.predictor,
    }


def _report_fallbacks(reader: FlashReader) -> None:
    log = get_logger()
    if reader.fallback is not None:
        log.warning("neurons are read through the page cache", reason=reader.fallback)
    if reader.engine_fallback is not None:
        log.info("neurons are read with pread", reason=reader.engine_fallback)
    if reader.phases_fallback is not None:
        log.info("neurons are read in one phase", reason=reader.phases_fallback)


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
        chunks=resolved.chunks,
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
    return DenseShares(executor, units, layers, neurons)


def make_rows(resolved: ResolvedPlan, executor: Executor, shares: DenseShares) -> SharedRows | None:
    """The rows that are shared with another unit; None if the executor computes all."""
    rows = resolved.divided_rows
    if rows is None or rows.unit not in shares.units:
        return None
    return SharedRows(executor, shares.units[rows.unit], rows, resolved.model)


def _build_unit(
    resolved: ResolvedPlan, name: str, build: BuildRequest, budget: Budget, progress: Progress
) -> DenseUnit:
    backend = find_unit_backend(resolved.name_backend(name))
    share = describe_unit(resolved, name).share
    # The rules of the plan language have seen to it (P265).
    assert backend is not None and share is not None, name
    rows = {
        matrix: build.tensors[matrix].take_rows(0, count)
        for matrix, (count, *_) in share.matrices.items()
        if matrix in build.tensors  # none in a dry run
    }
    segment = resolved.name_segment(name)
    request = UnitRequest(
        name=name,
        share=share,
        scales=build.scales,
        # As stores have them, which units expect.
        tensors={
            key: own if own.format is None else split_blocks(own) for key, own in rows.items()
        },
        allocate=partial(budget.allocate, segment),
        adopt=partial(budget.adopt, segment),
        count=partial(budget.charge, segment),
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
    reader: FlashReader,
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


def _load_layer(unit: DenseUnit, layer: int, kept: int, reader: FlashReader, staging: U8) -> None:
    room = unit.offer_room(layer) if kept else None
    if room is not None:
        reader.load_run(layer, 0, room[:kept])
        unit.keep(layer, 0, room[:kept])
        return
    for first, piece in read_neurons(reader, layer, kept, staging[0]):
        unit.keep(layer, first, piece)


def refuse_mixture(resolved: ResolvedPlan) -> UserError:
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
