"""What a unit keeps, where, and how much memory that takes: plain arithmetic, for plans and for
what allocates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pi2.backends.hexagon.graphs import (
    TOKENS,
    choose_neurons,
    choose_tokens,
    find_most_padded,
    find_room,
    list_ffn_graphs,
    list_product_graphs,
)
from pi2.backends.hexagon.operands import VALUE_BYTES, lay_out_scratch
from pi2.backends.hexagon.rooms import Room, lay_out_job, lay_out_matrix, lay_out_neurons
from pi2.backends.hexagon.specification import (
    LANES,
    LENGTH_STEP,
    FfnShape,
    HexagonSpec,
    Version,
    can_compute,
    choose_weights,
)
from pi2.plan.documents.device import Unit
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan_units import Graphs
from pi2.plan.weights.layout import GROUP, BundleLayout, Precision, round_up

STAGING_BUFFERS = 2
"""One stretch of added neurons is rearranged while another is computed."""


def describe_shape(model: Model, layout: BundleLayout) -> FfnShape:
    """Return the shape of a model's neurons, whose bundles have their scales in them."""
    return FfnShape(
        hidden=layout.hidden,
        weights=choose_weights(layout.precision),
        activation=model.ffn.activation,
        threshold=model.ffn.threshold or 0.0,
        slope=model.ffn.slope,
        limit=model.ffn.limit,
        up_offset=model.ffn.up_offset,
        gated=layout.is_gated,
        bias=bool(layout.biases),
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
    """Everything that a unit has."""

    shape: FfnShape
    stride: int
    """Bytes of a bundle with its scales, as neurons come before they are rearranged."""
    counts: Sequence[int]
    """Neurons that are kept of each layer."""
    matrices: Mapping[str, tuple[int, int, Precision]]
    """Rows, length and precision of what it has of each matrix."""
    chunk: int
    """Most tokens of a job."""
    jobs: int
    stretch: int
    """Most neurons that are added at once."""
    tokens: tuple[int, ...] = TOKENS
    """Tokens that graphs may have."""
    wanted: Sequence[int] = ()
    """Neurons that steps compute of some layer, where these are fewer than it keeps."""
    stated: tuple[int, ...] | None = None
    """Numbers of neurons of graphs, where the plan names them."""
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
        """Return what the library is compiled from."""
        tokens = self.graph_tokens
        return HexagonSpec(
            version=version,
            ffn=self.shape,
            graphs=list_ffn_graphs(tokens, self.graph_neurons),
            products=list_product_graphs(self.matrices, tokens),
        )

    def lay_out_layer(self, layer: int) -> Room:
        """Room of what is kept of a layer."""
        return lay_out_neurons(self.shape, find_room(self.counts[layer], self.graph_neurons))

    def lay_out_staging(self) -> Room:
        """Room of a stretch of added neurons."""
        return lay_out_neurons(self.shape, find_room(self.stretch, self.graph_neurons))

    def lay_out_matrix(self, name: str) -> Room:
        """Room of a matrix's rows."""
        rows, length, precision = self.matrices[name]
        return lay_out_matrix(
            choose_weights(precision), round_up(rows, LANES), round_up(length, LENGTH_STEP)
        )

    def lay_out_job(self) -> Room:
        """Room of what a job reads and writes."""
        tokens = find_most_padded(self.chunk, self.graph_tokens)
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
