"""A dense unit in numpy that computes in a process of its own, as a driver of an NPU does: its
neurons, inputs and sums are in memory that both processes map, and messages are short."""

import json
import mmap
import os
import sys
from dataclasses import dataclass

import numpy as np

from pi2.arrays import F32, U8
from pi2.backends.protocol import Tensor
from pi2.backends.reference.dense_unit import join_layer_scales
from pi2.backends.reference.worker import MESSAGE, PRECISIONS, REPLY
from pi2.backends.units import NotedUnit, UnitFailed, UnitRequest, WorkerProcess, open_region
from pi2.plan.arithmetic.sizes import LOGIT_ROWS
from pi2.plan.weights.layout import round_up, scale_bytes, weight_bytes

_BUFFERS = 2
"""One range is copied while another is computed."""
_ALIGNMENT = 64
_PAGE = 4096
"""Direct reads go to whole pages."""


@dataclass(slots=True)
class _Job:
    layer: int
    place: int
    tokens: int
    width: int
    """Floats of the result for each token."""
    has_routes: bool = False


@dataclass(slots=True)
class _Place:
    """First bytes of a job's arrays in the shared memory."""

    inputs: int
    routes: int
    total: int


class ProcessUnit(NotedUnit):
    """A `pi2.backends.units.DenseUnit` whose work is done by another process."""

    def __init__(self, request: UnitRequest) -> None:
        self._request = request
        self._layout = request.whole_bundle
        self._hidden = self._layout.hidden
        self._experts = request.model.expert_count
        self._bytes = 0
        stride = self._layout.stride
        self._kept_at = [self._reserve(count * stride, _PAGE) for count in request.neurons]
        self._matrices_at = {
            name: self._reserve(_count_bytes(tensor)) for name, tensor in request.matrices.items()
        }
        inputs, results = count_floats(request)
        self._places = [
            _Place(
                inputs=self._reserve(4 * inputs),
                routes=self._reserve(4 * request.chunk * max(1, self._experts)),
                total=self._reserve(4 * results),
            )
            for _ in range(request.jobs)
        ]
        self._staging_at = [self._reserve(request.stretch * stride) for _ in range(_BUFFERS)]
        self._staged = [0] * _BUFFERS
        """Number of the last message that reads each staging buffer."""
        self._next_buffer = 0
        file = open_region(self._bytes)
        try:
            self._memory = request.adopt(np.frombuffer(mmap.mmap(file, self._bytes), np.uint8))
            self._worker = self._begin(file)
        finally:
            os.close(file)
        for name, tensor in request.matrices.items():
            self._copy_matrix(tensor, self._matrices_at[name])
        self._jobs: dict[int, _Job] = {}
        self._next = 0
        self._asked = self._answered = 0
        """Numbers of the last message and of the last reply."""
        self._names: dict[int, str] = {}
        """What the messages without a reply are about, by their numbers."""

    def _reserve(self, size: int, alignment: int = _ALIGNMENT) -> int:
        place = round_up(self._bytes, alignment)
        self._bytes = place + size
        return place

    def _begin(self, file: int) -> WorkerProcess:
        request = self._request
        # The child finds pi2 where this process does, wherever that is.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-P", "-m", "pi2.backends.reference.worker"]
        worker = WorkerProcess(command, file, env=environment)
        setup = {
            "model": request.model.model_dump_json(),
            "stride": self._layout.stride,
            "file": file,
            "bytes": self._bytes,
        }
        worker.write(json.dumps(setup).encode() + b"\n")
        return worker

    def offer_room(self, layer: int) -> U8 | None:
        """Return the shared memory in which the layer's neurons stay, if bundles have scales."""
        if self._request.scales is not None:
            return None
        return self._view_bundles(self._kept_at[layer], self._request.neurons[layer])

    def keep(self, layer: int, first: int, bundles: U8) -> None:
        """Copy the bundles, unless they were written into the room that was offered."""
        place = self._kept_at[layer] + first * self._layout.stride
        room = self._view_bundles(place, len(bundles))
        if room.ctypes.data == bundles.ctypes.data:
            return
        request = self._request
        room[:] = join_layer_scales(request.scales, request.bundle, layer, bundles, first)

    def start(
        self, layer: int, inputs: F32, routes: F32 | None = None, neurons: int | None = None
    ) -> int:
        number, job = self._begin_job(layer, inputs, self._hidden)
        job.has_routes = routes is not None
        at = self._places[job.place]
        self._view_floats(at.total, *inputs.shape)[:] = 0
        if routes is not None:
            self._view_floats(at.routes, *routes.shape)[:] = routes
        count = self._request.neurons[layer]
        count = count if neurons is None else min(count, neurons)
        if count:
            self._ask(job, self._kept_at[layer], count, "kept")
        return number

    def _begin_job(self, layer: int, inputs: F32, width: int) -> tuple[int, _Job]:
        """Find a place for a job, and copy its inputs there."""
        used = {job.place for job in self._jobs.values()}
        free = [place for place in range(len(self._places)) if place not in used]
        assert free, "more jobs than were asked for"
        number, self._next = self._next, self._next + 1
        job = _Job(layer, free[0], len(inputs), width)
        self._jobs[number] = job
        self._view_floats(self._places[job.place].inputs, *inputs.shape)[:] = inputs
        return number, job

    def multiply(self, name: str, inputs: F32) -> int:
        tensor = self._request.matrices[name]
        assert tensor.precision is not None, name
        number, job = self._begin_job(-1, inputs, tensor.rows)
        at, kind = self._places[job.place], PRECISIONS.index(tensor.precision)
        place = self._matrices_at[name]
        self._asked += 1
        self._names[self._asked] = f"{name}: {tensor.rows} rows"
        places = (at.inputs, -1, at.total, place)
        self._worker.write(
            MESSAGE.pack(self._asked, job.tokens, *places, tensor.rows, tensor.length, kind)
        )
        return number

    def _copy_matrix(self, tensor: Tensor, place: int) -> None:
        weights = np.asarray(tensor.weights).view(np.uint8).reshape(-1)
        self._memory[place : place + weights.nbytes] = weights
        if tensor.scales is not None:
            first = round_up(place + weights.nbytes, _ALIGNMENT)
            scales = np.ascontiguousarray(tensor.scales).view(np.uint8).reshape(-1)
            self._memory[first : first + scales.nbytes] = scales

    def add(self, job: int, bundles: U8, first: int) -> None:
        """Copy a range of neurons, and let the job compute it."""
        request, size = self._request, self._request.stretch
        for begin in range(0, len(bundles), size):
            piece = bundles[begin : begin + size]
            number = self._next_buffer
            self._next_buffer = (number + 1) % _BUFFERS
            self._read_replies(self._staged[number])
            known = self._jobs[job]
            place = self._staging_at[number]
            self._view_bundles(place, len(piece))[:] = join_layer_scales(
                request.scales, request.bundle, known.layer, piece, first + begin
            )
            self._ask(known, place, len(piece), "added")
            self._staged[number] = self._asked

    def _ask(self, job: _Job, bundles_at: int, count: int, kind: str) -> None:
        at = self._places[job.place]
        routes_at = at.routes if job.has_routes else -1
        self._asked += 1
        self._names[self._asked] = f"layer {job.layer}: {count} {kind} neurons"
        places = (at.inputs, routes_at, at.total, bundles_at)
        self._worker.write(MESSAGE.pack(self._asked, job.tokens, *places, count, 0, 0))

    def finish(self, job: int) -> F32:
        self._read_replies(self._asked)
        found = self._jobs.pop(job)
        return self._view_floats(self._places[found.place].total, found.tokens, found.width)

    def _read_replies(self, until: int) -> None:
        while self._answered < until:
            reply = self._worker.read(REPLY.size)
            number, failed, start_s, end_s, text = REPLY.unpack(reply)
            if failed:
                raise UnitFailed(text.rstrip(b"\0").decode())
            self._answered = number
            self.note(self._names.pop(number, None), start_s, end_s)

    def give_up(self) -> None:
        """Forget all jobs, when the other process has finished them."""
        if not self._jobs:
            return
        # An interrupt may have kept back messages and replies, so that these cannot be counted: a
        # message that asks for nothing is answered after all others.
        self._asked += 1
        self._worker.write(MESSAGE.pack(self._asked, *[0] * 8))
        self._read_replies(self._asked)
        self._names.clear()
        self._jobs.clear()

    def _view_bundles(self, place: int, count: int) -> U8:
        stride = self._layout.stride
        return self._memory[place : place + count * stride].reshape(count, stride)

    def _view_floats(self, place: int, *shape: int) -> F32:
        size = 4 * int(np.prod(shape))
        return self._memory[place : place + size].view(np.float32).reshape(shape)

    def close(self) -> None:
        self._worker.close(at_once=bool(self._jobs))
        self._jobs.clear()
        self._memory = np.zeros(0, np.uint8)


def count_floats(request: UnitRequest) -> tuple[int, int]:
    """Floats of the largest inputs and of the largest results of a job."""
    hidden = request.bundle.hidden
    inputs = results = request.chunk * hidden
    for name, tensor in request.matrices.items():
        # Logits are computed for a few tokens at a time.
        tokens = request.chunk if name.startswith("layers.") else min(request.chunk, LOGIT_ROWS)
        inputs = max(inputs, tokens * tensor.length)
        results = max(results, tokens * tensor.rows)
    return inputs, results


def _count_bytes(tensor: Tensor) -> int:
    """Bytes of packed weights, and of scales at the next multiple of `_ALIGNMENT`."""
    assert tensor.precision is not None, tensor.name
    weights = tensor.rows * weight_bytes(tensor.length, tensor.precision)
    return round_up(weights, _ALIGNMENT) + tensor.rows * scale_bytes(
        tensor.length, tensor.precision
    )
