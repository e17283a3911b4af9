"""From a plan's path to a model that runs: load -> resolve -> validate -> open -> build -> run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pi2.arrays import I32
from pi2.backends.executor import ExecutorObserver
from pi2.backends.protocol import BuildRequest, Executor
from pi2.diagnostics import UserError
from pi2.engine.experts import ExpertNeurons, RoutingDials, make_dials
from pi2.engine.feed_forward import CutFeedForward, FeedForward
from pi2.engine.forward import Forward
from pi2.engine.loaded_model import LoadedModel
from pi2.engine.loading import (
    begin_hashes,
    begin_neurons,
    count_neurons,
    group_by_expert,
    is_by_hotness,
    list_filled_layers,
    load_gates,
    open_embedding,
    open_layer_embedding,
    open_reader,
    open_store,
)
from pi2.engine.opened_model import (
    OpenedModel,
    build_shares,
    check_fit,
    describe_build,
    load_shares,
    make_rows,
    open_model,
)
from pi2.engine.parts import LayerParts, Parts
from pi2.engine.routed import RoutedFeedForward
from pi2.engine.whole_forward import load_whole, make_whole_forward
from pi2.fitting import find_backend
from pi2.fitting.sizes import count_chunks
from pi2.logging import get_logger
from pi2.machine import (
    bind_calling_thread,
    detect_machine,
    list_allowed_cores,
)
from pi2.memory.arena import (
    allocate_cache,
    allocate_staging,
    find_granule,
    make_loan,
)
from pi2.memory.budget import Budget
from pi2.memory.bulk_load import Batch, BulkLoad
from pi2.memory.cache import NeuronCache
from pi2.memory.flash import FlashReader, NullReader
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.progress import Progress, ignore_progress

if TYPE_CHECKING:
    from pi2.plan.reading.thresholds import GivenThresholds

MakeObserver = Callable[[Executor, BuildRequest], ExecutorObserver | None]
"""Gives what observes an executor's dense layers, if anything."""


def load(
    path: str | Path,
    *,
    set: Mapping[str, object] | None = None,
    locked: bool = False,
    memory: str | None = None,
    progress: Progress | None = None,
    make_observer: MakeObserver | None = None,
    thresholds: GivenThresholds = None,
) -> LoadedModel:
    """Load the model of the plan at ``path``; the rest is `pi2.load`'s."""
    # A bundle has none of these: its plan was resolved where it was built.
    from pi2.plan.documents.quantities import parse_size
    from pi2.refit import read_plan
    from pi2.sharing.resolver import LockedReferences

    start = time.perf_counter()
    resolver = LockedReferences(Path(path).parent, locked=locked)
    found = read_plan(
        Path(path),
        overrides=set,
        memory_bytes=None if memory is None else parse_size(memory),
        resolver=resolver,
        thresholds=thresholds,
    )
    if found.changes:
        get_logger().info("plan fitted", changes=found.changes)
    report = progress or ignore_progress
    model = build(found.resolved, progress=report, start=start, make_observer=make_observer)
    model.changes = found.changes
    return model


def build(
    resolved: ResolvedPlan,
    *,
    progress: Progress,
    start: float,
    make_observer: MakeObserver | None = None,
) -> LoadedModel:
    """Instantiate what ``resolved`` names, in the order in which the parts need each other."""
    if resolved.gives_text:
        name = resolved.name_backend(resolved.sparse_unit)
        raise UserError.of(
            "P678",
            f"backend {name!r} of `{resolved.sparse_unit}` gives text and no logits, which this"
            " needs",
            help="`pi2 run PLAN --prompt TEXT` works with it; else name another backend",
        )
    if resolved.file is not None:
        from pi2.engine.file_loading import load_file

        return LoadedModel(load_file(resolved, make_budget(resolved), progress, start))
    if resolved.has_whole_unit:
        return build_whole_model(resolved, progress=progress, start=start, observed=make_observer)
    with ExitStack() as cleanup:
        # Whoever looks at neurons wants to see them all: then the executor computes everything.
        opened = open_model(resolved, progress, cleanup, alone=make_observer is not None)
        parts = build_parts(
            opened, cleanup, progress=progress, start=start, make_observer=make_observer
        )
    return LoadedModel(parts)


