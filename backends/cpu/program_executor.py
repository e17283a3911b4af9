"""An executor whose program computes everything but neurons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from pi2.arrays import F32, I32
from pi2.backends.arithmetic import list_chosen
from pi2.backends.blocks.instructions import FindWeight, Planes
from pi2.backends.blocks.interpreter import CompiledInterpreter, Interpret
from pi2.backends.blocks.model import BlockModel
from pi2.backends.blocks.operands import Area
from pi2.backends.blocks.outside import Exchange, Stations
from pi2.backends.blocks.routed import view_floats
from pi2.backends.cpu.arrays import keep_areas
from pi2.backends.cpu.request import count_tokens, describe_extent, describe_program
from pi2.backends.cpu.weights import StoreWeights, describe_stored
from pi2.backends.executor import ExecutorObserver
from pi2.backends.protocol import BuildRequest
from pi2.plan.arithmetic.units import DividedRows

_NONE: I32 = np.zeros(0, np.int32)
PARTS = ("query", "key", "value", "query_gate")
"""Keys of the matrices that are rows of a projection, in their order."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """Rows of a matrix that another unit computes: the first ones."""

    number: int
    """The instruction's."""
    rows: int
    others: int
    y: Area


class ProgramExecutor:
    """The calls of `pi2.backends.executor.Executor` that are not about neurons, and of
    `RowDivider`: instructions from one layer's neurons to the next layer's mixers are one call."""

    _observer: ExecutorObserver | None = None

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
        for place, arrays in zip(
            self._places, keep_areas(program.memory, kept, request), strict=False
        ):
            place.kept = arrays
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
        self._token = 0
        rows = request.rows or DividedRows(unit="")
        self._projections: list[list[_Product]] = [[] for _ in self.exchange.layers]
        self._outputs: dict[int, _Product] = {}
        self._head: _Product | None = None
        self._divided: list[_Product] = []
        """With rows of others."""
        if rows.qkv or rows.output or rows.head:
            self._divide(rows)

    def _divide(self, rows: DividedRows) -> None:
        """List the products of which another unit computes the first rows."""
        program = self.program
        before = [0] * len(self._projections)
        for matrix in program.matrices:
            number, layer, count = matrix.instructions[0], matrix.layer, matrix.weight.rows
            area = Area(*program.read_values(number, "y", "y_stride"))
            if layer is not None and matrix.key in PARTS:
                others = min(max(rows.qkv - before[layer], 0), count)
                before[layer] += count
                own = _Product(number=number, rows=count, others=others, y=area)
                self._projections[layer].append(own)
            elif layer is not None and matrix.key == "output":
                others = rows.output
                self._outputs[layer] = _Product(number=number, rows=count, others=others, y=area)
            elif number >= program.head:
                self._head = _Product(number=number, rows=count, others=rows.head, y=area)
        found = [own for layer in self._projections for own in layer]
        found += self._outputs.values()
        found += [] if self._head is None else [self._head]
        self._divided = [own for own in found if own.others]

    def view(self, area: Area, width: int) -> F32:
        """Return an area [tokens, width]; vectors of this width have no gaps between them."""
        found: F32 = view_floats(area.address, self._tokens, area.stride)[:, :width]
        return found

    def select_sequence(self, number: int) -> None:
        self._sequence = number

    def select_chunk(self, number: int) -> None:
        """Let the calls that follow be about another chunk."""
        chosen = self._places[number]
        if chosen is not self._place:
            self._change_place(chosen)
        if self._observer is not None:
            self._observer.select_chunk(number)

    def _change_place(self, chosen: _Place) -> None:
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
        self._begin_call()

    def begin_step(self, tokens: I32, sequences: Sequence[int], positions: Sequence[int]) -> None:
        self.select_chunk(0)
        self.is_step, self.tokens = True, len(tokens)
        self.program.begin_step(tokens, sequences, positions)
        self._begin_call()

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

    def select_token(self, number: int) -> None:
        """Let calls for one token be about another one of a step."""
        self._token = number

    def _begin_call(self) -> None:
        now = self._place
        now.at = now.target = self.program.looked_up
        self.program.run(0, now.at)
        if self._token:
            self.select_token(0)
        # Other units compute the first rows.
        for own in self._divided:
            self.program.take_rows(own.number, own.others, own.rows)

    def join(self, given: F32) -> None:
        self.program.join(given[:, : self._model.shape.hidden])

    def attend(self, layer: int, position: int) -> None:
        if layer == 0:
            self.begin_layers(position)
        self.attend_step(layer)

    def begin_attention(self, layer: int, position: int) -> F32:
        """Return what the projection reads [T, hidden]."""
        if layer == 0:
            self.begin_layers(position)
        self.go_to(self._projections[layer][0].number)
        return self.view_input()

    def project(self, layer: int) -> None:
        self.go_to(self._projections[layer][-1].number + 1)

    def put_projected(self, layer: int, values: F32) -> None:
        done = 0
        for own in self._projections[layer]:
            self._put(own, values[:, done : done + own.others], is_added=False)
            done += own.others

    def mix(self, layer: int, position: int) -> F32:
        """Return the values that attention mixes [T, heads x head_dim]."""
        self.go_to(self._outputs[layer].number)
        return self.view_mixed(layer)

    def project_output(self, layer: int) -> None:
        self.finish_mixers(layer)

    def put_output(self, layer: int, values: F32) -> None:
        self._put(self._outputs[layer], values, is_added=True)

    def _put(self, own: _Product, values: F32, *, is_added: bool) -> None:
        """Put products [T, n] in the place of the first rows', with their biases."""
        program = self.program
        bias, has_bias = program.read_values(own.number, "bias", "has_bias")
        count = values.shape[1]
        if has_bias:
            values = values + view_floats(bias, count)
        target = self.view(own.y, count)[: len(values)]
        if is_added:
            target += values * np.float32(self._model.multipliers.residual)
        else:
            target[:] = values

    def put_logits(self, values: F32) -> F32:
        """Complete the last logits with the others' rows."""
        own, program = self._head, self.program
        assert own is not None
        logits, count = program.read_logits(), values.shape[1]
        bias, has_bias = program.read_values(own.number, "bias", "has_bias")
        if has_bias:
            values = values + view_floats(bias, count)
        values = values * np.float32(self._model.multipliers.logits)
        limit = self._model.logit_softcap
        if limit is not None:
            values = np.tanh(values / np.float32(limit)) * np.float32(limit)
        logits[:, :count] = values
        return logits

    def read_routes(self) -> F32:
        """Return the weights of an MoE model's experts."""
        raise NotImplementedError

    def list_experts(self) -> I32:
        return _NONE if self._model.moe is None else list_chosen(self.read_routes()[self._token])

    def list_chunk_experts(self) -> I32:
        """Return the experts that the router chose for any token."""
        if self._model.moe is None:
            return _NONE
        return np.flatnonzero(self.read_routes().any(axis=0)).astype(np.int32)

    def observe(self, observer: ExecutorObserver | None) -> None:
        """Tell ``observer`` of every kernel and of the neurons of prompts."""
        assert self._observer is None or observer is None, "one observer at a time"
        self._observer = observer
        self.program.observe(None if observer is None else observer.note_kernel)
