"""Products with rows of projections and of the head on a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from pi2.arrays import F32, Raw
from pi2.backends.gpu.arrays import DeviceArrays
from pi2.backends.gpu.images import load_kernels
from pi2.backends.gpu.kernels.specification import GpuSpec, ProductKernels
from pi2.backends.gpu.launchers.interface import DeviceArray, Event, Launch, Launcher
from pi2.backends.gpu.packing import pack_matrix
from pi2.backends.gpu.sizes import PIECE_ROWS, TILE, RowSizes
from pi2.backends.gpu.work_sizes import choose_kernel_tokens
from pi2.backends.protocol import Tensor
from pi2.progress import Progress


@dataclass(slots=True)
class _Place:
    """What a job reads and writes, on the device and in main memory."""

    arrays: Mapping[str, DeviceArray]
    inputs: F32
    outputs: F32
    launches: dict[tuple[str, int], Launch] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Job:
    place: int
    shape: tuple[int, int]
    event: Event


class DenseRows:
    """Rows of matrices on one device.  Jobs are computed in the order in which they were asked for,
    while the caller goes on."""

    def __init__(
        self,
        launcher: Launcher,
        sizes: RowSizes,
        matrices: Mapping[str, Tensor],
        progress: Progress,
    ) -> None:
        """Copy ``matrices``, of which ``sizes`` knows; raises P361 where the device has no memory
        for them, and what `load_kernels` raises."""
        self._launcher, self._sizes = launcher, sizes
        self._products: dict[str, ProductKernels] = {}
        for name, shape in sizes.matrices.items():
            self._products[name] = ProductKernels(length=shape.length, precision=shape.precision)
        spec = GpuSpec(
            target=launcher.facts.target, products=tuple(dict.fromkeys(self._products.values()))
        )
        self._kernels = load_kernels(launcher, spec, progress)
        self._queue = launcher.open_queue()
        self._arrays = DeviceArrays(launcher)
        self._jobs: dict[int, _Job] = {}
        self._next = 0
        try:
            self._matrices = {
                name: self._arrays.allocate(sizes.list_matrix(name)) for name in sizes.matrices
            }
            self._places = [self._make_place() for _ in range(sizes.jobs)]
            for name, tensor in matrices.items():
                self._upload(name, tensor)
        except BaseException:
            self._release()
            raise

    def _make_place(self) -> _Place:
        sizes = self._sizes.list_job()
        host = {name: self._launcher.allocate_host(size) for name, size in sizes.items()}
        inputs, outputs = (host[name].view(np.float32) for name in ("inputs", "outputs"))
        return _Place(self._arrays.allocate(sizes), inputs, outputs)

    def _upload(self, name: str, tensor: Tensor) -> None:
        """Send a matrix in pieces: one is rearranged while the one before is on its way."""
        shape = self._sizes.matrices[name]
        assert tensor.rows == shape.rows and tensor.precision == shape.precision, name
        uploaded: Event | None = None
        for first in range(0, tensor.rows, PIECE_ROWS):
            piece = tensor.take_rows(first, min(first + PIECE_ROWS, tensor.rows))
            weights = np.asarray(piece.weights).view(np.uint8).reshape(piece.rows, -1)
            words, scales = pack_matrix(weights, piece.scales, shape.length, shape.precision)
            packed: dict[str, Raw] = {"matrix_weights": words}
            if scales is not None:
                packed["matrix_scales"] = scales
            if uploaded is not None:
                uploaded.wait()
            for key, values in packed.items():
                size = values.nbytes // -(-piece.rows // TILE)
                self._queue.upload(self._matrices[name][key], values, first // TILE * size)
            uploaded = self._queue.submit()
        if uploaded is not None:
            uploaded.wait()

    @property
    def device_bytes(self) -> int:
        """What all arrays of the device take."""
        return self._arrays.total_bytes

    def start(self, name: str, inputs: F32) -> int:
        """Begin to multiply ``inputs`` [T, length] with the rows of a matrix; return the job's
        number at once."""
        self._launcher.enter()
        taken = {job.place for job in self._jobs.values()}
        free = [number for number in range(len(self._places)) if number not in taken]
        assert free, "more jobs than were asked for"
        tokens, shape = len(inputs), self._sizes.matrices[name]
        assert inputs.shape[1] == shape.length and tokens <= shape.tokens, (name, inputs.shape)
        place = self._places[free[0]]
        sent = place.inputs[: inputs.size].reshape(inputs.shape)
        sent[:] = inputs
        self._queue.upload(place.arrays["inputs"], sent)
        size = choose_kernel_tokens(tokens)
        launch = self._bind(place, name, size)
        self._queue.launch(launch, {"rows": shape.rows, "tokens": tokens})
        outputs = place.outputs[: tokens * shape.rows]
        self._queue.download(place.arrays["outputs"], outputs)
        number, self._next = self._next, self._next + 1
        self._jobs[number] = _Job(free[0], (tokens, shape.rows), self._queue.submit())
        return number

    def _bind(self, place: _Place, name: str, size: int) -> Launch:
        key = (name, size)
        if key not in place.launches:
            kernel = self._kernels[f"{self._products[name].name}_{size}"]
            arrays = {**place.arrays, **self._matrices[name]}
            place.launches[key] = self._launcher.bind(kernel, arrays)
        return place.launches[key]

    def finish(self, job: int) -> F32:
        """Wait for the products float32 [T, rows] of a job; valid until the next call of
        `start`."""
        self._launcher.enter()
        found = self._jobs[job]
        found.event.wait()
        del self._jobs[job]
        tokens, rows = found.shape
        return self._places[found.place].outputs[: tokens * rows].reshape(tokens, rows)

    def give_up(self) -> None:
        """Forget all jobs, when the device has done what it was asked for."""
        self._launcher.enter()
        # An interrupt may have kept an event out of the list.
        end = self._queue.submit()
        for event in (*(job.event for job in self._jobs.values()), end):
            event.wait()
        self._jobs.clear()

    def close(self) -> None:
        """Give the device's memory back, when it has done what it was asked for."""
        try:
            self.give_up()
        finally:
            self._release()

    def _release(self) -> None:
        self._arrays.release()
        self._jobs, self._places, self._matrices = {}, [], {}