def build_parts(
    opened: OpenedModel,
    cleanup: ExitStack,
    *,
    progress: Progress,
    start: float,
    make_observer: MakeObserver | None = None,
) -> Parts:
    """Instantiate a model that is computed layer by layer, which closes what ``cleanup`` does."""
    resolved, backend, store = opened.resolved, opened.backend, opened.store
    hashes = None if store is None else begin_hashes(resolved, store, cleanup)
    budget = make_budget(resolved)
    embedding = open_embedding(resolved, store, budget)
    layer_embedding = open_layer_embedding(resolved, store, budget)
    rows = [own for own in (embedding, layer_embedding) if own is not None]
    for own in rows:
        cleanup.callback(own.close)
    grouped = group_by_expert(resolved, store, budget)
    bulk = BulkLoad(progress)
    cleanup.callback(bulk.close)
    dense, neurons = Batch(bulk), Batch(bulk)
    machine = opened.machine
    request = describe_build(resolved, machine, store, rows, grouped, budget, dense, progress)
    seen = make_observer is not None
    if seen:
        request = replace(request, rows=None)
    cache = allocate_cache(
        resolved,
        budget,
        by_hotness=is_by_hotness(store),
        alone=seen,
        granule=find_granule(resolved, grouped),
    )
    cache.loops = opened.loops
    reader = open_reader(resolved, store, cache)
    cleanup.callback(reader.close)
    # Its reads end before their files are closed.
    cleanup.callback(bulk.close)
    if store is not None:
        store.check_unchanged()
    fill = list_filled_layers(resolved)
    if isinstance(reader, NullReader):
        count_neurons(reader, cache, fill=fill)
    else:
        begin_neurons(reader, cache, neurons, fill=fill)
    # Neurons are read while the executor is built, which may look at dense weights.
    dense.finish()
    executor = backend.build(request)
    cleanup.callback(executor.close)
    observer = None if make_observer is None else make_observer(executor, request)
    if observer is not None:
        executor.observe(observer)
    shares = build_shares(resolved, executor, request, budget, progress, alone=seen)
    cleanup.callback(shares.close)
    staging = allocate_staging(resolved, budget)
    load_shares(shares, resolved, reader, staging, progress)
    neurons.finish()
    load_gates(reader, cache, request, staging, progress)
    if hashes is not None:
        hashes.finish()
    lock_fallback = budget.lock() if resolved.plan.memory.lock == "locked" else None
    make_feed_forward: Callable[..., FeedForward] = FeedForward
    if resolved.plan.decode.predictor == "router":
        dials = make_plan_dials(resolved, request)
        make_feed_forward = partial(RoutedFeedForward, dials=dials)
    elif resolved.names_by_cutoff:
        make_feed_forward = partial(CutFeedForward, cut=resolved.named_layers)
    feed_forward = make_feed_forward(
        executor,
        cache,
        reader,
        staging,
        layers=len(resolved.layers),
        decode=resolved.plan.decode,
        token_neurons=[
            resolved.model.shape.ffn * resolved.model.count_active(layer)
            for layer in range(len(resolved.layers))
        ],
        separate_scales=request.scales is not None,
        shares=shares,
        in_order=observer is not None,
        experts=make_experts(resolved, grouped),
    )
    bind_first_thread(request, cleanup)
    report_build(resolved, request, cache, reader)
    forward = Forward(
        executor,
        feed_forward,
        layers=len(resolved.layers),
        chunk=resolved.plan.prefill.chunk,
        chunks=count_chunks(resolved),
        context=resolved.plan.kv.context,
        sequences=resolved.plan.decode.batch,
        rows=make_rows(resolved, executor, shares),
        loan=make_loan(resolved, cache, budget),
        embedding=embedding,
        layer_embedding=layer_embedding,
        has_states=bool(resolved.model.state_layers),
        step_tokens=resolved.plan.decode.step_tokens,
    )
    draft = build_draft(opened, progress, start, cleanup)
    return Parts(
        resolved=resolved,
        store=store,
        tokenizer=opened.tokenizer,
        budget=budget,
        layers=LayerParts(executor=executor, cache=cache, feed_forward=feed_forward),
        reader=reader,
        forward=forward,
        load_s=time.perf_counter() - start,
        loaded_bytes=bulk.total_bytes,
        compute_threads=request.threads,
        lock_fallback=lock_fallback,
        release=cleanup.pop_all(),
        draft=draft,
    )


