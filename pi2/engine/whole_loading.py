"""Making a model that a unit has as a whole, and bringing its weights there in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from pi2.arrays import I32
from pi2.backends.whole_model import WholeModel, WholeRequest
from pi2.engine.loading import group_by_expert, open_reader
from pi2.engine.whole_forward import WholeForward
from pi2.memory.arena import allocate_cache, allocate_staging
from pi2.memory.budget import Budget
from pi2.memory.flash import FlashReader
from pi2.memory.null_reader import NullReader
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.sizes import count_piece_bytes
from pi2.plan.documents.backends import find_whole_backend
from pi2.progress import Progress
from pi2.store.dense_reader import read_pieces
from pi2.store.reader import NeuronStore


def _build_whole(
    resolved: ResolvedPlan,
    grouped: Sequence[I32] | None,
    budget: Budget,
    progress: Progress,
) -> WholeModel:
    """Make room for the model on the unit that has it; ``grouped``: a mixture's neurons, expert by
    expert."""
    plan, name = resolved.plan, resolved.sparse_unit
    backend = find_whole_backend(resolved.name_backend(name))
    assert backend is not None, name
    return backend.build_whole(
        WholeRequest(
            name=name,
            unit=resolved.device.units[name],
            model=resolved.model,
            bundle=resolved.bundle,
            chunk=plan.prefill.chunk,
            sequences=plan.decode.batch,
            context=plan.kv.context,
            kv_type=plan.kv.type,
            predictor=plan.decode.predictor,
            threshold=plan.decode.threshold,
            expert_neurons=None if plan.decode.predictor == "none" else grouped,
            count=partial(budget.charge, resolved.name_segment(name)),
            progress=progress,
        )
    )


def make_whole_forward(model: WholeModel, resolved: ResolvedPlan) -> WholeForward:
    """Return what takes sequences through the model."""
    plan = resolved.plan
    neurons = resolved.model.token_neurons
    return WholeForward(
        model,
        chunk=plan.prefill.chunk,
        context=plan.kv.context,
        sequences=plan.decode.batch,
        step_neurons=None if plan.decode.predictor == "none" else neurons,
        has_states=bool(resolved.model.state_layers),
    )


def load_whole(
    resolved: ResolvedPlan,
    store: NeuronStore | None,
    budget: Budget,
    cleanup: ExitStack,
    progress: Progress,
) -> tuple[WholeModel, FlashReader | NullReader]:
    """Make room for the model on the unit that has it, and bring it there; ``cleanup`` closes it
    and the reader of its neurons."""
    grouped = group_by_expert(resolved, store, budget)
    model = _build_whole(resolved, grouped, budget, progress)
    cleanup.callback(model.close)
    reader = open_reader(resolved, store, allocate_cache(resolved, budget))
    cleanup.callback(reader.close)
    if store is not None:
        store.check_unchanged()
        _copy_weights(model, resolved, store, reader, budget, progress)
    return model, reader


def _copy_weights(
    model: WholeModel,
    resolved: ResolvedPlan,
    store: NeuronStore,
    reader: FlashReader | NullReader,
    budget: Budget,
    progress: Progress,
) -> None:
    """Read dense tensors and neurons from flash, and give them to the unit; what is in main memory
    meanwhile are a piece of a tensor and staging buffers of neurons."""
    staging = allocate_staging(resolved, budget)
    buffer = budget.allocate("workspace", count_piece_bytes(resolved))
    names = [tensor.name for tensor in store.manifest.tensors]
    for tensor, first, share in read_pieces(store, names, buffer):
        model.put(tensor, first)
        progress("loading dense tensors", share)
    layers, neurons, size = len(resolved.layers), resolved.model.layer_neurons, staging.shape[1]
    for layer in range(layers):
        for first in range(0, neurons, size):
            piece = staging[0, : min(size, neurons - first)]
            reader.start_run(layer, first, piece).result()
            model.keep(layer, first, piece)
        progress(f"loading neurons of {resolved.sparse_unit}", (layer + 1) / layers)
