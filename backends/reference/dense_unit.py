"""Dense units in numpy, for tests and dry runs of plans with several units: they compute what an
NPU or a GPU would, on the processor, in a thread (`ThreadUnit`)."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace

import numpy as np

from pi2.arrays import F32, U8
from pi2.backends.protocol import Tensor
from pi2.backends.reference.operators import compute_activations, multiply_down
from pi2.backends.units import NotedUnit, UnitFailed, UnitRequest
from pi2.formats import find_packing
from pi2.plan.weights.bundles import join_scales
from pi2.plan.weights.layout import BundleLayout


@dataclass(slots=True)
class _Job:
    layer: int
    inputs: F32
    routes: F32 | None
    total: F32
    pieces: list[Future[tuple[str, float, float]]] = field(default_factory=list)


class ThreadUnit(NotedUnit):
    """A `pi2.backends.units.DenseUnit` that computes in a thread of this process."""

    def __init__(self, request: UnitRequest) -> None:
        self._request = request
        stride = request.bundle.stride
        self._kept = [
            request.allocate(count * stride).reshape(count, stride) for count in request.neurons
        ]
        self._matrices = {
            name: copy_tensor(tensor, request.allocate) for name, tensor in request.matrices.items()
        }
        self._jobs: dict[int, _Job] = {}
        self._next = 0
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
        assert len(self._jobs) < self._request.jobs, "more jobs than were asked for"
        number, self._next = self._next, self._next + 1
        job = _Job(
            layer,
            inputs.copy(),
            None if routes is None else routes.copy(),
            np.zeros(inputs.shape, np.float32),
        )
        self._jobs[number] = job
        kept = self._kept[layer][:neurons]
        if len(kept):
            self._submit(job, kept, 0, f"layer {layer}: {len(kept)} kept neurons")
        return number

    def multiply(self, name: str, inputs: F32) -> int:
        number, self._next = self._next, self._next + 1
        total = np.zeros((len(inputs), self._matrices[name].rows), np.float32)
        job = _Job(-1, inputs.copy(), None, total)
        self._jobs[number] = job
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
        start_s = time.perf_counter()
        add_neurons(self._request, job.layer, job.inputs, job.routes, bundles, first, job.total)
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
        self._jobs.clear()

    def close(self) -> None:
        self._jobs.clear()
        self._pool.shutdown(cancel_futures=True)
        self._kept = []


def add_neurons(
    request: UnitRequest,
    layer: int,
    inputs: F32,
    routes: F32 | None,
    bundles: U8,
    first: int,
    total: F32,
) -> None:
    """Add the neurons of ``bundles`` [n, stride], of which the first has stored index ``first``, to
    ``total`` [T, hidden]."""
    layout = request.whole_bundle
    whole = join_layer_scales(request.scales, request.bundle, layer, bundles, first)
    active = compute_activations(request.model, layout, inputs, whole, routes)
    total += multiply_down(layout, active, whole)


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


def widen(tensor: Tensor) -> F32:
    """Rows of a quantised tensor in float32 [rows, length]."""
    assert tensor.precision is not None, tensor.name
    weights = np.asarray(tensor.weights).view(np.uint8).reshape(tensor.rows, -1)
    return find_packing(tensor.precision).dequantize(weights, tensor.scales, tensor.length)


def join_layer_scales(
    scales: Sequence[U8] | None, layout: BundleLayout, layer: int, bundles: U8, first: int
) -> U8:
    """Bundles [n, .] with their scales in them, wherever these lie."""
    if scales is None:
        return bundles
    return join_scales(bundles, scales[layer], layout, slice(first, first + len(bundles)))
