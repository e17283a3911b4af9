"""A dense unit on a GPU (`pi2.backends.units.DenseUnit`): jobs are computed in the order in which
they were asked for, while the caller goes on."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from pi2.arrays import F32, U8
from pi2.backends.gpu.arrays import PIECE_ROWS, Memory, Place, Room, UnitArrays
from pi2.backends.gpu.kernels.specification import (
    FfnKernels,
    GpuSpec,
    Number,
    ProductKernels,
    Target,
)
from pi2.backends.gpu.launchers.interface import DeviceArray, Event
from pi2.backends.gpu.launches import OpenDevice, choose_kernel_tokens, choose_parts, number_product
from pi2.backends.gpu.packing import Uploads, pack_neurons
from pi2.backends.units import NumberedUnit, UnitRequest, explain_failure
from pi2.progress import Progress


@dataclass(slots=True)
class _Job:
    start_s: float
    place: Place
    tokens: int
    width: int
    """Elements of a token's result."""
    product: str = ""
    """Its matrix; or neurons of a layer."""
    layer: int = -1
    kept: int = 0
    added: int = 0
    begun: bool = False
    """Whether its sum on the device holds anything."""
    fetched: bool = False
    """Whether the sum is on its way to main memory as it is."""
    events: list[Event] = field(default_factory=list)


