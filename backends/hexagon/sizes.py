"""What a unit keeps, where, and its bytes, for plans and allocation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from pi2.backends.hexagon.specification import (
    LANES,
    LAYOUTS,
    LENGTH_STEP,
    FfnGraph,
    FfnShape,
    Graph,
    HexagonSpec,
    ProductGraph,
    Version,
    Weights,
    can_compute,
    choose_weights,
    count_together,
)
from pi2.plan.arithmetic.units import pad_tokens
from pi2.plan.documents.device import Unit
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan_units import Graphs
from pi2.plan.weights.layout import GROUP, BundleLayout, Precision, round_up

ALIGNMENT = 128
"""Bytes: every array begins at a multiple of it, a vector."""


@dataclass(frozen=True, slots=True)
class Room:
    """Arrays side by side, each at a multiple of 128 bytes."""

    places: Mapping[str, int]
    """Bytes from the start, by array."""
    bytes: int

    @classmethod
    def of(cls, **sizes: int) -> Room:
        """Lay out arrays of these sizes in bytes."""
        places, end = {}, 0
        for name, size in sizes.items():
            places[name] = end
            end = round_up(end + size, ALIGNMENT)
        return cls(places, end)


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


def place_piece(shape: FfnShape, room: Room, first: int, neuron: int) -> dict[str, int]:
    """First bytes of the arrays of a room at ``first`` for the neurons from ``neuron`` on, a
    multiple of 32."""
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
    return {name: first + room.places[name] + neuron * step for name, step in steps.items()}


def lay_out_matrix(weights: Weights, rows: int, length: int) -> Room:
    """Room for ``rows``, a multiple of 32, of ``length`` elements, a multiple of 64."""
    assert rows % LANES == 0 and length % LENGTH_STEP == 0, (rows, length)
    codes, factors = count_row_bytes(weights, length)
    return Room.of(weights=rows * codes, multipliers=rows * factors, row_scales=4 * rows)


def lay_out_job(tokens: int, length: int, groups: int, experts: int, width: int) -> Room:
    """Room for what a job of ``tokens`` reads and writes: inputs of at most ``length`` elements,
    with at most ``groups`` offsets, and results of at most ``width``."""
    return Room.of(
        inputs=tokens * length,
        offsets=4 * tokens * groups,
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


def lay_out_scratch(graph: Graph) -> Room:
    """Arrays that live while a graph runs: in the NPU's own memory (VTCM) where it has some."""
    if isinstance(graph, ProductGraph):
        return Room.of(sums=ALIGNMENT * count_together(graph.tokens))
    return _lay_out_ffn(graph)


def _lay_out_ffn(graph: FfnGraph) -> Room:
    """Values of neurons, the same rounded, and integer sums of a tile."""
    each = graph.tokens * graph.neurons
    return Room.of(
        values=4 * each,
        rounded=each,
        rounded_offsets=4 * graph.tokens,
        rounded_scales=4 * graph.tokens,
        sums=2 * ALIGNMENT * count_together(graph.tokens),
    )


TOKENS = (1, 2, 4, 32, 64, 128)
"""Tokens of graphs, unless a plan says otherwise: steps of few sequences, and chunks of prompts."""


MOST_SIZES = 8
"""Numbers of neurons that graphs have, unless a plan names more."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of a job, or neurons of a layer, that one graph computes."""

    first: int
    count: int
    size: int
    """Of the graph; ``count`` of them are asked for."""


