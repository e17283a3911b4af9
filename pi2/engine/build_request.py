"""What a plan, a machine and a store say to the backend that is to be built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from pi2.arrays import I32, U8
from pi2.backends.protocol import BuildRequest, Tensor
from pi2.engine.loading import (
    allocate_gate_rows,
    begin_dense,
    begin_scales,
)
from pi2.machine import Machine
from pi2.memory.budget import Budget
from pi2.memory.bulk_load import Batch
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.sizes import count_chunks
from pi2.plan.documents.selectors import list_cores
from pi2.progress import Progress, ignore_progress
from pi2.store.embedding_rows import EmbeddingRows
from pi2.store.reader import NeuronStore


def describe_build(
    resolved: ResolvedPlan,
    machine: Machine,
    store: NeuronStore | None,
    rows: Sequence[EmbeddingRows],
    grouped: list[I32] | None,
    budget: Budget,
    batch: Batch,
    progress: Progress,
) -> BuildRequest:
    """Gather what the backend needs, whose dense weights and scales ``batch`` reads; ``grouped``:
    a mixture's neurons, expert by expert."""
    mode = resolved.plan.decode.predictor
    tensors: Mapping[str, Tensor] = {}
    scales = None
    if store is not None:
        tensors = begin_dense(resolved, store, rows, budget, batch)
        scales = begin_scales(resolved, store, budget, batch)
    gate_rows = gate_biases = None
    if mode == "gate" and store is not None:
        gate_rows = {layer: allocate_gate_rows(resolved, budget) for layer in resolved.named_layers}
        if resolved.bundle.biases:
            size = 4 * resolved.model.layer_neurons
            gate_biases = [
                budget.allocate("predictor", size).view(np.float32) for _ in resolved.layers
            ]
    request = make_request(resolved, machine, tensors)
    return replace(
        request,
        gate_rows=gate_rows,
        scales=scales,
        gate_biases=gate_biases,
        expert_neurons=None if mode == "none" or store is None else grouped,
        allocate=budget.allocate,
        progress=progress,
    )


def make_request(
    resolved: ResolvedPlan, machine: Machine, tensors: Mapping[str, Tensor]
) -> BuildRequest:
    """Everything that a plan and a machine say of a build: all but what memory is given out for,
    so that kernels are compiled for it.

    With ``decode.predictor = "gate"`` it has gate rows of no layer.
    """
    unit = resolved.device.units[resolved.sparse_unit]
    features = unit.features if unit.features is not None else machine.features
    bound = tuple(list_cores(resolved.plan.threads.cores or ""))
    cores = len(bound) or sum(cluster.cores for cluster in unit.clusters) or machine.cores
    return BuildRequest(
        model=resolved.model,
        tensors=tensors,
        bundle=resolved.bundle,
        neurons=resolved.model.layer_neurons,
        chunk=resolved.plan.prefill.chunk,
        chunks=count_chunks(resolved),
        context=resolved.plan.kv.context,
        sequences=resolved.plan.decode.batch,
        step_tokens=resolved.plan.decode.step_tokens,
        kv_type=resolved.plan.kv.type,
        token_type=resolved.plan.decode.activations,
        step_type=resolved.plan.decode.batch_activations,
        chunk_type=resolved.plan.prefill.activations,
        looks_ahead=resolved.plan.decode.look_ahead != "none",
        passes=resolved.plan.decode.passes,
        gate_rows={} if resolved.plan.decode.predictor == "gate" else None,
        scales=None,
        gate_biases=None,
        limits=None if resolved.thresholds is None else resolved.thresholds.limits,
        expert_limits=None if resolved.thresholds is None else resolved.thresholds.expert_limits,
        expert_neurons=None,
        rows=resolved.divided_rows,
        threads=resolved.plan.threads.compute or cores,
        features=frozenset(features),
        architecture=unit.architecture or machine.architecture,
        allocate=_refuse_memory,
        progress=ignore_progress,
        cores=bound,
    )


def _refuse_memory(segment: str, size: int) -> U8:
    raise AssertionError(f"{size} bytes of {segment} before there is a budget")
