"""Operands of graphs, and what graphs keep while they run; plain Python."""

from __future__ import annotations

from pi2.backends.hexagon.rooms import ALIGNMENT, Room
from pi2.backends.hexagon.specification import FfnGraph, Graph, ProductGraph, count_together

FFN_OPERANDS = (
    "weights",
    "multipliers",
    "row_scales",
    "biases",
    "experts",
    "plane",
    "down",
    "down_scales",
    "stride",
    "inputs",
    "offsets",
    "scales",
    "routes",
    "results",
    "count",
    "scratch",
)
"""What a graph of neurons is given, in the order of a message's operands: places of arrays, and
numbers (`NUMBERS`)."""
PRODUCT_OPERANDS = (
    "weights",
    "multipliers",
    "row_scales",
    "inputs",
    "offsets",
    "scales",
    "results",
    "scratch",
)
"""What a graph of a matrix is given."""
NUMBERS = ("plane", "stride", "count")
"""Operands that are no places: bytes from the scales of one vector of neurons to those of the next,
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