def build_draft(
    opened: OpenedModel, progress: Progress, start: float, cleanup: ExitStack
) -> Parts | None:
    """Build the model that guesses tokens, if there is one."""
    if opened.draft is None:
        return None
    with ExitStack() as own:
        draft = build_parts(opened.draft, own, progress=progress, start=start)
    cleanup.enter_context(draft.release)
    return draft


def build_whole_model(
    resolved: ResolvedPlan,
    *,
    progress: Progress,
    start: float,
    observed: MakeObserver | None,
) -> LoadedModel:
    """Bring a model to the unit that has it as a whole; UserError P662 if its neurons are to be
    observed."""
    if observed is not None:
        raise UserError.of(
            "P662",
            f"{resolved.sparse_unit!r} has the whole model and does not show what its neurons do",
            help="take a plan whose split gives the neurons to a CPU",
        )
    with ExitStack() as cleanup:
        store = hashes = tokenizer = None
        if find_backend(resolved.name_backend(resolved.sparse_unit)).COMPUTES:
            check_fit(resolved, detect_machine())
            store, tokenizer = open_store(resolved, cleanup)
            hashes = begin_hashes(resolved, store, cleanup)
        budget = make_budget(resolved)
        whole, reader = load_whole(resolved, store, budget, cleanup, progress)
        if hashes is not None:
            hashes.finish()
        get_logger(plan_digest=resolved.digest[:12]).info(
            "model loaded",
            plan=str(resolved.path),
            backend=resolved.name_backend(resolved.sparse_unit),
            whole_on=resolved.sparse_unit,
            predictor=resolved.plan.decode.predictor,
        )
        release = cleanup.pop_all()
    return LoadedModel(
        Parts(
            resolved=resolved,
            store=store,
            tokenizer=tokenizer,
            budget=budget,
            layers=None,
            whole=whole,
            reader=reader,
            forward=make_whole_forward(whole, resolved),
            load_s=time.perf_counter() - start,
            compute_threads=1,
            release=release,
        )
    )


def make_plan_dials(resolved: ResolvedPlan, request: BuildRequest) -> RoutingDials | None:
    """What lets routing deviate from the model's, where the plan asks for it."""
    return make_dials(resolved.plan.experts, resolved.model, request.tensors)


def make_experts(resolved: ResolvedPlan, grouped: list[I32] | None) -> ExpertNeurons | None:
    """What tells whose neurons are whose, in a mixture."""
    return None if grouped is None else ExpertNeurons(grouped, resolved.model.expert_count)


def make_budget(resolved: ResolvedPlan) -> Budget:
    """Make the budget of the plan's segments and of the units beside the sparse one."""
    memory = resolved.plan.memory
    units = {f"units.{name}": unit.budget for name, unit in memory.units.items()}
    return Budget({**dict(memory.segments), **units})


def bind_first_thread(request: BuildRequest, cleanup: ExitStack) -> None:
    """Bind the calling thread, which is the first compute thread, to its core; ``cleanup`` lets it
    go."""
    if request.cores:
        free = list_allowed_cores()
        try:
            bind_calling_thread(request.cores[:1])
        except OSError as error:
            core, reason = request.cores[0], error.strerror
            get_logger().warning("thread not bound to its core", core=core, reason=reason)
            return
        cleanup.callback(bind_calling_thread, free)


def report_build(
    resolved: ResolvedPlan,
    request: BuildRequest,
    cache: NeuronCache,
    reader: FlashReader | NullReader,
) -> None:
    """Log what was built."""
    log = get_logger(plan_digest=resolved.digest[:12])
    log.info(
        "model loaded",
        plan=str(resolved.path),
        backend=resolved.name_backend(resolved.sparse_unit),
        units=list(resolved.dense_units),
        threads=request.threads,
        architecture=request.architecture,
        hot_neurons=cache.granule * sum(len(slots) for slots in cache.hot_slots),
        cold_slots=cache.granule * cache.cold_capacity,
        granule=cache.granule,
        neurons=cache.granule * cache.neurons * len(cache.hot_slots),
        predictor=resolved.plan.decode.predictor,
    )
    if reader.fallback is not None:
        log.warning("neurons are read through the page cache", reason=reader.fallback)
    if reader.engine_fallback is not None:
        log.info("neurons are read with pread", reason=reader.engine_fallback)
    if reader.phases_fallback is not None:
        log.info("neurons are read in one phase", reason=reader.phases_fallback)
