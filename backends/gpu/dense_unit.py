"""A dense unit on a GPU (`pi2.backends.units.DenseUnit`): jobs are computed in the order in which
they were asked for, while the caller goes on."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np

from pi2.arrays import F32, U8
from pi2.backends.gpu.arrays import (
    PIECE_ROWS,
    TILE,
    Memory,
    Place,
    Room,
    UnitArrays,
    count_tile_bytes,
)
from pi2.backends.gpu.devices import check_memory, open_unit
from pi2.backends.gpu.kernels.specification import FfnKernels, GpuSpec, Number, ProductKernels
from pi2.backends.gpu.launchers.interface import DeviceArray, Event, Launcher
from pi2.backends.gpu.launches import Kernels, choose_kernel_tokens, choose_parts, number_product
from pi2.backends.gpu.packing import WholeTiles, pack_matrix, pack_neurons
from pi2.backends.units import DenseUnit, UnitFailed, UnitRequest
from pi2.diagnostics import UserError
from pi2.plan.weights.layout import Tensor


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


class GpuUnit(DenseUnit):
    """A unit that computes on a GPU, through the first of its APIs that has a device."""

    def __init__(self, request: UnitRequest) -> None:
        """Open the device and make room; `UnitFailed` where that cannot be."""
        self._request, self._share = request, request.share
        share = request.share
        counted = Memory()
        UnitArrays(counted, share)
        request.count(counted.bytes)
        self._ffn = FfnKernels.of(share.layout, share.model)
        self._products = {
            name: ProductKernels(length=length, precision=precision)
            for name, (_, length, precision) in share.matrices.items()
        }
        self._jobs: dict[int, _Job] = {}
        self._next = self._next_staging = 0
        self._tiles = WholeTiles()
        self._uploaded: Event | None = None
        self._end_s = 0.0
        self._launcher: Launcher | None = None
        with _explain():
            launcher = open_unit(share.unit)
            self._memory, self._kernels = Memory(launcher), Kernels(launcher)
            try:
                check_memory(launcher, counted.sizes)
                self._load_kernels(launcher, request)
                self._arrays = UnitArrays(self._memory, share)
                self._queue, self._copies = launcher.open_queue(), launcher.open_queue()
                for name, tensor in request.tensors.items():
                    self._load_matrix(name, tensor)
            except BaseException:
                self._memory.release()
                launcher.close()
                raise
        self._launcher = launcher

    def _load_kernels(self, launcher: Launcher, request: UnitRequest) -> None:
        target, products = launcher.facts.target, tuple(dict.fromkeys(self._products.values()))
        self._kernels.load(GpuSpec(target=target, ffn=self._ffn), request.progress)
        if products:
            self._kernels.load(GpuSpec(target=target, products=products), request.progress)

    def _enter(self) -> Launcher:
        assert self._launcher is not None, "it is closed"
        self._launcher.enter()
        return self._launcher

    def _load_matrix(self, name: str, tensor: Tensor) -> None:
        for first in range(0, tensor.rows, PIECE_ROWS):
            piece = tensor.take_rows(first, min(first + PIECE_ROWS, tensor.rows))
            weights = np.asarray(piece.weights).view(np.uint8).reshape(piece.rows, -1)
            assert piece.precision is not None, name
            packed = pack_matrix(weights, piece.scales, piece.length, piece.precision)
            tiles = -(-piece.rows // TILE)
            sizes = {key: values.nbytes // tiles for key, values in packed.items()}
            self._send(self._arrays.matrices[name], packed, first, sizes)

    def _send(
        self,
        arrays: Mapping[str, DeviceArray],
        packed: Mapping[str, np.ndarray],
        first: int,
        sizes: Mapping[str, int],
    ) -> None:
        """Send rows from ``first`` on, a multiple of 32, whose tiles have ``sizes``: the next piece
        is rearranged while this one is on its way, and no more than that."""
        if self._uploaded is not None:
            self._uploaded.wait()
        for name, array in packed.items():
            self._queue.upload(arrays[name], array, first // TILE * sizes[name])
        self._uploaded = self._queue.submit()

    def keep(self, layer: int, first: int, bundles: U8) -> None:
        """Send the bundles to the device, in whole tiles: the rest waits for the next ones."""
        whole = self._request.join_scales(layer, bundles, first)
        room, layout = self._arrays.layers[layer], self._share.layout
        first, whole = self._tiles.take(layer, first, whole, room.neurons)
        if len(whole):
            with _explain():
                packed = pack_neurons(whole, layout)
                self._send(room.arrays, packed, first, count_tile_bytes(layout))

    def start(
        self, layer: int, inputs: F32, routes: F32 | None = None, neurons: int | None = None
    ) -> int:
        with _explain():
            number, job = self._begin(inputs, self._ffn.hidden)
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
        with _explain():
            number, job = self._begin(inputs, rows)
            kernel = f"{self._products[name].name}_{choose_kernel_tokens(job.tokens)}"
            matrix = self._arrays.matrices[name] | {"outputs": job.place.arrays["sums"]}
            numbers = number_product(rows, self._products[name].length)
            self._launch(kernel, job, matrix, numbers | {"tokens": job.tokens})
            job.product, job.begun = name, True
            self._fetch(job)
        return number

    def _begin(self, inputs: F32, width: int) -> tuple[int, _Job]:
        """Return a new job, which has a place with ``inputs`` [T, n], and its number."""
        self._enter()
        taken = [id(job.place) for job in self._jobs.values()]
        free = [place for place in self._arrays.places if id(place) not in taken]
        assert free, "more jobs than were asked for"
        assert 0 < len(inputs) <= self._share.chunk, len(inputs)
        number, self._next = self._next, self._next + 1
        job = self._jobs[number] = _Job(time.perf_counter(), free[0], len(inputs), width)
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
        facts, rows = self._enter().facts, self._arrays.partial_rows
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
            with _explain():
                self._enter()
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
        with _explain():
            self._enter()
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
        with _explain():
            self._enter()
            # An interrupt may have kept an event out of the lists: queues keep their order.
            ends = [queue.submit() for queue in (self._copies, self._queue)]
            for event in (*(event for job in self._jobs.values() for event in job.events), *ends):
                event.wait()
        self._jobs.clear()

    def close(self) -> None:
        launcher = self._launcher
        if launcher is None:
            return
        # A device that is lost has nothing to give back.
        for end in (self.give_up, self._memory.release, launcher.close):
            with suppress(UnitFailed, UserError):
                end()
        self._launcher = None
        self._jobs.clear()


@contextmanager
def _explain() -> Iterator[None]:
    """Turn what a launcher reports into a failure of the unit."""
    try:
        yield
    except UserError as error:
        found = error.diagnostics[0]
        raise UnitFailed(found.message, help=found.help) from error
    except MemoryError as error:
        raise UnitFailed("there is no main memory left for it") from error
