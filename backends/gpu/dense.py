"""The FFN of neurons on a device, resident ones and ones added to a job: inputs in, sums out."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from pi2.arrays import F32, U8
from pi2.backends.gpu.kernels.specification import FfnKernels, GpuSpec, ProductKernels
from pi2.backends.gpu.launchers.interface import DeviceArray, Event, Launch, Launcher
from pi2.backends.gpu.packing import DeviceArrays, load_kernels, pack_matrix, pack_neurons
from pi2.backends.gpu.sizes import (
    PIECE_ROWS,
    STAGING_BUFFERS,
    TILE,
    DenseSizes,
    RowSizes,
    choose_kernel_tokens,
    choose_parts,
    count_tile_bytes,
)
from pi2.plan.weights.layout import Tensor
from pi2.progress import Progress


@dataclass(slots=True)
class _Job:
    place: int
    tokens: int
    rows: int
    """Elements of a token's result."""
    begun: bool = False
    """Whether its sum on the device holds anything."""
    fetched: bool = False
    """Whether the sum is on its way to main memory as it is."""
    events: list[Event] = field(default_factory=list)


class _Jobs:
    """Jobs on one device, computed in the order in which they were asked for, while the caller goes
    on; each has a place with its inputs."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher, self._queue = launcher, launcher.open_queue()
        self._queues = [self._queue]
        self._arrays = DeviceArrays(launcher)
        self._jobs: dict[int, _Job] = {}
        self._next = 0

    @property
    def device_bytes(self) -> int:
        return self._arrays.total_bytes

    def _begin(self, places: int, tokens: int, rows: int) -> int:
        """Return the number of a new job, which has one of ``places``."""
        taken = {job.place for job in self._jobs.values()}
        free = [number for number in range(places) if number not in taken]
        assert free, "more jobs than were asked for"
        number, self._next = self._next, self._next + 1
        self._jobs[number] = _Job(free[0], tokens, rows)
        return number

    def give_up(self) -> None:
        """Forget all jobs, when the device has finished them."""
        self._launcher.enter()
        # An interrupt may have kept an event out of the lists: queues keep their order.
        ends = [queue.submit() for queue in reversed(self._queues)]
        for event in (*(event for job in self._jobs.values() for event in job.events), *ends):
            event.wait()
        self._jobs.clear()

    def close(self) -> None:
        """Give the device's memory back, when it has finished its jobs."""
        try:
            self.give_up()
        finally:
            self._arrays.release()


@dataclass(slots=True)
class _RowsPlace:
    arrays: Mapping[str, DeviceArray]
    inputs: F32
    outputs: F32
    launches: dict[tuple[str, int], Launch] = field(default_factory=dict)


