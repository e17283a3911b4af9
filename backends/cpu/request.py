"""What a plan asks of an executor before there is memory for it, and what that asks for: a program
and a library of neurons' kernels."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, cast

from pi2.backends.blocks.contract import PLANES, BlockSpec, describe_libraries, list_libraries
from pi2.backends.blocks.instructions import Planes
from pi2.backends.blocks.operands import Extent
from pi2.backends.kernels.spec import DENSE_FLOATS, KernelSpec, describe_kernels
from pi2.backends.protocol import BuildRequest
from pi2.model.tensor import name_layer_tensor, takes_blocks
from pi2.model.tensors import list_tensors
from pi2.plan.documents.plan import ActivationType
from pi2.plan.documents.plan_units import list_cores

if TYPE_CHECKING:
    from pi2.arrays import U8
    from pi2.plan.arithmetic.resolved import ResolvedPlan
    from pi2.plan.documents.model import Model
    from pi2.plan.weights.layout import Tensor

ACTIVATION_BYTES: Mapping[ActivationType, int] = {"int8": 1, "int16": 2, "fp32": 4}


def count_tokens(request: BuildRequest) -> int:
    return max(request.chunk, request.step_tokens)


def describe_extent(request: BuildRequest, planes: Planes | None = None) -> Extent:
    """What the program computes at most; ``planes`` by default follow the request's types."""
    if planes is None:
        several = request.step_type or request.token_type
        kinds = (request.token_type, several, request.chunk_type)
        planes = Planes(*(PLANES[kind] for kind in kinds))
    return Extent(
        threads=request.threads,
        context=request.context,
        sequences=request.sequences,
        step_tokens=request.step_tokens,
        chunk=count_tokens(request),
        planes=planes,
        predicts=request.looks_ahead,
        outside=True,
        scratch_bytes=4 * DENSE_FLOATS,
        kv=request.kv_type,
    )


def make_spec(request: BuildRequest) -> KernelSpec:
    """Return the spec of the library of neurons."""
    model, tensors, several = request.model, request.tensors, request.step_tokens > 1
    predictors = (name_layer_tensor(n, "predictor_in") for n in range(model.shape.layers))
    found = {tensors[name].rows // model.expert_count for name in predictors if name in tensors}
    return describe_kernels(
        model,
        gates=request.gate_rows is not None,
        ranks=tuple(sorted(found)),
        stride=request.bundle.stride,
        scales=request.bundle.scales,
        threads=request.threads,
        planes=ACTIVATION_BYTES[request.token_type],
        chunk_planes=ACTIVATION_BYTES[request.chunk_type],
        upper_steps=several and (request.token_type, request.step_type) == ("int16", "int8"),
        sequences=several,
        looks_ahead=request.looks_ahead and len(found) > 0,
        # With gates that are known there is less to read in a row: measured in notes/kernels.md.
        passes=request.passes or (1 if request.gate_rows is None else 2),
        architecture=request.architecture,
        features=tuple(sorted(request.features)),
    )


def list_specs(request: BuildRequest) -> list[KernelSpec | BlockSpec]:
    """Return the specs of all libraries that an executor takes."""
    return [make_spec(request), *list_programs(request)]


def list_programs(request: BuildRequest) -> list[BlockSpec]:
    """Return the libraries of instructions that everything but neurons is computed by."""
    model = request.model
    dense = (own for own in model.dense_tensors if takes_blocks(own.name))
    formats = {own.packing.joined for own in dense}
    names = [*list_libraries(model, request.kv_type), *sorted(formats)]
    return describe_libraries(names, request.features, request.architecture)


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
