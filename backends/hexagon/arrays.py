"""Places of arrays in the memory that a unit shares with an NPU, for plans and allocation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from pi2.backends.hexagon.specification import (
    LANES,
    LAYOUTS,
    LENGTH_STEP,
    FfnGraph,
    FfnShape,
    HexagonSpec,
    ProductGraph,
    Room,
    Weights,
    can_compute,
    choose_version,
    choose_weights,
)
from pi2.plan.arithmetic.units import UnitShare, pad_tokens
from pi2.plan.weights.layout import GROUP, round_up


def count_row_bytes(weights: Weights, length: int) -> tuple[int, int]:
    """Bytes of a vector of ``length`` weights, and of its multipliers."""
    own = LAYOUTS[weights]
    return length * own.bits // 8, 2 * own.count_groups(length) * own.has_groups


def lay_out_neurons(shape: FfnShape, neurons: int) -> Room:
    """Room for ``neurons``, a multiple of 32."""
    assert neurons % LANES == 0, neurons
    codes, factors = count_row_bytes(shape.weights, shape.length)
    rows = neurons * shape.inputs
    return Room.of(
        weights=rows * codes,
        multipliers=rows * factors,
        row_scales=4 * rows,
        biases=4 * rows if shape.options.bias else 0,
        experts=4 * neurons if shape.experts else 0,
        down=neurons * shape.hidden,
        down_scales=4 * shape.hidden if neurons else 0,
    )


def place_piece(shape: FfnShape, room: Room, neuron: int) -> dict[str, int]:
    """First bytes of a room's arrays for the neurons from ``neuron`` on, a multiple of 32."""
    codes, factors = count_row_bytes(shape.weights, shape.length)
    steps = {
        "weights": shape.inputs * codes,
        "multipliers": shape.inputs * factors,
        "row_scales": 4,
        "biases": 4,
        "experts": 4,
        "down": LANES,
        "down_scales": 0,
    }
    return {name: room.places[name] + neuron * step for name, step in steps.items()}


def lay_out_matrix(weights: Weights, rows: int, length: int) -> Room:
    """Room for ``rows``, a multiple of 32, of ``length`` elements, a multiple of 64."""
    assert rows % LANES == 0 and length % LENGTH_STEP == 0, (rows, length)
    codes, factors = count_row_bytes(weights, length)
    return Room.of(weights=rows * codes, multipliers=rows * factors, row_scales=4 * rows)


