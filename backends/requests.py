"""What a plan asks of an executor, before there is memory for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, cast

from pi2.backends.protocol import BuildRequest
from pi2.model.tensors import list_tensors
from pi2.plan.documents.plan_units import list_cores

if TYPE_CHECKING:
    from pi2.arrays import U8
    from pi2.backends.protocol import Tensor
    from pi2.plan.arithmetic.resolved import ResolvedPlan
    from pi2.plan.documents.model import Model


def describe_request(
    resolved: ResolvedPlan,
    tensors: Mapping[str, Tensor],
    *,
    threads: int,
    chunks: int,
    features: Collection[str],
    architecture: str,
) -> BuildRequest:
    """What a plan asks of its executor, without memory; gate rows have no layers."""
    plan, limits = resolved.plan, resolved.thresholds
    return BuildRequest(
        model=resolved.model,
        tensors=tensors,
        bundle=resolved.bundle,
        neurons=resolved.model.layer_neurons,
        chunk=plan.prefill.chunk,
        chunks=chunks,
        context=plan.kv.context,
        sequences=plan.decode.batch,
        step_tokens=plan.decode.step_tokens,
        kv_type=plan.kv.type,
        token_type=plan.decode.activations,
        step_type=plan.decode.batch_activations,
        chunk_type=plan.prefill.activations,
        looks_ahead=plan.decode.look_ahead != "none",
        passes=plan.decode.passes,
        gate_rows={} if plan.decode.predictor == "gate" else None,
        limits=None if limits is None else limits.limits,
        expert_limits=None if limits is None else limits.expert_limits,
        rows=resolved.divided_rows,
        threads=threads,
        features=frozenset(features),
        architecture=architecture,
        allocate=_refuse_memory,
        has_little_memory=plan.memory.budget < _MUCH_MEMORY,
        cores=tuple(list_cores(plan.threads.cores or "")),
    )


_MUCH_MEMORY = 1 << 30
"""Budget in which several compilers have room."""


def _refuse_memory(segment: str, size: int) -> U8:
    raise AssertionError(f"{size} bytes of {segment} without a budget")


def describe_tensors(model: Model) -> Mapping[str, Tensor]:
    """The dense tensors of a store, without their bytes."""
    if describe_tensors not in model.derived:
        ranks = None if model.predictor is None else [model.predictor.rank] * model.shape.layers
        model.derived[describe_tensors] = {own.name: own for own in list_tensors(model, ranks)}
    return cast("Mapping[str, Tensor]", model.derived[describe_tensors])
