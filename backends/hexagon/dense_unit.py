"""A dense unit on a Hexagon NPU: graphs that a worker process runs (`DenseUnit`)."""

from dataclasses import dataclass, field
from itertools import product

import numpy as np

from pi2.arrays import F32, U8
from pi2.backends.compiler.cache import load_or_compile
from pi2.backends.hexagon.library import PROGRAMS, describe_library
from pi2.backends.hexagon.packing import Arrays, pack_neurons, pack_rows, pack_tokens
from pi2.backends.hexagon.session import Session, choose_machine, find_unit_obstacles
from pi2.backends.hexagon.sizes import (
    FFN_OPERANDS,
    PRODUCT_OPERANDS,
    STAGING_BUFFERS,
    Piece,
    Room,
    UnitSizes,
    cut_pieces,
    describe_graphs,
    describe_shape,
    find_room,
    place_piece,
)
from pi2.backends.hexagon.specification import (
    LANES,
    FfnGraph,
    Graph,
    ProductGraph,
    Weights,
    choose_weights,
)
from pi2.backends.reference.neurons import join_layer_scales
from pi2.backends.units import NotedUnit, Padding, UnitFailed, UnitRequest
from pi2.diagnostics import UserError
from pi2.plan.weights.layout import round_up


@dataclass(frozen=True, slots=True)
class _Neurons:
    first: int
    """First bytes of their arrays, from the start of the shared memory."""
    room: Room
    capacity: int
    """Neurons that there is room for."""


@dataclass(slots=True)
class _Job:
    layer: int
    place: int
    width: int
    """Floats of the result for each token."""
    runs: list[Piece]
    results: list[tuple[int, int]] = field(default_factory=list)
    """First byte of each run's result, and its tokens."""
    has_routes: bool = False


