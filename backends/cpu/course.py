"""A program of a model without its neurons, from one layer's neurons to the next's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from pi2.arrays import F32, I32
from pi2.backends.blocks.instructions import FindWeight, Planes
from pi2.backends.blocks.interpreter import CompiledInterpreter, Interpret
from pi2.backends.blocks.model import BlockModel
from pi2.backends.blocks.operands import Area
from pi2.backends.blocks.outside import Exchange, Stations
from pi2.backends.blocks.routed import view_floats
from pi2.backends.cpu.arrays import keep_areas
from pi2.backends.cpu.request import count_tokens, describe_extent, describe_program
from pi2.backends.cpu.weights import StoreWeights, describe_stored
from pi2.backends.protocol import BuildRequest


@dataclass(slots=True, kw_only=True)
class _Place:
    """A chunk on its way through the layers."""

    tokens: I32
    sequence: int = 0
    position: int = 0
    at: int = 0
    """The next instruction."""
    target: int = 0
    """The instruction at which it has to arrive; earlier ones may not have run yet."""
    kept: list[F32] = field(default_factory=list)
    """Its content of the areas that all chunks share."""


class Course:
    """Runs the program as far as it is needed: instructions from one layer's neurons to the next
    layer's mixers are one call."""

    def __init__(
        self,
        request: BuildRequest,
        *,
        interpret: Interpret | None = None,
        planes: Planes | None = None,
        find: FindWeight | None = None,
    ) -> None:
        """By default kernels are compiled, ``planes`` follow the request's types, and tensors are
        the request's, of a store."""
        model = describe_stored(request.model)
        tokens = count_tokens(request)
        self._model, self._tokens, self._step_tokens = model, tokens, request.step_tokens
        self.program = program = BlockModel(
            model,
            find or StoreWeights(model, request.tensors),
            describe_extent(request, planes),
            allocate=request.allocate,
            interpret=interpret or partial(CompiledInterpreter, describe_program(request)),
        )
        self.expect = program.expect
        self.read_context, self.put_context = program.read_context, program.put_context
        self.read_state, self.put_state = program.read_state, program.put_state
        assert program.exchange is not None
        self.exchange: Exchange = program.exchange
        self._stations: list[Stations] = self.exchange.layers
        self._starts = [program.looked_up, *(own.end for own in self._stations)]
        """By layer, the first instruction after the one before; then the head's."""
        begun = zip(self._starts, (own.begun for own in self._stations), strict=False)
        self._begun = {**dict(begun), 0: self._stations[0].begun}
        """By the first instruction of each layer, the one after its input has been kept."""
        kept = program.list_kept()
        self._shared = [view_floats(area.address, tokens, area.stride) for area in kept]
        """Areas that every chunk has its own content of."""
        self._places = [_Place(tokens=np.zeros(0, np.int32)) for _ in range(request.chunks)]
        for place, own in zip(
            self._places, keep_areas(program.memory, kept, request), strict=False
        ):
            place.kept = own
        self.kept_reads: list[F32] = []
        """Of each of several chunks, what its neurons read, if it is kept."""
        if program.keeps_read:
            self.kept_reads = [place.kept[-1] for place in self._places if place.kept]
        self._place = self._places[0]
        self._sequence = 0
        self.look_up: Callable[[I32], None] | None = None
        """Gives rows of embeddings for a chunk's tokens, if these are not in memory."""
        self.is_step = False
        """Whether the call's tokens are a step of several."""
        self.tokens = 0
        """Tokens of the call."""

    def view(self, area: Area, width: int) -> F32:
        """Return an area [tokens, width]; vectors of this width have no gaps between them."""
        found: F32 = view_floats(area.address, self._tokens, area.stride)[:, :width]
        return found

    def select_sequence(self, number: int) -> None:
        self._sequence = number

    def select_chunk(self, number: int) -> None:
        chosen = self._places[number]
        if chosen is self._place:
            return
        self.catch_up()
        count = self.tokens
        for kept, area in zip(self._place.kept, self._shared, strict=True):
            kept[:count] = area[:count]
        self._place, self.tokens = chosen, len(chosen.tokens)
        if self.tokens:
            self.program.begin_piece(chosen.tokens)
            self.program.place(chosen.sequence, chosen.position)
        for kept, area in zip(chosen.kept, self._shared, strict=True):
            area[: self.tokens] = kept[: self.tokens]

    def embed(self, tokens: I32) -> None:
        """Begin with tokens, the rows of which may be gone later; `begin_layers` says where they
        stand."""
        now, self.is_step = self._place, False
        now.tokens, now.sequence, self.tokens = tokens, self._sequence, len(tokens)
        self.program.begin_piece(tokens)
        if self.look_up is not None:
            self.look_up(tokens)
        now.at = now.target = self.program.looked_up
        self.program.run(0, now.at)

    def begin_step(self, tokens: I32, sequences: Sequence[int], positions: Sequence[int]) -> None:
        self.select_chunk(0)
        self.is_step, self.tokens = True, len(tokens)
        self.program.begin_step(tokens, sequences, positions)
        self._place.at = self._place.target = self.program.looked_up
        self.program.run(0, self._place.at)

    def begin_layers(self, position: int) -> None:
        """Give the position of a chunk's first token."""
        if not self.is_step:
            self._place.position, self._place.sequence = position, self._sequence
            self.program.place(self._sequence, position)

    def catch_up(self) -> None:
        """Run instructions that were put off."""
        now = self._place
        if now.at < now.target:
            self.program.run(now.at, now.target)
            now.at = now.target

    def attend_step(self, layer: int) -> None:
        """Finish the previous layer, and add the mixers of ``layer``."""
        now, first = self._place, self._starts[layer]
        if now.target != first:
            self.catch_up()
            now.at = first
        self.finish_mixers(layer)

    def finish_mixers(self, layer: int) -> None:
        """Add the rest of the mixers of ``layer``."""
        self.go_to(self._stations[layer].attended)
        self._place.at = self._place.target = self._begin_input(layer)

    def _begin_input(self, layer: int) -> int:
        """Return the first instruction of what the FFN of ``layer`` reads."""
        own = self._stations[layer]
        return own.attended if self.tokens <= self._step_tokens else own.input

    def read_layer(self, layer: int) -> None:
        """Compute the input of the neurons of ``layer``: of the present residual stream, if the
        layer's mixers have not run yet."""
        now, own = self._place, self._stations[layer]
        first = self._begin_input(layer)
        if now.at == first:
            self.go_to(own.gap)
            return
        # What a layer keeps of its input belongs to it.
        now.target = self._begun.get(now.target, now.target)
        self.catch_up()
        self.program.run(first, own.gap)

    def finish(self, layer: int) -> None:
        """Go on with the sum of the neurons of ``layer``, when its successor begins."""
        own = self._stations[layer]
        self._place.at, self._place.target = own.gap, own.end

    def go_to(self, number: int) -> None:
        """Run all instructions before ``number``."""
        self._place.target = number
        self.catch_up()

    def view_input(self) -> F32:
        """What projections of attention read [T, hidden], as long as packed vectors are."""
        area = self.program.u if self._model.norm.inputs else self.program.x
        return self.view(area, self._model.shape.stored_hidden)[: self.tokens]

    def view_mixed(self, layer: int) -> F32:
        """The values that attention mixes [T, heads x head_dim], likewise."""
        own = self._model.blocks[layer].attention
        assert own is not None
        area = self.program.take_area("mixed", own.query)
        return self.view(area, own.stored_query)[: self.tokens]

    def read_head_input(self, first: int) -> F32:
        self.go_to(self.program.head)
        return self.program.read_head_input(first, self._model.shape.stored_hidden)

    def logits(self, first: int) -> F32:
        """Return logits of the tokens from ``first`` on, as many as there is room for."""
        self.go_to(self.program.head)
        return self.program.logits(first)

    def close(self) -> None:
        self.program.close()
