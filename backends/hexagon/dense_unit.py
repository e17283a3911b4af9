"""A dense unit on a Hexagon NPU: graphs that a worker process runs (`DenseUnit`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from pi2.arrays import F32, U8
from pi2.backends.compiler.cache import load_or_compile
from pi2.backends.hexagon.arrays import (
    FFN_OPERANDS,
    PRODUCT_OPERANDS,
    Neurons,
    Piece,
    UnitArrays,
    cut_pieces,
    place_piece,
)
from pi2.backends.hexagon.packing import Arrays, pack_neurons, pack_rows, pack_tokens
from pi2.backends.hexagon.session import Session, find_unit_obstacles
from pi2.backends.hexagon.specification import ELF, LANES, FfnGraph, Graph, Room, Weights
from pi2.backends.units import NumberedUnit, Padding, UnitFailed, UnitRequest, explain_failure
from pi2.plan.weights.layout import round_up


@dataclass(slots=True)
class _Job:
    layer: int
    room: Room
    width: int
    """Floats of the result for each token."""
    runs: list[Piece]
    results: list[tuple[int, int]] = field(default_factory=list)
    """First byte of each run's result, and its tokens."""


class HexagonUnit(NumberedUnit[_Job]):
    """A unit whose neurons an NPU, or its emulator, computes."""

    def __init__(self, request: UnitRequest) -> None:
        """Compile or load the graphs, and start the worker; `UnitFailed` where that cannot be."""
        if obstacles := find_unit_obstacles(request.share.unit):
            raise UnitFailed("; ".join(obstacles))
        super().__init__(request)
        self._arrays = arrays = UnitArrays(request.share)
        self._shape = arrays.shape
        self._numbers = {graph: number for number, graph in enumerate(arrays.spec.index)}
        emulated = bool(request.share.unit.emulated)
        self._note = ", emulated" if emulated else ""
        with explain_failure():
            library = load_or_compile(arrays.spec, request.progress, ELF)
        self._session = Session(
            str(library), len(self._numbers), arrays.bytes, arrays.scratch_bytes, emulated=emulated
        )
        self._memory = request.adopt(self._session.memory)
        self._loading = request.allocate(arrays.loading_bytes)
        for name, tensor in request.tensors.items():
            weights = np.asarray(tensor.weights).view(np.uint8).reshape(tensor.rows, -1)
            scales = None if tensor.scales is None else tensor.scales.reshape(tensor.rows, -1)
            packed = pack_rows(weights, scales, *request.share.matrices[name][1:])
            self._write(arrays.matrices[name].room.places, packed)
        self._names: dict[int, str] = {}
        """What the messages without a reply are about, by their numbers."""
        self._staged = [0] * len(arrays.staging)
        """Number of the last message that reads each staging buffer."""
        self._next_buffer = 0
        self._computed = self._wanted = 0

    def _write(self, places: Mapping[str, int], arrays: Arrays) -> None:
        """Copy arrays to their first bytes."""
        for name, values in arrays.items():
            self._memory[places[name] : places[name] + values.nbytes] = values

    def keep(self, layer: int, first: int, bundles: U8) -> None:
        """Collect the bundles of a layer; when they are complete, rearrange them."""
        count, layout = self._share.neurons[layer], self._share.layout
        whole = self._request.join_scales(layer, bundles, first)
        collected = self._loading[: count * layout.stride].reshape(count, layout.stride)
        collected[first : first + len(whole)] = whole[:, : layout.stride]
        if first + len(whole) == count:
            kept = self._arrays.layers[layer]
            packed = pack_neurons(collected, layout, self._shape, kept.capacity)
            self._write(kept.room.places, packed)

    def start(
        self, layer: int, inputs: F32, routes: F32 | None = None, neurons: int | None = None
    ) -> int:
        number, job = self._begin_job(layer, inputs, self._shape.weights, self._shape.hidden)
        for run, (results, _) in zip(job.runs, job.results, strict=True):
            self._view_floats(results, run.size, job.width)[:] = 0
            if routes is not None:
                experts = self._shape.experts
                at = job.room.places["routes"] + 4 * run.first * experts
                self._view_floats(at, run.count, experts)[:] = routes[run.first :][: run.count]
        count = self._share.neurons[layer]
        count = count if neurons is None else min(count, neurons)
        self._compute(job, self._arrays.layers[layer], count, "kept")
        return number

    def _begin_job(self, layer: int, inputs: F32, weights: Weights, width: int) -> tuple[int, _Job]:
        """Find a place for a job, and round its inputs there."""
        used = [id(job.room) for job in self._jobs.values()]
        free = (room for room in self._arrays.places if id(room) not in used)
        job = _Job(layer, next(free), width, cut_pieces(len(inputs), self._arrays.tokens))
        number, padded = self._begin(job), 0
        for run in job.runs:
            packed = pack_tokens(inputs[run.first :][: run.count], run.size, weights)
            self._write(self._place_run(job, padded, inputs.shape[1]), packed)
            job.results.append((job.room.places["results"] + 4 * padded * width, padded))
            padded += run.size
        return number, job

    def _place_run(self, job: _Job, padded: int, length: int) -> dict[str, int]:
        """Place of the inputs of a run that follows ``padded`` tokens of its job."""
        places, wide = job.room.places, round_up(length, 2 * LANES)
        return {
            "inputs": places["inputs"] + padded * wide,
            "offsets": places["offsets"] + padded * 4 * (wide // 32),
            "scales": places["scales"] + padded * 4,
        }

    def _compute(self, job: _Job, neurons: Neurons, count: int, kind: str) -> None:
        """Let the worker compute the first ``count`` neurons of a room for a job."""
        name = f"layer {job.layer}: {count} {kind} neurons"
        pieces = cut_pieces(count, self._arrays.neurons)
        for (run, (results, padded)), piece in product(
            zip(job.runs, job.results, strict=True), pieces
        ):
            operands = place_piece(self._shape, neurons.room, piece.first)
            operands |= self._place_run(job, padded, self._shape.hidden)
            operands |= {
                "plane": 4 * neurons.capacity,
                "stride": neurons.capacity * LANES,
                "routes": job.room.places["routes"] + 4 * run.first * self._shape.experts,
                "results": results,
                "count": piece.count,
                "scratch": self._arrays.scratch,
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
        own = self._arrays.matrices[name]
        rows, wide = own.rows, own.graph.rows
        number, job = self._begin_job(-1, inputs, own.graph.weights, wide)
        for run, (results, padded) in zip(job.runs, job.results, strict=True):
            operands = {**own.room.places, **self._place_run(job, padded, own.graph.length)}
            operands |= {"results": results, "scratch": self._arrays.scratch}
            graph = replace(own.graph, tokens=run.size)
            self._ask(graph, [operands[part] for part in PRODUCT_OPERANDS], f"{name}: {rows} rows")
            self._note_work(run.size * wide, run.count * rows)
        return number

    def add(self, job: int, bundles: U8, first: int) -> None:
        """Rearrange ranges of neurons, and let the job compute them."""
        known = self._jobs[job]
        for piece in self._request.cut(known.layer, bundles, first):
            buffer, self._next_buffer = self._next_buffer, 1 - self._next_buffer
            self._read_replies(self._staged[buffer])
            room = self._arrays.staging[buffer]
            packed = pack_neurons(piece, self._share.layout, self._shape, room.capacity)
            self._write(room.room.places, packed)
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
        super().give_up()

    def _view_floats(self, place: int, *shape: int) -> F32:
        size = 4 * int(np.prod(shape))
        return self._memory[place : place + size].view(np.float32).reshape(shape)

    def close(self) -> None:
        self._session.close(at_once=bool(self._jobs))
        self._jobs.clear()
        self._memory = np.zeros(0, np.uint8)
        self._loading = np.zeros(0, np.uint8)