class HexagonUnit(NotedUnit):
    """A unit whose neurons an NPU, or its emulator, computes."""

    def __init__(self, request: UnitRequest) -> None:
        """Compile or load the graphs, and start the worker; `UnitFailed` where that cannot be."""
        if obstacles := find_unit_obstacles(request.unit):
            raise UnitFailed("; ".join(obstacles))
        self._request = request
        self._layout = layout = request.whole_bundle
        self._shape = shape = describe_shape(request.model, layout)
        self._sizes = sizes = UnitSizes(
            shape=shape,
            stride=layout.stride,
            counts=request.neurons,
            matrices=request.shapes,
            chunk=request.chunk,
            jobs=request.jobs,
            stretch=request.stretch,
            wanted=request.wanted,
            **describe_graphs(request.graphs, request.unit, request.model.layer_neurons),
        )
        spec = describe_library(sizes, request.unit)
        self._numbers = {graph: number for number, graph in enumerate(spec.index)}
        machine = choose_machine(request.unit)
        self._note = ", emulated" if machine.is_emulated else ""
        try:
            library = load_or_compile(spec, request.progress, PROGRAMS)
        except UserError as error:
            found = error.diagnostics[0]
            raise UnitFailed(found.message, help=found.help) from error
        self._reserve_all(sizes)
        self._session = Session(
            machine, str(library), len(spec.index), self._bytes, sizes.scratch_bytes
        )
        self._memory = request.adopt(self._session.memory)
        self._loading = request.allocate(sizes.loading_bytes)
        for name, tensor in request.matrices.items():
            weights = np.asarray(tensor.weights).view(np.uint8).reshape(tensor.rows, -1)
            scales = None if tensor.scales is None else tensor.scales.reshape(tensor.rows, -1)
            packed = pack_rows(weights, scales, *sizes.matrices[name][1:])
            self._write(self._matrices[name], sizes.lay_out_matrix(name), packed)
        self._jobs: dict[int, _Job] = {}
        self._next = 0
        self._names: dict[int, str] = {}
        """What the messages without a reply are about, by their numbers."""
        self._computed = self._wanted = 0

    def _reserve_all(self, sizes: UnitSizes) -> None:
        """Find a place for everything in the shared memory."""
        self._bytes = 0
        self._kept = []
        for layer, count in enumerate(sizes.counts):
            room = sizes.lay_out_layer(layer)
            capacity = find_room(count, sizes.graph_neurons)
            self._kept.append(_Neurons(self._reserve(room), room, capacity))
        self._matrices = {
            name: self._reserve(sizes.lay_out_matrix(name)) for name in sizes.matrices
        }
        self._job_room = sizes.lay_out_job()
        self._places = [self._reserve(self._job_room) for _ in range(sizes.jobs)]
        staging, capacity = sizes.lay_out_staging(), find_room(sizes.stretch, sizes.graph_neurons)
        self._staging = [
            _Neurons(self._reserve(staging), staging, capacity) for _ in range(STAGING_BUFFERS)
        ]
        self._staged = [0] * STAGING_BUFFERS
        """Number of the last message that reads each staging buffer."""
        self._next_buffer = 0
        self._scratch = self._bytes
        self._bytes += sizes.scratch_bytes

    def _reserve(self, room: Room) -> int:
        place = self._bytes
        self._bytes += room.bytes
        return place

    def _write(self, first: int, room: Room, arrays: Arrays) -> None:
        for name, values in arrays.items():
            place = first + room.places[name]
            self._memory[place : place + values.nbytes] = values

    def offer_room(self, layer: int) -> U8 | None:
        """Return None: neurons are rearranged on their way."""
        return None

    def keep(self, layer: int, first: int, bundles: U8) -> None:
        """Collect the bundles of a layer; when they are complete, rearrange them."""
        request, count = self._request, self._request.neurons[layer]
        whole = join_layer_scales(request.scales, request.bundle, layer, bundles, first)
        stride = self._layout.stride
        collected = self._loading[: count * stride].reshape(count, stride)
        collected[first : first + len(whole)] = whole[:, :stride]
        if first + len(whole) == count:
            kept = self._kept[layer]
            packed = pack_neurons(collected, self._layout, self._shape, kept.capacity)
            self._write(kept.first, kept.room, packed)

    def start(
        self, layer: int, inputs: F32, routes: F32 | None = None, neurons: int | None = None
    ) -> int:
        number, job = self._begin_job(layer, inputs, self._shape.weights, self._shape.hidden)
        place = self._places[job.place]
        job.has_routes = routes is not None
        for run, (results, _) in zip(job.runs, job.results, strict=True):
            self._view_floats(results, run.size, job.width)[:] = 0
            if routes is not None:
                experts = self._shape.experts
                at = place + self._job_room.places["routes"] + 4 * run.first * experts
                self._view_floats(at, run.count, experts)[:] = routes[run.first :][: run.count]
        kept = self._kept[layer]
        count = self._request.neurons[layer]
        count = count if neurons is None else min(count, neurons)
        self._compute(job, kept, count, "kept")
        return number

    def _begin_job(self, layer: int, inputs: F32, weights: Weights, width: int) -> tuple[int, _Job]:
        """Find a place for a job, and round its inputs there."""
        used = {job.place for job in self._jobs.values()}
        free = [place for place in range(len(self._places)) if place not in used]
        assert free, "more jobs than were asked for"
        number, self._next = self._next, self._next + 1
        runs = cut_pieces(len(inputs), self._sizes.graph_tokens)
        job = _Job(layer, free[0], width, runs)
        self._jobs[number] = job
        place, room = self._places[job.place], self._job_room
        padded = 0
        for run in runs:
            packed = pack_tokens(inputs[run.first :][: run.count], run.size, weights)
            at = self._place_run(job, padded, inputs.shape[1])
            self._copy(at["inputs"], packed.inputs)
            self._copy(at["offsets"], packed.offsets.reshape(-1).view(np.uint8))
            self._copy(at["scales"], packed.scales.view(np.uint8))
            job.results.append((place + room.places["results"] + 4 * padded * width, padded))
            padded += run.size
        return number, job

    def _place_run(self, job: _Job, padded: int, length: int) -> dict[str, int]:
        """Place of the inputs of a run that follows ``padded`` tokens of its job."""
        place, places = self._places[job.place], self._job_room.places
        wide = round_up(length, 2 * LANES)
        return {
            "inputs": place + places["inputs"] + padded * wide,
            "offsets": place + places["offsets"] + padded * 4 * (wide // 32),
            "scales": place + places["scales"] + padded * 4,
        }

    def _copy(self, place: int, values: U8) -> None:
        self._memory[place : place + values.nbytes] = values

    def _compute(self, job: _Job, neurons: _Neurons, count: int, kind: str) -> None:
        """Let the worker compute the first ``count`` neurons of a room for a job."""
        name = f"layer {job.layer}: {count} {kind} neurons"
        pieces = cut_pieces(count, self._sizes.graph_neurons)
        for (run, (results, padded)), piece in product(
            zip(job.runs, job.results, strict=True), pieces
        ):
            operands = place_piece(self._shape, neurons.room, neurons.first, piece.first)
            operands |= self._place_run(job, padded, self._shape.hidden)
            routes = self._places[job.place] + self._job_room.places["routes"]
            operands |= {
                "plane": 4 * neurons.capacity,
                "stride": neurons.capacity * LANES,
                "routes": routes + 4 * run.first * self._shape.experts,
                "results": results,
                "count": piece.count,
                "scratch": self._scratch,
            }
            graph = FfnGraph(tokens=run.size, neurons=piece.size)
            self._ask(graph, [operands[key] for key in FFN_OPERANDS], name)
            self._note_work(run.size * piece.size, run.count * piece.count)

    def _note_work(self, computed: int, wanted: int) -> None:
        self._computed += computed
        self._wanted += wanted

    @property
    def padding(self) -> Padding:
        """What graphs computed beyond jobs; a matrix's row counts as a neuron."""
        return Padding(computed=self._computed, wanted=self._wanted)

    def _ask(self, graph: Graph, operands: list[int], name: str) -> None:
        number = self._session.ask(self._numbers[graph], operands)
        self._names[number] = f"{name} ({graph.name}{self._note})"

    def multiply(self, name: str, inputs: F32) -> int:
        rows, length, precision = self._sizes.matrices[name]
        weights, wide = choose_weights(precision), round_up(rows, LANES)
        number, job = self._begin_job(-1, inputs, weights, wide)
        room, first = self._sizes.lay_out_matrix(name), self._matrices[name]
        places = {part: first + place for part, place in room.places.items()}
        for run, (results, padded) in zip(job.runs, job.results, strict=True):
            operands = places | self._place_run(job, padded, length)
            operands |= {"results": results, "scratch": self._scratch}
            graph = ProductGraph(
                tokens=run.size, rows=wide, length=round_up(length, 2 * LANES), weights=weights
            )
            self._ask(graph, [operands[part] for part in PRODUCT_OPERANDS], f"{name}: {rows} rows")
            self._note_work(run.size * wide, run.count * rows)
        return number

    def add(self, job: int, bundles: U8, first: int) -> None:
        """Rearrange ranges of neurons, and let the job compute them."""
        request, known = self._request, self._jobs[job]
        for begin in range(0, len(bundles), request.stretch):
            piece = bundles[begin : begin + request.stretch]
            buffer, self._next_buffer = self._next_buffer, 1 - self._next_buffer
            self._read_replies(self._staged[buffer])
            room = self._staging[buffer]
            whole = join_layer_scales(
                request.scales, request.bundle, known.layer, piece, first + begin
            )
            packed = pack_neurons(whole, self._layout, self._shape, room.capacity)
            self._write(room.first, room.room, packed)
            self._compute(known, room, len(piece), "added")
            self._staged[buffer] = self._session.asked

    def finish(self, job: int) -> F32:
        self._read_replies(self._session.asked)
        found = self._jobs.pop(job)
        pieces = [
            self._view_floats(results, run.size, found.width)[: run.count]
            for run, (results, _) in zip(found.runs, found.results, strict=True)
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _read_replies(self, until: int) -> None:
        while self._session.answered < until:
            reply = self._session.take_reply()
            self.note(self._names.pop(reply.number, None), reply.start_s, reply.end_s)

    def give_up(self) -> None:
        """Forget all jobs, when the worker has finished them."""
        if not self._jobs:
            return
        self._session.catch_up()
        self._names.clear()
        self._jobs.clear()

    def _view_floats(self, place: int, *shape: int) -> F32:
        size = 4 * int(np.prod(shape))
        return self._memory[place : place + size].view(np.float32).reshape(shape)

    def close(self) -> None:
        self._session.close(at_once=bool(self._jobs))
        self._jobs.clear()
        self._memory = np.zeros(0, np.uint8)
        self._loading = np.zeros(0, np.uint8)