def choose_tokens(most: int, allowed: Sequence[int] = TOKENS) -> tuple[int, ...]:
    """Token counts of graphs, ascending, for jobs of up to ``most`` tokens: none that is larger
    than it takes to hold them."""
    ordered = sorted(allowed)
    enough = next((tokens for tokens in ordered if tokens >= most), ordered[-1])
    return tuple(tokens for tokens in ordered if tokens <= enough)


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
    if len(ordered) > MOST_SIZES:
        last = len(ordered) - 1
        ordered = [ordered[last * place // (MOST_SIZES - 1)] for place in range(MOST_SIZES)]
    return tuple(ordered)


def find_room(count: int, graphs: Sequence[int]) -> int:
    """Neurons that graphs compute for ``count``: there must be room for them."""
    return sum(piece.size for piece in cut_pieces(count, graphs))


def list_ffn_graphs(tokens: Sequence[int], neurons: Sequence[int]) -> tuple[FfnGraph, ...]:
    return tuple(FfnGraph(tokens=t, neurons=n) for t, n in product(tokens, neurons))


def list_product_graphs(
    matrices: Mapping[str, tuple[int, int, Precision]], tokens: Sequence[int]
) -> tuple[ProductGraph, ...]:
    """A graph for every number of tokens and shape of a matrix: rows, length and precision."""
    shapes = {
        (round_up(rows, LANES), round_up(length, LENGTH_STEP), choose_weights(precision))
        for rows, length, precision in matrices.values()
    }
    return tuple(
        ProductGraph(tokens=count, rows=rows, length=length, weights=weights)
        for count, (rows, length, weights) in product(tokens, sorted(shapes))
    )


STAGING_BUFFERS = 2
"""One range of added neurons is rearranged while another is computed."""


def describe_shape(model: Model, layout: BundleLayout) -> FfnShape:
    """Return the shape of a model's neurons, whose bundles have their scales in them."""
    return FfnShape(
        hidden=layout.hidden,
        weights=choose_weights(layout.precision),
        options=model.ffn.model_copy(update={"absent_layers": (), "gate_sparsity": ()}),
        experts=0 if layout.expert_offset is None else model.expert_count,
        weighs_input=model.moe is not None and model.moe.weighs == "input",
    )


def describe_graphs(graphs: Graphs | None, unit: Unit, neurons: int) -> dict[str, Any]:
    """Arguments of `UnitSizes` that say what graphs a plan wants, of layers of ``neurons``."""
    own = None if unit.hexagon is None else unit.hexagon.own_memory
    if graphs is None:
        return {"own_memory": own}
    # What cannot be compiled is a finding (P276), and left out here.
    tokens = tuple(count for count in graphs.tokens if can_compute(count)) or TOKENS
    stated = tuple(round(share * neurons) for share in graphs.shares or ())
    return {"tokens": tokens, "stated": stated if any(stated) else None, "own_memory": own}


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSizes:
    shape: FfnShape
    stride: int
    """Bytes of a bundle with its scales, as neurons come before they are rearranged."""
    counts: Sequence[int]
    """Neurons that are kept of each layer."""
    matrices: Mapping[str, tuple[int, int, Precision]]
    """Rows, length and precision of its part of each matrix."""
    chunk: int
    """Most tokens of a job."""
    jobs: int
    stretch: int
    """Most neurons that are added at once."""
    tokens: tuple[int, ...] = TOKENS
    """Tokens that graphs may have."""
    wanted: Sequence[int] = ()
    """Neurons that steps compute of some layer, if these are fewer than it keeps."""
    stated: tuple[int, ...] | None = None
    """Numbers of neurons of graphs, if the plan names them."""
    own_memory: int | None = None
    """Bytes of the NPU's own memory, if they are known."""

    @property
    def graph_tokens(self) -> tuple[int, ...]:
        """Tokens of graphs, ascending."""
        return choose_tokens(self.chunk, self.tokens)

    @property
    def graph_neurons(self) -> tuple[int, ...]:
        """Neurons of graphs, ascending."""
        if self.stated is not None:
            return choose_neurons(self.stated)
        most = self.own_memory
        if most is not None:
            # Half of it: inputs and weights pass through it, too.
            each = max(self.graph_tokens) * VALUE_BYTES
            most = most // 2 // each // LANES * LANES
        return choose_neurons((*self.counts, *self.wanted, self.stretch), most)

    def describe(self, version: Version) -> HexagonSpec:
        tokens = self.graph_tokens
        return HexagonSpec(
            version=version,
            ffn=self.shape,
            graphs=list_ffn_graphs(tokens, self.graph_neurons),
            products=list_product_graphs(self.matrices, tokens),
        )

    def lay_out_layer(self, layer: int) -> Room:
        return lay_out_neurons(self.shape, find_room(self.counts[layer], self.graph_neurons))

    def lay_out_staging(self) -> Room:
        return lay_out_neurons(self.shape, find_room(self.stretch, self.graph_neurons))

    def lay_out_matrix(self, name: str) -> Room:
        rows, length, precision = self.matrices[name]
        return lay_out_matrix(
            choose_weights(precision), round_up(rows, LANES), round_up(length, LENGTH_STEP)
        )

    def lay_out_job(self) -> Room:
        graphs = self.graph_tokens
        tokens = max(pad_tokens(count, graphs) for count in range(1, self.chunk + 1))
        lengths = [self.shape.length]
        lengths += [round_up(length, LENGTH_STEP) for _, length, _ in self.matrices.values()]
        widths = [
            self.shape.hidden,
            *(round_up(rows, LANES) for rows, *_ in self.matrices.values()),
        ]
        longest = max(lengths)
        return lay_out_job(tokens, longest, longest // GROUP, self.shape.experts, max(widths))

    @property
    def scratch_bytes(self) -> int:
        """Bytes of what graphs keep while they run."""
        spec = self.describe("v66")
        return max((lay_out_scratch(graph).bytes for graph in spec.index), default=0)

    @property
    def shared_bytes(self) -> int:
        """Bytes of the memory that both processes see."""
        layers = sum(self.lay_out_layer(layer).bytes for layer in range(len(self.counts)))
        matrices = sum(self.lay_out_matrix(name).bytes for name in self.matrices)
        staging = STAGING_BUFFERS * self.lay_out_staging().bytes
        return (
            layers + matrices + staging + self.jobs * self.lay_out_job().bytes + self.scratch_bytes
        )

    @property
    def loading_bytes(self) -> int:
        """Bytes of a layer's neurons as they come, until all of them can be rearranged."""
        return max(self.counts, default=0) * self.stride