class DenseRows(_Jobs):
    """Rows of matrices."""

    def __init__(
        self,
        launcher: Launcher,
        sizes: RowSizes,
        matrices: Mapping[str, Tensor],
        progress: Progress,
    ) -> None:
        """Copy ``matrices``, of which ``sizes`` knows; raises P361 where the device has no memory
        for them, and what `load_kernels` raises."""
        super().__init__(launcher)
        self._sizes = sizes
        self._products: dict[str, ProductKernels] = {}
        for name, shape in sizes.matrices.items():
            self._products[name] = ProductKernels(length=shape.length, precision=shape.precision)
        spec = GpuSpec(
            target=launcher.facts.target, products=tuple(dict.fromkeys(self._products.values()))
        )
        self._kernels = load_kernels(launcher, spec, progress)
        try:
            self._matrices = {
                name: self._arrays.allocate(sizes.list_matrix(name)) for name in sizes.matrices
            }
            self._places = [self._make_place() for _ in range(sizes.jobs)]
            for name, tensor in matrices.items():
                self._upload(name, tensor)
        except BaseException:
            self._arrays.release()
            raise

    def _make_place(self) -> _RowsPlace:
        sizes = self._sizes.list_job()
        host = {name: self._launcher.allocate_host(size) for name, size in sizes.items()}
        inputs, outputs = (host[name].view(np.float32) for name in ("inputs", "outputs"))
        return _RowsPlace(self._arrays.allocate(sizes), inputs, outputs)

    def _upload(self, name: str, tensor: Tensor) -> None:
        shape = self._sizes.matrices[name]
        assert tensor.rows == shape.rows and tensor.precision == shape.precision, name
        uploaded: Event | None = None
        for first in range(0, tensor.rows, PIECE_ROWS):
            piece = tensor.take_rows(first, min(first + PIECE_ROWS, tensor.rows))
            weights = np.asarray(piece.weights).view(np.uint8).reshape(piece.rows, -1)
            packed = pack_matrix(weights, piece.scales, shape.length, shape.precision)
            if uploaded is not None:
                uploaded.wait()
            for key, values in packed.items():
                size = values.nbytes // -(-piece.rows // TILE)
                self._queue.upload(self._matrices[name][key], values, first // TILE * size)
            uploaded = self._queue.submit()
        if uploaded is not None:
            uploaded.wait()

    def start(self, name: str, inputs: F32) -> int:
        """Begin to multiply ``inputs`` [T, length] with the rows of a matrix; return the job's
        number at once."""
        self._launcher.enter()
        tokens, shape = len(inputs), self._sizes.matrices[name]
        assert inputs.shape[1] == shape.length and tokens <= shape.tokens, (name, inputs.shape)
        number = self._begin(len(self._places), tokens, shape.rows)
        job = self._jobs[number]
        place = self._places[job.place]
        sent = place.inputs[: inputs.size].reshape(inputs.shape)
        sent[:] = inputs
        self._queue.upload(place.arrays["inputs"], sent)
        size = choose_kernel_tokens(tokens)
        launch = self._bind(place, name, size)
        self._queue.launch(launch, {"rows": shape.rows, "tokens": tokens})
        outputs = place.outputs[: tokens * shape.rows]
        self._queue.download(place.arrays["outputs"], outputs)
        job.events.append(self._queue.submit())
        return number

    def _bind(self, place: _RowsPlace, name: str, size: int) -> Launch:
        key = (name, size)
        if key not in place.launches:
            kernel = self._kernels[f"{self._products[name].name}_{size}"]
            arrays = {**place.arrays, **self._matrices[name]}
            place.launches[key] = self._launcher.bind(kernel, arrays)
        return place.launches[key]

    def finish(self, job: int) -> F32:
        """Wait for a job's products float32 [T, rows]; valid until the next call of `start`."""
        self._launcher.enter()
        found = self._jobs[job]
        for event in found.events:
            event.wait()
        del self._jobs[job]
        outputs = self._places[found.place].outputs[: found.tokens * found.rows]
        return outputs.reshape(found.tokens, found.rows)


@dataclass(slots=True)
class _Room:
    """Neurons on the device, and the kernels that were bound to them, by place and name."""

    neurons: int
    arrays: Mapping[str, DeviceArray]
    launches: dict[tuple[int, str], Launch] = field(default_factory=dict)
    used: list[Event] = field(default_factory=list)
    """What must be over before other neurons come here."""
    host: Mapping[str, U8] = field(default_factory=dict)
    """Main memory that added neurons come from: copies from it are the fastest."""


@dataclass(frozen=True, slots=True)
class _Place:
    arrays: Mapping[str, DeviceArray]
    inputs: F32
    sums: F32
    routes: F32


class DenseFfn(_Jobs):
    """Layers of neurons."""

    def __init__(
        self, launcher: Launcher, sizes: DenseSizes, ffn: FfnKernels, progress: Progress
    ) -> None:
        """Make room for ``sizes``; raises P361 without memory, and as `load_kernels`."""
        super().__init__(launcher)
        self._sizes, self._ffn = sizes, ffn
        self._layout = sizes.layout
        self._kernels = load_kernels(
            launcher, GpuSpec(target=launcher.facts.target, ffn=ffn), progress
        )
        self._copies = launcher.open_queue()
        """Added neurons go to the device while others are computed."""
        self._queues.append(self._copies)
        try:
            self._common = self._arrays.allocate(sizes.list_common())
            self._places = [self._make_place() for _ in range(sizes.jobs)]
            self._layers = [
                _Room(n, self._arrays.allocate(sizes.list_neurons(n))) for n in sizes.counts
            ]
            self._staging = [
                self._make_staging() for _ in range(STAGING_BUFFERS if sizes.stretch else 0)
            ]
        except BaseException:
            self._arrays.release()
            raise
        self._uploaded: Event | None = None
        self._next_staging = 0

    def _make_staging(self) -> _Room:
        sizes = self._sizes.list_neurons(self._sizes.stretch)
        host = {name: self._launcher.allocate_host(size) for name, size in sizes.items()}
        return _Room(self._sizes.stretch, self._arrays.allocate(sizes), host=host)

    def _make_place(self) -> _Place:
        chunk = self._sizes.chunk
        inputs, sums = (self._allocate_host(chunk, self._ffn.hidden) for _ in range(2))
        routes = self._allocate_host(chunk, max(self._ffn.experts, 1))
        return _Place(self._arrays.allocate(self._sizes.list_job()), inputs, sums, routes)

    def _allocate_host(self, rows: int, length: int) -> F32:
        array: F32 = self._launcher.allocate_host(4 * rows * length).view(np.float32)
        return array.reshape(rows, length)

    def upload(self, layer: int, first: int, bundles: U8) -> None:
        """Put ``bundles`` uint8 [n, .], which have their scales in them, in the place of the
        neurons of ``layer`` from ``first`` on: a multiple of 32, as n is but for the last."""
        room = self._layers[layer]
        assert first % TILE == 0 and first + len(bundles) <= room.neurons, (first, len(bundles))
        assert len(bundles) % TILE == 0 or first + len(bundles) == room.neurons
        sizes = count_tile_bytes(self._layout)
        # The next piece is repacked while this one is on its way, and no more than that.
        arrays = pack_neurons(bundles, self._layout)
        if self._uploaded is not None:
            self._uploaded.wait()
        for name, array in arrays.items():
            self._queue.upload(room.arrays[name], array, first // TILE * sizes[name])
        self._uploaded = self._queue.submit()

    def start(
        self, layer: int, inputs: F32, routes: F32 | None = None, neurons: int | None = None
    ) -> int:
        """Begin the sum of the first ``neurons`` neurons of ``layer`` for ``inputs`` [T, hidden]
        with ``routes`` [T, experts]; return the job's number."""
        self._launcher.enter()
        tokens, room = len(inputs), self._layers[layer]
        assert 0 < tokens <= self._sizes.chunk
        assert (routes is not None) == bool(self._ffn.experts)
        number = self._begin(len(self._places), tokens, self._ffn.hidden)
        job = self._jobs[number]
        place = self._places[job.place]
        place.inputs[:tokens] = inputs
        self._queue.upload(place.arrays["inputs"], place.inputs[:tokens])
        if routes is not None:
            place.routes[:tokens] = routes
            self._queue.upload(place.arrays["routes"], place.routes[:tokens])
        count = room.neurons if neurons is None else min(neurons, room.neurons)
        if count:
            self._compute(job, room, count)
            self._fetch(job)
        return number

    def add(self, job: int, bundles: U8) -> None:
        """Add ``bundles`` uint8 [n, .], which have their scales in them, to a job's sum.  They are
        copied before it returns."""
        self._launcher.enter()
        known = self._jobs[job]
        room = self._staging[self._next_staging]
        assert 0 < len(bundles) <= room.neurons
        self._next_staging = (self._next_staging + 1) % len(self._staging)
        arrays = pack_neurons(bundles, self._layout)
        for event in room.used:
            event.wait()
        for name, array in arrays.items():
            sent = room.host[name][: array.nbytes]
            sent[:] = array.reshape(-1).view(np.uint8)
            self._copies.upload(room.arrays[name], sent)
        uploaded = self._copies.submit()
        self._queue.wait_for(uploaded)
        self._compute(known, room, len(bundles))
        known.fetched = False
        room.used = [uploaded, self._queue.submit()]

    def _compute(self, job: _Job, room: _Room, count: int) -> None:
        """Add the first ``count`` neurons of a room to a job's sum."""
        size = choose_kernel_tokens(job.tokens)
        facts, rows = self._launcher.facts, self._sizes.partial_rows
        parts = choose_parts(facts, self._ffn.hidden, count, job.tokens, size, rows)
        numbers = {"count": count, "tokens": job.tokens, "parts": parts, "adds": int(job.begun)}
        self._queue.launch(self._bind(job, room, f"values_{size}"), numbers)
        if parts == 1 and not job.begun:
            # In one part, partial sums are the sums.
            self._queue.launch(self._bind(job, room, f"sums_{size}", whole=True), numbers)
        else:
            self._queue.launch(self._bind(job, room, f"sums_{size}"), numbers)
            self._queue.launch(self._bind(job, room, "join"), numbers)
        job.begun = True

    def _bind(self, job: _Job, room: _Room, name: str, whole: bool = False) -> Launch:
        key = (job.place, f"whole_{name}" if whole else name)
        if key not in room.launches:
            place = self._places[job.place].arrays
            arrays = {**self._common, **place, **room.arrays}
            if whole:
                arrays["partials"] = place["sums"]
            room.launches[key] = self._launcher.bind(self._kernels[name], arrays)
        return room.launches[key]

    def _fetch(self, job: _Job) -> None:
        place = self._places[job.place]
        self._queue.download(place.arrays["sums"], place.sums[: job.tokens])
        job.events.append(self._queue.submit())
        job.fetched = True

    def finish(self, job: int) -> F32:
        """Wait for the sum float32 [T, hidden] of a job; valid until the next call of `start`."""
        self._launcher.enter()
        found = self._jobs[job]
        sums = self._places[found.place].sums[: found.tokens]
        if not found.begun:
            # Its inputs may still be on their way from where the next job puts its own.
            found.events.append(self._queue.submit())
        elif not found.fetched:
            self._fetch(found)
        for event in found.events:
            event.wait()
        if not found.begun:
            sums[:] = 0
        del self._jobs[job]
        return sums