def lay_out_job(tokens: int, length: int, experts: int, width: int) -> Room:
    """Room for what a job of ``tokens`` reads and writes: inputs of at most ``length`` elements,
    with an offset of each group, and results of at most ``width``."""
    return Room.of(
        inputs=tokens * length,
        offsets=4 * tokens * (length // GROUP),
        scales=4 * tokens,
        routes=4 * tokens * experts,
        results=4 * tokens * width,
    )


VECTORS = ("weights", "multipliers", "row_scales")
"""Arrays of vectors of weights."""
INPUTS = ("inputs", "offsets", "scales")
"""Arrays of rounded inputs."""
FFN_OPERANDS = (
    *(*VECTORS, "biases", "experts", "plane", "down", "down_scales", "stride"),
    *(*INPUTS, "routes", "results", "count", "scratch"),
)
"""What a graph of neurons is given, in the order of a message's operands: places of arrays, and
numbers (`NUMBERS`)."""
PRODUCT_OPERANDS = (*VECTORS, *INPUTS, "results", "scratch")
"""What a graph of a matrix is given."""
NUMBERS = ("plane", "stride", "count")
"""Operands that are no places: bytes from the scales of one vector of neurons to the next vector's,
bytes from 32 elements of down columns to the next, and neurons that count."""


VALUE_BYTES = 5
"""Bytes that a graph keeps of each neuron and token: its value, and the same rounded."""
_TOKENS = (1, 2, 4, 32, 64, 128)
"""Tokens of graphs, unless a plan says otherwise: steps of few sequences, and chunks of prompts."""
_MOST_SIZES = 8
"""Numbers of neurons that graphs have, unless a plan names more."""
_STAGING_BUFFERS = 2
"""One range of added neurons is rearranged while another is computed."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of a job, or neurons of a layer, that one graph computes."""

    first: int
    count: int
    size: int
    """Of the graph; ``count`` of them are asked for."""


def cut_pieces(count: int, graphs: Sequence[int]) -> list[Piece]:
    """Divide ``count`` tokens or neurons among graphs of ascending sizes: as many of the largest as
    fit, then the smallest that holds the rest."""
    pieces, first = [], 0
    while first < count:
        rest = count - first
        size = next((item for item in graphs if item >= rest), graphs[-1])
        pieces.append(Piece(first, min(rest, size), size))
        first += size
    return pieces


def choose_neurons(wanted: Iterable[int], most: int | None = None) -> tuple[int, ...]:
    """Numbers of neurons of graphs, ascending: each of ``wanted``, or an equal part of it that has
    no more than ``most``; some of them where they are many."""
    found = set()
    for count in wanted:
        parts = 1 if most is None else -(-count // max(most, LANES))
        if count > 0:
            found.add(round_up(-(-count // parts), LANES))
    ordered = sorted(found)
    if len(ordered) > _MOST_SIZES:
        last = len(ordered) - 1
        ordered = [ordered[last * place // (_MOST_SIZES - 1)] for place in range(_MOST_SIZES)]
    return tuple(ordered)


@dataclass(frozen=True, slots=True)
class Neurons:
    """Room for neurons."""

    room: Room
    capacity: int
    """Neurons that there is room for: as many as graphs compute."""


@dataclass(frozen=True, slots=True)
class MatrixRows:
    """Room for a unit's rows of a matrix."""

    room: Room
    rows: int
    """The wanted ones; ``graph.rows`` fill up the last tile."""
    graph: ProductGraph
    """For one token."""


class UnitArrays:
    """A unit's graphs, and the places of everything in the shared memory."""

    def __init__(self, share: UnitShare) -> None:
        self.shape = shape = FfnShape.of(share.layout, share.model)
        self._find_graphs(share)
        self.bytes = 0
        """Bytes of the shared memory."""
        self.layers = [self._reserve_neurons(count) for count in share.neurons]
        self.matrices = {
            name: self._reserve_matrix(rows, length, choose_weights(precision))
            for name, (rows, length, precision) in share.matrices.items()
        }
        graphs = [own.graph for own in self.matrices.values()]
        job = lay_out_job(
            max(pad_tokens(count, self.tokens) for count in range(1, share.chunk + 1)),
            max([shape.length, *(graph.length for graph in graphs)]),
            shape.experts,
            max([shape.hidden, *(graph.rows for graph in graphs)]),
        )
        self.places = [self._reserve(job) for _ in range(share.jobs)]
        self.staging = [self._reserve_neurons(share.stretch) for _ in range(_STAGING_BUFFERS)]
        kinds = sorted({(own.rows, own.length, own.weights) for own in graphs})
        self.spec = HexagonSpec(
            version=choose_version(share.unit),
            ffn=shape,
            graphs=tuple(
                FfnGraph(tokens=tokens, neurons=count)
                for tokens, count in product(self.tokens, self.neurons)
            ),
            products=tuple(
                ProductGraph(tokens=count, rows=rows, length=length, weights=weights)
                for count, (rows, length, weights) in product(self.tokens, kinds)
            ),
        )
        self.scratch_bytes = max((graph.scratch.bytes for graph in self.spec.index), default=0)
        """Bytes of what graphs keep while they run."""
        self.scratch, self.bytes = self.bytes, self.bytes + self.scratch_bytes
        self.loading_bytes = max(share.neurons, default=0) * share.layout.stride
        """Bytes of a layer's neurons as they come, until all of them can be rearranged."""

    def _find_graphs(self, share: UnitShare) -> None:
        allowed, stated, own = list(_TOKENS), list[int](), share.unit.hexagon
        if share.graphs is not None:
            # What cannot be compiled is a finding (P276), and left out here.
            allowed = sorted(filter(can_compute, share.graphs.tokens)) or allowed
            every = share.model.layer_neurons
            stated = [round(part * every) for part in share.graphs.shares or ()]
        enough = next((tokens for tokens in allowed if tokens >= share.chunk), allowed[-1])
        self.tokens = tuple(tokens for tokens in allowed if tokens <= enough)
        """Tokens of graphs, ascending: none is larger than it takes to hold a job's."""
        most = None
        if own is not None and own.own_memory is not None:
            # Half of it: inputs and weights pass through it, too.
            most = own.own_memory // 2 // (max(self.tokens) * VALUE_BYTES) // LANES * LANES
        self.neurons = (
            choose_neurons(stated)
            if any(stated)
            else choose_neurons((*share.neurons, *share.wanted, share.stretch), most)
        )
        """Neurons of graphs, ascending."""

    def _reserve(self, room: Room) -> Room:
        first, self.bytes = self.bytes, self.bytes + room.bytes
        return room.move(first)

    def _reserve_neurons(self, count: int) -> Neurons:
        capacity = sum(piece.size for piece in cut_pieces(count, self.neurons))
        return Neurons(self._reserve(lay_out_neurons(self.shape, capacity)), capacity)

    def _reserve_matrix(self, rows: int, length: int, weights: Weights) -> MatrixRows:
        graph = ProductGraph(
            tokens=1,
            rows=round_up(rows, LANES),
            length=round_up(length, LENGTH_STEP),
            weights=weights,
        )
        room = lay_out_matrix(weights, graph.rows, graph.length)
        return MatrixRows(self._reserve(room), rows, graph)
