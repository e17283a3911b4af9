"""The backend for GPUs, as `pi2.backends.protocol` requires it: a unit has a whole model, or
computes its share of each layer next to an executor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pi2.plan.arithmetic.units import Need, UnitFacts, Verdict
from pi2.plan.documents.device import Unit, UnitKind

if TYPE_CHECKING:
    from pi2.backends.units import DenseUnit, UnitRequest, WholeModel, WholeRequest

VERDICT: Verdict = "runs"
NATIVE = False
KINDS: tuple[UnitKind, ...] = ("gpu",)
ONLY_EMULATED = True


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
    from pi2.backends.gpu.model_arrays import find_alone_limits
    from pi2.plan.arithmetic.units import list_unknown_weights

    if facts.share is None:
        return find_alone_limits(facts.resolved)
    return list_unknown_weights(facts.resolved.model)


def need_unit_memory(facts: UnitFacts) -> Need:
    """Return the bytes of a model or of neurons in whole tiles, of jobs, and of copies in main
    memory on the way."""
    share = facts.share
    if share is None:
        from pi2.backends.gpu.model_arrays import need_whole_memory

        return need_whole_memory(facts.resolved)
    from pi2.backends.gpu.arrays import Memory, UnitArrays

    memory, matrices = Memory(), len(share.matrices)
    UnitArrays(memory, share)
    what = f", rows of {matrices} matrices" if matrices else ""
    return Need(
        memory.bytes,
        f"{sum(share.neurons)} neurons in tiles of 32, {share.jobs} x inputs and sums of "
        f"{share.chunk} tokens, activations, and runs of {share.stretch} neurons that are sent to "
        f"it{what}",
    )


def build_unit(request: UnitRequest) -> DenseUnit:
    """Open the device, compile or load kernels, and make the unit."""
    from pi2.backends.gpu.dense_unit import GpuUnit

    return GpuUnit(request)


def build_whole(request: WholeRequest) -> WholeModel:
    """Open the device, compile or load kernels, and make room for the model."""
    from pi2.backends.gpu.model import GpuModel

    return GpuModel(request)
