"""Arrays of an executor, which the same lines count or allocate: plain Python."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pi2.backends.blocks.layers import MOST_LANES, ProgramSize, count_program
from pi2.backends.blocks.operands import Area, Extent
from pi2.backends.blocks.room import Memory
from pi2.backends.cpu.request import (
    count_tokens,
    describe_extent,
    describe_request,
    describe_tensors,
    make_spec,
)
from pi2.backends.cpu.weights import StoreWeights, describe_stored
from pi2.backends.kernels.isa import (
    ARCHITECTURES,
    BLOCK_TOKENS,
    count_blocks_bytes,
    count_tile_bytes,
    list_newest,
)
from pi2.backends.kernels.spec import BLOCK, BLOCK_ROOM, PANEL, PARTS, KernelSpec
from pi2.backends.protocol import BuildRequest
from pi2.plan.weights.layout import GROUP, round_up

if TYPE_CHECKING:
    from pi2.plan.arithmetic.resolved import ResolvedPlan

Arrays = dict[str, Any]
"""Arrays by the names that parameters of kernels have."""
Shapes = dict[str, tuple[Any, ...]]
"""Type and shape of each."""


UNKNOWN_THREADS = 32
"""Compute threads that have room where neither plan nor device states them."""


def count_segments(
    resolved: ResolvedPlan,
    *,
    threads: int | None,
    chunks: int,
    architecture: str | None,
    features: Collection[str] | None,
) -> Mapping[str, int]:
    """See `pi2.backends.protocol.ExecutorBackend`."""
    most: dict[str, int] = {}
    for name in (architecture,) if architecture in ARCHITECTURES else ARCHITECTURES:
        known = list_newest(name) if features is None else [features]
        for number, own in enumerate(known):
            request = describe_request(
                resolved,
                describe_tensors(resolved.model),
                # An unknown machine with tiles has as many as there is room for.
                threads=threads or UNKNOWN_THREADS >> number,
                chunks=chunks,
                features=own,
                architecture=name,
            )
            for segment, size in count_arrays(request).items():
                most[segment] = max(size, most.get(segment, 0))
    return most


def count_arrays(request: BuildRequest, lanes: int = MOST_LANES) -> Mapping[str, int]:
    """Return the bytes that an executor takes by segment; tensors need have no bytes."""
    program = _count_program(request, describe_extent(request), lanes)
    memory = Memory()
    memory.sizes |= program.segments
    keep_areas(memory, program.kept, request)
    NeuronArrays(make_spec(request), request, memory, keeps_read=program.keeps_read)
    return memory.sizes


def _count_program(request: BuildRequest, extent: Extent, lanes: int) -> ProgramSize:
    model = request.model
    if (extent, lanes) not in model.derived:
        stored = describe_stored(model)
        weights = StoreWeights(stored, request.tensors)
        model.derived[extent, lanes] = count_program(stored, weights, extent, lanes)
    known: ProgramSize = model.derived[extent, lanes]
    return known


def keep_areas(memory: Memory, areas: Sequence[Area], request: BuildRequest) -> list[list[Any]]:
    """Return arrays [tokens, stride] for what each of several chunks has of ``areas``."""
    if request.chunks == 1:
        return []
    tokens = count_tokens(request)
    return [
        [memory.take("float32", tokens, area.stride) for area in areas]
        for _ in range(request.chunks)
    ]


class NeuronArrays:
    """What the kernels of neurons compute in."""

    def __init__(
        self, spec: KernelSpec, request: BuildRequest, memory: Memory, *, keeps_read: bool
    ) -> None:
        """``keeps_read``: whether each of several chunks keeps what its neurons read anyway."""
        self._spec, self._memory = spec, memory
        tokens, rows, neurons = count_tokens(request), request.step_tokens, request.neurons
        threads, hidden = spec.threads, spec.hidden
        chunk = self._shape_chunk(tokens)
        if request.chunks > 1 and not keeps_read:
            chunk["hidden_values"] = "float32", tokens, hidden
        if request.chunks > 1 and spec.experts:
            chunk["routes"] = "float32", tokens, spec.experts
        self.chunks = [self._take(chunk) for _ in range(request.chunks)]
        """Of each: what a chunk's neurons read and give. The only one reads the program's area."""
        tiles: Shapes = {}
        if spec.isa.blocks:
            size = count_blocks_bytes(hidden, spec.chunk_planes)
            tiles["tiles"] = "int8", threads, count_tile_bytes(hidden)
            tiles["blocks"] = "int8", -(-tokens // BLOCK_TOKENS), size
        values = memory.take("float32", max(tokens * PANEL, threads * hidden))
        gathered: Shapes = {
            "slots": ("int32", neurons),
            "gates": ("float32", neurons),
            "values": ("float32", neurons),
            "firing": ("int32", neurons),
            "counts": ("int32", threads + 1),
        }
        if spec.sub_norm:
            gathered["own_squares"] = "float32", threads
        if spec.scales == "resident":
            gathered |= {"rows": ("int32", neurons), "firing_rows": ("int32", neurons)}
        # One token alone takes what many have room for.
        self.gathered = self._take(gathered) | {"partial": values}
        every: Shapes = {"counts": ("int32", threads + 1)}
        if not spec.experts:
            every["slots"] = "int32", neurons
        self.every = self._take(every)
        """What one token takes of neighbours: all slots, and counts of what nothing predicts."""
        panel: Shapes = {
            "tokens_of_expert": ("int32", tokens if spec.experts else 1),
            "masks": ("int32", tokens, PARTS),
        }
        self.panel = self._take(panel | tiles) | {"slots": self.gathered["slots"], "values": values}
        """What neighbours are computed in for several tokens."""
        self.shared = self._take(self._shape_shared(rows) if spec.shares_neurons else {})
        """What neurons are computed in that the tokens of a step share."""
        padded = round_up(neurons, 16)  # of every token in whole lines
        self.lists = self._take(
            {
                "scores": ("float32", rows, padded),
                "indices": ("int32", rows, padded),
                "found": ("int32", rows),
            }
        )
        """What predictions give."""
        self.wanted = memory.take("int32", neurons)
        """Room for the stored indices of neurons."""
        self.named_scores = memory.take("float32", neurons if spec.experts else 0)
        self.middle = {rank: self._take(self._shape_middle(rows, rank)) for rank in spec.ranks}
        """What predictors compute, by rank."""
        cut: Shapes = {"cutoff_parts": ("float32", tokens, spec.cutoff_rows)}
        self.cutoffs = self._take(cut if spec.cutoff_rows else {})

    def _take(self, shapes: Shapes) -> Arrays:
        return {name: self._memory.take(*shape) for name, shape in shapes.items()}

    def _shape_chunk(self, tokens: int) -> Shapes:
        spec = self._spec
        shapes = self._shape_activations("hidden", tokens, spec.hidden, spec.most_planes)
        shapes["y"] = "float32", tokens, spec.hidden
        if spec.sub_norm:
            shapes["squares"] = "float32", tokens
        if spec.cutoff_rows:
            shapes["cutoffs"] = "float32", tokens
        return shapes

    def _shape_middle(self, rows: int, rank: int) -> Shapes:
        shapes = self._shape_activations("middle", rows, rank, self._spec.planes)
        return shapes | {"middle_values": ("float32", rows, rank)}

    def _shape_activations(self, name: str, tokens: int, length: int, planes: int) -> Shapes:
        """Codes, scales and sums."""
        shapes: Shapes = {
            f"{name}_codes": ("int8", tokens, planes, length),
            f"{name}_scales": ("float32", tokens, length // GROUP),
            f"{name}_sums": ("int32", tokens, length // GROUP),
        }
        if self._spec.upper_steps:
            shapes[f"{name}_upper_sums"] = "int32", tokens, length // GROUP
        return shapes

    def _shape_shared(self, rows: int) -> Shapes:
        spec = self._spec
        threads = spec.threads
        resident = spec.scales == "resident"
        lists = ["block_slots", *(["block_rows"] if resident else [])]
        firing = ["block_firing", *(["block_firing_rows"] if resident else [])]
        shapes: Shapes = dict.fromkeys(lists, ("int32", threads, rows, BLOCK_ROOM))
        shapes |= dict.fromkeys(firing, ("int32", threads, BLOCK))
        shapes |= dict.fromkeys(("block_gates", "block_values"), ("float32", threads, BLOCK))
        shapes["partials"] = "float32", rows, threads, spec.hidden
        if spec.sub_norm:
            shapes["token_squares"] = "float32", rows, threads
        return shapes
