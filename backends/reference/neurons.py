"""Neurons in float32: how they are named, their activations and sums, and a dense unit that
computes them in a thread (`ThreadUnit`), for tests and dry runs of plans with several units."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace

import numpy as np

from pi2.arrays import F32, U8
from pi2.backends.reference.instructions import elements
from pi2.backends.units import NumberedUnit, UnitFailed, UnitRequest
from pi2.formats import find_packing
from pi2.plan.documents.model import Model
from pi2.plan.weights.bundles import slice_bias, slice_experts, slice_factors, unpack_part
from pi2.plan.weights.layout import BundleLayout, Tensor


def activate(model: Model, gate: F32, up: F32 | None, cutoffs: F32 | None = None) -> F32:
    """The model's FFN activation, shape kept; without gates ``gate`` is the neuron's value.
    ``cutoffs`` are subtracted from gates, and close those below."""
    gates = np.maximum(gate - cutoffs, 0) if cutoffs is not None else gate
    ups = None if up is None else np.asarray(up, np.float64)
    found = elements.activate(model.ffn.describe_gate(), np.asarray(gates, np.float64), ups)
    return found.astype(gate.dtype)


def compute_activations(
    model: Model,
    layout: BundleLayout,
    inputs: F32,
    bundles: U8,
    routes: F32 | None = None,
    cutoffs: F32 | None = None,
) -> F32:
    """Activations [T, n] of ``bundles`` [n, stride] for ``inputs`` [T, hidden], times ``routes``
    [T, experts] in an MoE model; ``cutoffs`` [T, 1] of gates."""
    values = multiply_inputs(layout, inputs, bundles)
    if layout.expert_offset is None or routes is None:
        return activate(model, values[0], values[1] if layout.is_gated else None, cutoffs)
    return weigh_activations(model, values, routes[:, slice_experts(bundles, layout)], cutoffs)


def multiply_inputs(layout: BundleLayout, inputs: F32, bundles: U8) -> list[F32]:
    """Gates and ups, or only ups, [T, n] of ``bundles`` [n, stride] for ``inputs`` [T, hidden]."""
    values = []
    for index in range(2 if layout.is_gated else 1):
        value = inputs @ unpack_part(bundles, layout, index).T
        values.append(value + slice_bias(bundles, layout, index) if layout.biases else value)
    return values


def weigh_activations(
    model: Model, values: Sequence[F32], weights: F32, cutoffs: F32 | None = None
) -> F32:
    """Activations float32 [T, n] of experts' neurons; ``values`` [T, n] are their gates and ups, or
    only their ups, and ``weights`` [T, n] their experts' weights."""
    is_input = model.moe is not None and model.moe.weighs == "input"
    gate, *up = [value * weights for value in values] if is_input else values
    active = activate(model, gate, up[0] if up else None, cutoffs)
    return active if is_input else np.asarray(active * weights)


def multiply_down(layout: BundleLayout, active: F32, bundles: U8) -> F32:
    """Sum float32 [T, hidden] of the down columns of ``bundles`` [n, stride], which have their
    scales, times ``active`` [T, n] and the factors of these, if they are normalised later."""
    if layout.factor_offset is not None:
        active = active * slice_factors(bundles, layout)
    return np.asarray(active @ unpack_part(bundles, layout, len(layout.parts) - 1))


def widen(tensor: Tensor) -> F32:
    """Return a tensor in float32 [rows, length]."""
    if tensor.precision is None:
        return tensor.weights.reshape(tensor.rows, tensor.length).astype(np.float32)
    weights = np.asarray(tensor.weights).view(np.uint8).reshape(tensor.rows, -1)
    return find_packing(tensor.precision).dequantize(weights, tensor.scales, tensor.length)


@dataclass(slots=True)
class _Job:
    layer: int
    inputs: F32
    routes: F32 | None
    total: F32
    pieces: list[Future[tuple[str, float, float]]] = field(default_factory=list)


