"""The NPU's arithmetic in numpy, and a worker for tests."""

from collections.abc import Sequence

import numpy as np
import pytest

from pi2.arrays import F32, I64, U8, Scales
from pi2.backends.compiler.cache import load_or_compile
from pi2.backends.hexagon.arrays import (
    FFN_OPERANDS,
    PRODUCT_OPERANDS,
    lay_out_job,
    lay_out_matrix,
    lay_out_neurons,
    place_piece,
)
from pi2.backends.hexagon.packing import Arrays, find_top_multiplier, pack_tokens
from pi2.backends.hexagon.session import Session, find_unit_obstacles
from pi2.backends.hexagon.specification import ELF, FfnGraph, HexagonSpec, ProductGraph, Room
from pi2.formats import find_packing
from pi2.plan.documents.device import Unit
from pi2.plan.weights.layout import GROUP, Precision, round_up
from pi2.progress import ignore_progress

EMULATED = Unit(kind="npu", architecture="hexagon", emulated=True)
TOP = np.float32(127)


def require_emulator() -> None:
    if obstacles := find_unit_obstacles(EMULATED):
        pytest.skip("; ".join(obstacles))


def round_tokens(values: F32) -> tuple[I64, F32]:
    """Inputs [n, length] as whole numbers, and each token's scale."""
    peaks = np.abs(values).max(axis=1, initial=0)
    inverse = TOP / np.where(peaks > 0, peaks, np.float32(1))
    return np.rint(values * inverse[:, None]).astype(np.int64), peaks / TOP


def multiply_exactly(
    weights: U8, scales: Scales | None, length: int, precision: Precision, inputs: I64
) -> tuple[I64, F32]:
    """Whole sums [n, rows] of packed rows times rounded inputs [n, length], and the scale of each
    row, as the NPU keeps them: computed from the store's bytes, by groups."""
    if precision == "int4":
        assert scales is not None
        codes = find_packing(precision).unpack(weights, length).astype(np.int64)
        wide = round_up(length, 2 * GROUP) // GROUP
        own = scales.astype(np.float32)
        row_scales = np.abs(own).max(axis=1) / np.float32(find_top_multiplier(wide))
        safe = np.where(row_scales > 0, row_scales, np.float32(1))
        factors = np.rint(own / safe[:, None]).astype(np.int64)
        sums = np.zeros((len(inputs), len(codes)), np.int64)
        for group in range(length // GROUP):
            part = slice(group * GROUP, (group + 1) * GROUP)
            sums += (inputs[:, part] @ codes[:, part].T) * factors[:, group]
        return sums, row_scales
    values = find_packing(precision).dequantize(weights, scales, length)
    row_scales = np.abs(values).max(axis=1) / TOP
    safe = np.where(row_scales > 0, row_scales, np.float32(1))
    whole = np.clip(np.rint(values / safe[:, None]), -TOP, TOP).astype(np.int64)
    return inputs @ whole.T, row_scales


class Bench:
    """A worker whose memory tests fill by hand."""

    def __init__(self, spec: HexagonSpec, size: int = 1 << 22) -> None:
        self.spec = spec
        library = load_or_compile(spec, ignore_progress, ELF)
        self.session = Session(str(library), len(spec.index), size, emulated=True)
        self._end = 0

    def place(self, room: Room) -> Room:
        first, self._end = self._end, self._end + room.bytes
        assert self._end <= len(self.session.memory)
        return room.move(first)

    def write(self, places: dict[str, int], arrays: Arrays) -> None:
        for name, values in arrays.items():
            self.session.memory[places[name] : places[name] + len(values)] = values

    def read(self, place: int, *shape: int) -> F32:
        size = 4 * int(np.prod(shape))
        return self.session.memory[place : place + size].view(np.float32).reshape(shape).copy()

    def multiply(self, graph: ProductGraph, arrays: Arrays, inputs: F32) -> F32:
        """Products [n, rows] of a matrix and inputs [n, length]."""
        self._end = 0
        self.session.memory[:] = 255  # nothing depends on what was there
        matrix = dict(self.place(lay_out_matrix(graph.weights, graph.rows, graph.length)).places)
        job = dict(self.place(lay_out_job(graph.tokens, graph.length, 0, graph.rows)).places)
        scratch = self.place(graph.scratch).places
        self.write(matrix, arrays)
        self.write(job, pack_tokens(inputs, graph.tokens, graph.weights))
        operands = matrix | job | {"scratch": min(scratch.values())}
        self.run(graph, [operands[name] for name in PRODUCT_OPERANDS])
        return self.read(job["results"], graph.tokens, graph.rows)[: len(inputs)]

    def feed_forward(
        self, graph: FfnGraph, arrays: Arrays, inputs: F32, room: int, first: int, count: int,
        routes: F32 | None = None,
    ) -> F32:  # fmt: skip
        """Sums [n, hidden] of ``count`` neurons from ``first`` on, of a room of ``room``;
        ``routes`` [n, experts] are weights of experts."""
        shape = self.spec.ffn
        self._end = 0
        self.session.memory[:] = 255
        neurons = self.place(lay_out_neurons(shape, room))
        own = lay_out_job(graph.tokens, shape.length, shape.experts, shape.hidden)
        job = dict(self.place(own).places)
        scratch = self.place(graph.scratch).places
        self.write(dict(neurons.places), arrays)
        size = 4 * graph.tokens * shape.hidden
        self.session.memory[job["results"] : job["results"] + size] = 0
        self.write(job, pack_tokens(inputs, graph.tokens, shape.weights))
        if routes is not None:
            self.write(job, {"routes": np.ascontiguousarray(routes).reshape(-1).view(np.uint8)})
        operands = place_piece(shape, neurons, first) | job
        operands |= {
            "plane": 4 * room,
            "stride": 32 * room,
            "count": count,
            "scratch": min(scratch.values()),
        }
        self.run(graph, [operands[name] for name in FFN_OPERANDS])
        return self.read(job["results"], graph.tokens, shape.hidden)[: len(inputs)]

    def run(self, graph: FfnGraph | ProductGraph, operands: Sequence[int]) -> None:
        number = self.session.ask(self.spec.index.index(graph), operands)
        assert self.session.take_reply().number == number

    def close(self) -> None:
        self.session.close()