class GpuUnit(NumberedUnit[_Job]):
    """A unit that computes on a GPU, through the first of its APIs that has a device."""

    def __init__(self, request: UnitRequest) -> None:
        """Open the device and make room; `UnitFailed` where that cannot be."""
        super().__init__(request)
        share, counted = request.share, Memory()
        UnitArrays(counted, share)
        request.count(counted.bytes)
        self._ffn = FfnKernels.of(share.layout, share.model)
        self._products = {
            name: ProductKernels(length=length, precision=precision)
            for name, (_, length, precision) in share.matrices.items()
        }
        self._next_staging = 0
        self._end_s = 0.0
        with explain_failure():
            self._device = device = OpenDevice(share.unit, counted)
            launcher, self._kernels = device.launcher, device.kernels
            with device.guard():
                self._load_kernels(launcher.facts.target, request.progress)
                self._arrays = arrays = UnitArrays(device.memory, share)
                self._queue, self._copies = launcher.open_queue(), launcher.open_queue()
                self._uploads = Uploads(self._queue, share.layout)
                for name, tensor in request.tensors.items():
                    for first in range(0, tensor.rows, PIECE_ROWS):
                        piece = tensor.take_rows(first, min(first + PIECE_ROWS, tensor.rows))
                        self._uploads.put(arrays.matrices[name], first, piece)

    def _load_kernels(self, target: Target, progress: Progress) -> None:
        products = tuple(dict.fromkeys(self._products.values()))
        self._kernels.load(GpuSpec(target=target, ffn=self._ffn), progress)
        if products:
            self._kernels.load(GpuSpec(target=target, products=products), progress)

    def keep(self, layer: int, first: int, bundles: U8) -> None:
        """Send the bundles to the device, in whole tiles: the rest waits for the next ones."""
        room = self._arrays.layers[layer]
        with explain_failure():
            whole = self._request.join_scales(layer, bundles, first)
            self._uploads.keep(room.arrays, layer, first, whole, room.neurons)

    def start(
        self, layer: int, inputs: F32, routes: F32 | None = None, neurons: int | None = None
    ) -> int:
        with explain_failure():
            number, job = self._place(inputs, self._ffn.hidden)
            assert (routes is not None) == bool(self._ffn.experts)
            if routes is not None:
                self._upload(job.place, "routes", routes)
            room = self._arrays.layers[layer]
            job.layer = layer
            job.kept = room.neurons if neurons is None else min(neurons, room.neurons)
            if job.kept:
                self._compute(job, room, job.kept)
                self._fetch(job)
        return number

    def multiply(self, name: str, inputs: F32) -> int:
        rows = self._share.matrices[name][0]
        with explain_failure():
            number, job = self._place(inputs, rows)
            kernel = f"{self._products[name].name}_{choose_kernel_tokens(job.tokens)}"
            matrix = self._arrays.matrices[name] | {"outputs": job.place.arrays["sums"]}
            numbers = number_product(rows, self._products[name].length)
            self._launch(kernel, job, matrix, numbers | {"tokens": job.tokens})
            job.product, job.begun = name, True
            self._fetch(job)
        return number

    def _place(self, inputs: F32, width: int) -> tuple[int, _Job]:
        """Return a new job, which has a place with ``inputs`` [T, n], and its number."""
        self._device.enter()
        assert 0 < len(inputs) <= self._share.chunk, len(inputs)
        taken = [id(job.place) for job in self._jobs.values()]
        free = (place for place in self._arrays.places if id(place) not in taken)
        job = _Job(time.perf_counter(), next(free), len(inputs), width)
        number = self._begin(job)
        self._upload(job.place, "inputs", inputs)
        return number, job

    def _upload(self, place: Place, name: str, values: F32) -> None:
        sent = place.host[name].view(np.float32)[: values.size].reshape(values.shape)
        sent[:] = values
        self._queue.upload(place.arrays[name], sent)

    def _launch(
        self,
        kernel: str,
        job: _Job,
        arrays: Mapping[str, DeviceArray],
        numbers: Mapping[str, Number],
    ) -> None:
        own = {**self._arrays.common, **job.place.arrays, **arrays}
        self._queue.launch(self._kernels.bind(kernel, own), numbers)

    def _compute(self, job: _Job, room: Room, count: int) -> None:
        """Add the first ``count`` neurons of a room to a job's sum."""
        size, arrays = choose_kernel_tokens(job.tokens), room.arrays
        facts, rows = self._device.launcher.facts, self._arrays.partial_rows
        parts = choose_parts(facts, self._ffn.hidden, count, job.tokens, size, rows)
        numbers = {"count": count, "tokens": job.tokens, "parts": parts, "adds": int(job.begun)}
        self._launch(f"values_{size}", job, arrays, numbers)
        if parts == 1 and not job.begun:
            # In one part, partial sums are the sums.
            whole = {**arrays, "partials": job.place.arrays["sums"]}
            self._launch(f"sums_{size}", job, whole, numbers)
        else:
            self._launch(f"sums_{size}", job, arrays, numbers)
            self._launch("join", job, arrays, numbers)
        job.begun = True

    def _fetch(self, job: _Job) -> None:
        self._queue.download(job.place.arrays["sums"], self._view_result(job))
        job.events.append(self._queue.submit())
        job.fetched = True

    def _view_result(self, job: _Job) -> F32:
        values: F32 = job.place.host["sums"].view(np.float32)[: job.tokens * job.width]
        return values.reshape(job.tokens, job.width)

    def add(self, job: int, bundles: U8, first: int) -> None:
        """Copy ranges of neurons to the device, and let the job compute them."""
        known = self._jobs[job]
        for piece in self._request.cut(known.layer, bundles, first):
            with explain_failure():
                self._device.enter()
                self._add(known, pack_neurons(piece, self._share.layout), len(piece))
        known.added += len(bundles)

    def _add(self, job: _Job, packed: Mapping[str, np.ndarray], count: int) -> None:
        room = self._arrays.staging[self._next_staging]
        self._next_staging = (self._next_staging + 1) % len(self._arrays.staging)
        for event in room.used:
            event.wait()
        for name, array in packed.items():
            sent = room.host[name][: array.nbytes]
            sent[:] = array.reshape(-1).view(np.uint8)
            self._copies.upload(room.arrays[name], sent)
        uploaded = self._copies.submit()
        self._queue.wait_for(uploaded)
        self._compute(job, room, count)
        job.fetched = False
        room.used = [uploaded, self._queue.submit()]

    def finish(self, job: int) -> F32:
        """Return the job's sum, or its products."""
        found = self._jobs[job]
        with explain_failure():
            self._device.enter()
            if not found.begun:
                # Its inputs may still be on their way from where the next job puts its own.
                found.events.append(self._queue.submit())
            elif not found.fetched:
                self._fetch(found)
            for event in found.events:
                event.wait()
        result = self._view_result(found)
        if not found.begun:
            result[:] = 0
        del self._jobs[job]
        if found.product:
            self._report(f"{found.product}, until the products were fetched", found.start_s)
        elif found.kept or found.added:
            added = f" and {found.added} added" if found.added else ""
            name = f"layer {found.layer}: {found.kept} kept{added} neurons"
            self._report(f"{name}, until the sum was fetched", found.start_s)
        return result

    def _report(self, name: str, start_s: float) -> None:
        """Count the time from submission, or the end of the job before, to the result's arrival."""
        end_s = time.perf_counter()
        start_s = min(max(start_s, self._end_s), end_s)
        self._end_s = end_s
        self.note(name, start_s, end_s)

    def give_up(self) -> None:
        """Forget all jobs, when the device has finished them."""
        with explain_failure():
            self._device.enter()
            # An interrupt may have kept an event out of the lists: queues keep their order.
            ends = [queue.submit() for queue in (self._copies, self._queue)]
            for event in (*(event for job in self._jobs.values() for event in job.events), *ends):
                event.wait()
        super().give_up()

    def close(self) -> None:
        self._device.close(self.give_up)
        self._jobs.clear()
