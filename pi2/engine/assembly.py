"""From an opened model to one that runs: memory is given out, weights are read, parts are built."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import numpy as np

from pi2.arrays import I32
from pi2.backends.executor import ExecutorObserver
from pi2.backends.protocol import BuildRequest, Executor
from pi2.engine.accounts import Account, DryAccount
from pi2.engine.experts import ExpertNeurons
from pi2.engine.feed_forward import CutFeedForward, FeedForward
from pi2.engine.layer_model import LayerModel
from pi2.engine.loading import (
    allocate_gate_rows,
    begin_dense,
    begin_hashes,
    begin_neurons,
    begin_scales,
    group_by_expert,
    is_by_hotness,
    list_filled_layers,
    load_gates,
    open_embeddings,
    open_reader,
)
from pi2.engine.opened_model import OpenedModel, build_shares, load_shares, make_rows
from pi2.engine.parts import Parts, count_dense_bytes
from pi2.engine.sequences import make_sequences
from pi2.logging import get_logger
from pi2.machine import bind_calling_thread, list_allowed_cores
from pi2.memory.arena import allocate_cache, allocate_staging, make_loan
from pi2.memory.budget import Budget, make_budget
from pi2.memory.bulk_load import Batch, BulkLoad
from pi2.memory.cache import NeuronCache
from pi2.memory.flash import FlashReader, NullReader
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.store.file_read import BlockTensors, EmbeddingRows

MakeObserver = Callable[[Executor, BuildRequest], ExecutorObserver | None]
"""Gives what observes an executor's dense layers, if anything."""


def build_parts(
    opened: OpenedModel,
    cleanup: ExitStack,
    *,
    start: float,
    make_observer: MakeObserver | None = None,
) -> Parts:
    """Build a model that is computed layer by layer, which closes what ``cleanup`` does."""
    resolved, store, progress = opened.resolved, opened.store, opened.request.progress
    hashes = begin_hashes(resolved, store, cleanup)
    budget = make_budget(resolved)
    embedding, layer_embedding = open_embeddings(resolved, store, budget, cleanup)
    grouped = group_by_expert(resolved, store, budget)
    bulk = BulkLoad(progress)
    cleanup.callback(bulk.close)
    dense, neurons, blocks = Batch(bulk), Batch(bulk), BlockTensors()
    looked_up = [own for own in (embedding, layer_embedding) if own is not None]
    request = complete_request(opened, looked_up, grouped, budget, dense, blocks)
    by_hotness = is_by_hotness(store)
    cache = allocate_cache(resolved, budget, by_hotness=by_hotness, alone=opened.alone)
    cache.loops = opened.loops
    reader = open_reader(resolved, store, cache)
    cleanup.callback(reader.close)
    # Its reads end before their files are closed.
    cleanup.callback(bulk.close)
    if store is not None:
        store.check_unchanged()
    begin_neurons(reader, cache, neurons, fill=list_filled_layers(resolved))
    # Neurons are read while the executor is built, which may look at dense weights.
    dense.finish()
    blocks.arrange()
    executor = opened.build(request)
    cleanup.callback(executor.close)
    observer = None if make_observer is None else make_observer(executor, request)
    if observer is not None:
        executor.observe(observer)
    shares = build_shares(resolved, executor, request, budget, progress, alone=opened.alone)
    cleanup.callback(shares.close)
    staging = allocate_staging(resolved, budget)
    load_shares(shares, resolved, reader, staging, progress)
    neurons.finish()
    load_gates(reader, cache, request, staging, progress)
    if hashes is not None:
        hashes.finish()
    lock_fallback = budget.lock() if resolved.plan.memory.lock == "locked" else None
    feed_forward = _choose_feed_forward(resolved)(
        executor,
        cache,
        reader,
        staging,
        layers=len(resolved.layers),
        decode=resolved.plan.decode,
        token_neurons=[
            resolved.model.shape.ffn * resolved.model.blocks[layer].ffn.active
            for layer in range(len(resolved.layers))
        ],
        separate_scales=request.scales is not None,
        shares=shares,
        in_order=observer is not None,
        experts=None if grouped is None else ExpertNeurons(grouped, resolved.model.expert_count),
    )
    _bind_first_thread(request, cleanup)
    _report_build(resolved, request, cache, reader)
    plan = resolved.plan
    hot = cache.arena[: sum(map(len, cache.hot_slots))]
    weights = [hot, *(tensor.weights for tensor in request.tensors.values())]
    model = LayerModel(
        executor,
        feed_forward,
        layers=len(resolved.layers),
        chunk=plan.prefill.chunk,
        rows=make_rows(resolved, executor, shares),
        embedding=embedding,
        layer_embedding=layer_embedding,
        is_single=max(plan.decode.batch, plan.decode.step_tokens) == 1,
        neuron_bytes=resolved.bundle.neuron_bytes,
    )
    return Parts(
        resolved=resolved,
        texts=opened.texts,
        account=DryAccount(resolved) if store is None else Account(resolved),
        budget=budget,
        reader=reader,
        forward=make_sequences(
            model, resolved, chunks=request.chunks, loan=make_loan(resolved, cache, budget)
        ),
        step_bytes=count_dense_bytes(resolved),
        units=shares.units,
        draft=_build_draft(opened, start, cleanup),
        load_s=time.perf_counter() - start,
        loaded_bytes=bulk.total_bytes,
        resident=[array.reshape(-1).view(np.uint8) for array in weights],
        compute_threads=request.threads,
        lock_fallback=lock_fallback,
        release=cleanup.pop_all(),
    )


