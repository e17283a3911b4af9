"""The backend for GPUs, as `pi2.backends.protocol` requires it: a unit has a whole model, or
computes its share of each layer next to an executor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pi2.plan.arithmetic.sizes import STAGED_NEURONS, count_chunk_tokens
from pi2.plan.arithmetic.units import Need, UnitFacts, Verdict, list_matrices
from pi2.plan.documents.device import Unit, UnitKind

if TYPE_CHECKING:
    from pi2.backends.units import DenseUnit, UnitRequest, WholeModel, WholeRequest

VERDICT: Verdict = "runs"
NATIVE = False
KINDS: tuple[UnitKind, ...] = ("gpu",)
ONLY_EMULATED = True
FIXED: Mapping[str, tuple[object, ...]] = {
    "decode.activations": ("fp32", "int16"),
    "decode.batch_activations": (None,),
    "decode.leave_out": (None,),
    "decode.look_ahead": ("none",),
    "decode.missing_threshold": (None,),
    "decode.passes": (None,),
    "kv.lend": (False,),
    "memory.lock": ("none",),
    "memory.weights": ("loaded",),
    "pipeline.phases": (1,),
    "prefill.activations": ("fp32", "int16"),
    "prefill.unit": (None,),
    "sparsity": (None,),
}


def find_obstacles(features: frozenset[str], architecture: str) -> list[str]:
    """Return nothing: what a GPU needs depends on the unit (`find_unit_obstacles`)."""
    return []


def find_unit_obstacles(unit: Unit) -> list[str]:
    """Why no API of the unit finds a device here, asked in another process."""
    from pi2.backends.gpu.devices import find_unit_obstacles

    return find_unit_obstacles(unit)


def find_limits(facts: UnitFacts) -> list[str]:
    """Return the parts that it cannot compute as a whole model. Next to the CPU it computes rows
    and neurons of every model that plans can state. A few precisions and a norm inside the FFN are
    excepted."""
    from pi2.backends.gpu.model_sizes import find_alone_limits
    from pi2.plan.arithmetic.units import list_unknown_weights

    if facts.neurons is None:
        return find_alone_limits(facts.resolved)
    return list_unknown_weights(facts.resolved.model)


def need_unit_memory(facts: UnitFacts) -> Need:
    """Return the bytes of a whole model, or of neurons in whole tiles, of jobs and of added
    neurons, and of their copies in main memory on the way."""
    if facts.neurons is None:
        from pi2.backends.gpu.model_sizes import need_whole_memory

        return need_whole_memory(facts.resolved)
    from pi2.backends.gpu.sizes import DenseSizes, count_experts, describe_rows

    resolved, counts = facts.resolved, facts.neurons or ()
    model = resolved.model
    chunk = count_chunk_tokens(resolved.plan)
    stretch = min(model.layer_neurons, STAGED_NEURONS)
    bundle = resolved.bundle
    sizes = DenseSizes(
        layout=bundle.inline if bundle.scales == "resident" else bundle,
        experts=count_experts(model),
        counts=counts,
        chunk=chunk,
        jobs=facts.chunks,
        stretch=stretch,
    )
    total, what = sizes.device_bytes + sizes.host_bytes, ""
    matrices = {} if facts.rows is None else list_matrices(model, facts.rows)
    rows = describe_rows(matrices, chunk, sizes.jobs)
    if rows is not None:
        total += sum(rows.list_arrays()) + rows.host_bytes
        what = f", rows of {len(matrices)} matrices with their inputs and products"
    return Need(
        total,
        f"{sum(counts)} neurons in tiles of 32, {sizes.jobs} x inputs and sums of {chunk} tokens, "
        f"activations, and runs of {stretch} neurons that are sent to it{what}",
    )


def build_unit(request: UnitRequest) -> DenseUnit:
    """Open the device, compile or load kernels, and make the unit."""
    from pi2.backends.gpu.dense_unit import GpuUnit

    return GpuUnit(request)


def build_whole(request: WholeRequest) -> WholeModel:
    """Open the device, compile or load kernels, and make room for the model."""
    from pi2.backends.gpu.model import GpuModel

    return GpuModel(request)