class ThreadUnit(NumberedUnit[_Job]):
    """A `pi2.backends.units.DenseUnit` that computes in a thread of this process."""

    def __init__(self, request: UnitRequest) -> None:
        super().__init__(request)
        stride = request.share.bundle.stride
        self._kept = [
            request.allocate(count * stride).reshape(count, stride)
            for count in request.share.neurons
        ]
        self._matrices = {
            name: copy_tensor(tensor, request.allocate) for name, tensor in request.tensors.items()
        }
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"pi2-{request.name}")

    def offer_room(self, layer: int) -> U8:
        """Return the memory where the layer's neurons stay."""
        return self._kept[layer]

    def keep(self, layer: int, first: int, bundles: U8) -> None:
        """Copy the bundles, unless they were written into the room that was offered."""
        room = self._kept[layer][first : first + len(bundles)]
        if room.ctypes.data != bundles.ctypes.data:
            room[:] = bundles

    def start(
        self, layer: int, inputs: F32, routes: F32 | None = None, neurons: int | None = None
    ) -> int:
        weights = None if routes is None else routes.copy()
        job = _Job(layer, inputs.copy(), weights, np.zeros(inputs.shape, np.float32))
        number = self._begin(job)
        kept = self._kept[layer][:neurons]
        if len(kept):
            self._submit(job, kept, 0, f"layer {layer}: {len(kept)} kept neurons")
        return number

    def multiply(self, name: str, inputs: F32) -> int:
        total = np.zeros((len(inputs), self._matrices[name].rows), np.float32)
        job = _Job(-1, inputs.copy(), None, total)
        number = self._begin(job)
        job.pieces.append(self._pool.submit(self._multiply, job, name))
        return number

    def _multiply(self, job: _Job, name: str) -> tuple[str, float, float]:
        start_s = time.perf_counter()
        job.total[:] = job.inputs @ widen(self._matrices[name]).T
        return f"{name}: {job.total.shape[1]} rows", start_s, time.perf_counter()

    def add(self, job: int, bundles: U8, first: int) -> None:
        known = self._jobs[job]
        self._submit(known, bundles, first, f"layer {known.layer}: {len(bundles)} added neurons")

    def _submit(self, job: _Job, bundles: U8, first: int, name: str) -> None:
        try:
            job.pieces.append(self._pool.submit(self._compute, job, bundles, first, name))
        except RuntimeError as error:  # the pool is shut down
            raise UnitFailed(str(error)) from error

    def _compute(self, job: _Job, bundles: U8, first: int, name: str) -> tuple[str, float, float]:
        start_s, share = time.perf_counter(), self._request.share
        whole = self._request.join_scales(job.layer, bundles, first)
        active = compute_activations(share.model, share.layout, job.inputs, whole, job.routes)
        job.total += multiply_down(share.layout, active, whole)
        return name, start_s, time.perf_counter()

    def wait(self, job: int) -> None:
        """Wait until everything that was added is computed."""
        wait(self._jobs[job].pieces)

    def finish(self, job: int) -> F32:
        found = self._jobs[job]
        wait(found.pieces)
        del self._jobs[job]
        for piece in found.pieces:
            try:
                name, start_s, end_s = piece.result()
            except MemoryError as error:
                raise UnitFailed("it has no memory left") from error
            self.note(name, start_s, end_s)
        return found.total

    def give_up(self) -> None:
        """Forget all jobs, when the piece that is being computed has ended."""
        if not self._jobs:
            return
        for job in self._jobs.values():
            for piece in job.pieces:
                piece.cancel()
        # Pieces are computed in their order, also one that an interrupt has kept out of the lists.
        self._pool.submit(int).result()
        super().give_up()

    def close(self) -> None:
        self._jobs.clear()
        self._pool.shutdown(cancel_futures=True)
        self._kept = []


def copy_tensor(tensor: Tensor, allocate: Callable[[int], U8]) -> Tensor:
    """The tensor in memory that ``allocate`` gives."""
    weights = np.asarray(tensor.weights).view(np.uint8)
    kept = allocate(weights.nbytes)[: weights.nbytes].reshape(weights.shape)
    kept[:] = weights
    if tensor.scales is None:
        return replace(tensor, weights=kept)
    scales = allocate(tensor.scales.nbytes)[: tensor.scales.nbytes].view(np.float16)
    scales = scales.reshape(tensor.scales.shape)
    scales[:] = tensor.scales
    return replace(tensor, weights=kept, scales=scales)