def _build_draft(opened: OpenedModel, start: float, cleanup: ExitStack) -> Parts | None:
    if opened.draft is None:
        return None
    with ExitStack() as own:
        draft = build_parts(opened.draft, own, start=start)
    cleanup.enter_context(draft.release)
    return draft


def complete_request(
    opened: OpenedModel,
    rows: list[EmbeddingRows],
    grouped: list[I32] | None,
    budget: Budget,
    batch: Batch,
    blocks: BlockTensors,
) -> BuildRequest:
    """What the executor is built of: dense weights and scales, which ``batch`` reads, and room;
    ``blocks`` arranges the weights that ``batch`` has read."""
    resolved = opened.resolved
    request = replace(opened.request, gate_rows=None, allocate=budget.allocate)
    if opened.store is None:
        return request
    tensors = begin_dense(resolved, opened.store, rows, budget, batch, blocks)
    scales = begin_scales(resolved, opened.store, budget, batch)
    gate_rows = gate_biases = None
    if resolved.plan.decode.predictor == "gate":
        gate_rows = {layer: allocate_gate_rows(resolved, budget) for layer in resolved.named_layers}
        if resolved.bundle.biases:
            size = 4 * resolved.model.layer_neurons
            gate_biases = [
                budget.allocate("predictor", size).view(np.float32) for _ in resolved.layers
            ]
    return replace(
        request,
        tensors=tensors,
        gate_rows=gate_rows,
        scales=scales,
        gate_biases=gate_biases,
        expert_neurons=None if resolved.plan.decode.names_all else grouped,
    )


def _choose_feed_forward(resolved: ResolvedPlan) -> Callable[..., FeedForward]:
    if resolved.names_by_cutoff:
        return partial(CutFeedForward, cut=resolved.named_layers)
    return FeedForward


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


def _report_build(
    resolved: ResolvedPlan,
    request: BuildRequest,
    cache: NeuronCache,
    reader: FlashReader | NullReader,
) -> None:
    log = get_logger(plan_digest=resolved.digest[:12])
    log.info(
        "model loaded",
        plan=str(resolved.path),
        backend=resolved.name_backend(resolved.sparse_unit),
        units=list(resolved.dense_units),
        threads=request.threads,
        architecture=request.architecture,
        hot_neurons=sum(len(slots) for slots in cache.hot_slots),
        cold_slots=cache.cold_capacity,
        neurons=cache.neurons * len(cache.hot_slots),
        predictor=resolved.plan.decode.predictor,
    )
    if reader.fallback is not None:
        log.warning("neurons are read through the page cache", reason=reader.fallback)
    if reader.engine_fallback is not None:
        log.info("neurons are read with pread", reason=reader.engine_fallback)
    if reader.phases_fallback is not None:
        log.info("neurons are read in one phase", reason=reader.phases_fallback)
