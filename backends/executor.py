"""Executors: models built for a unit, with the KV cache of some sequences. They compute a chunk of
tokens of one sequence, or a token each of several, layer by layer.

Order of calls for a chunk of T tokens at ``position``::

    embed(tokens)                                   x = embedding[tokens]; if layers have
                                                    embeddings of their own, rows 0 .. T - 1 of
                                                    that tensor are these tokens'
    for each layer:
        attend(layer, position)                     x += attention(norm(x)), KV cache extended
        begin_ffn(layer)                            u = norm(x), y = 0
        list_experts (T = 1)                        -> experts that the router chose, if any
        list_chunk_experts                          -> the ones chosen for any of the tokens
        predict_low_rank / predict_gate (T = 1)     -> stored indices of neurons that may fire
        find_open, any number (T = 1)               -> of some neurons, the ones with open gates
        share_input                                 -> u, for other units
        add_neurons / add_dense, any number         y += neurons(u)
        add_sum, any number                         y += the sums of other units
        end_ffn(layer)                              x += y
    logits(first, T)                                head(norm(x[first:]))

Of several sequences (``BuildRequest.sequences``), ``select_sequence`` chooses a chunk's. A step
computes T tokens (``BuildRequest.step_tokens``), one of each of them or several that follow each
other in one. It begins with ``begin_step`` instead of ``embed``. Calls for T = 1 above are about
one of its tokens then, which ``select_token`` names, at first token 0. Every token is computed as
in a step of its own; weights are read once for all if that is quicker.

A program computes everything but neurons: instructions from one layer's neurons to the next layer's
mixers are one call."""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np

from pi2.arrays import F32, I32, I64, U8, Bits
from pi2.backends.arithmetic import list_chosen
from pi2.backends.blocks.instructions import FindWeight, Planes
from pi2.backends.blocks.interpreter import CompiledInterpreter, Interpret
from pi2.backends.blocks.model import BlockModel
from pi2.backends.blocks.operands import Area
from pi2.backends.blocks.outside import Exchange, Stations
from pi2.backends.blocks.routed import view_floats
from pi2.backends.cpu.arrays import keep_areas
from pi2.backends.cpu.request import count_tokens, describe_extent
from pi2.backends.cpu.weights import StoreWeights, describe_stored
from pi2.backends.protocol import BuildRequest

Method = TypeVar("Method", bound=Callable[..., Any])
_NONE: I32 = np.zeros(0, np.int32)


class ExecutorObserver:
    """Is told by the executor that it observes, in the thread that drives it; does nothing
    itself."""

    def note_kernel(self, name: str, layer: int | None, start_s: float, end_s: float) -> None:
        """A compiled function of the executor has run, from when to when
        (`time.perf_counter`), for ``layer`` if it belongs to one.  An executor that has none tells
        of its methods instead."""

    def select_chunk(self, number: int) -> None:
        """What follows is about chunk ``number`` of a prompt."""

    def begin_ffn(self, layer: int) -> None:
        """The FFN of ``layer`` has its input."""

    def add_dense(self, layer: int, bundles: U8, first: int) -> None:
        """The neurons of ``bundles`` [n, stride] are added for all tokens; ``first`` is the stored
        index of the first."""

    def end_ffn(self, layer: int) -> None:
        """All neurons of ``layer`` have been added."""


def noted(method: Method) -> Method:
    """Let the executor's observer be told of every call of ``method``, whose first argument is a
    layer; noted methods do not call one another."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        observer: ExecutorObserver | None = self._observer
        if observer is None:
            return method(self, *arguments, **keywords)
        start_s = time.perf_counter()
        try:
            return method(self, *arguments, **keywords)
        finally:
            observer.note_kernel(name, arguments[0], start_s, time.perf_counter())

    return cast(Method, call)


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


class Executor(ABC):
    """A model built for a unit; what derives from it computes neurons.  One calling thread.

    Arrays are valid until the next call."""

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
            interpret=interpret or partial(CompiledInterpreter, request),
        )
        assert program.exchange is not None
        self.exchange: Exchange = program.exchange
        self._stations: list[Stations] = self.exchange.layers
        self._starts = [program.looked_up, *(own.end for own in self._stations)]
        """By layer, the first instruction after the one before; then the head's."""
        begun = zip(self._starts, (own.begun for own in self._stations), strict=False)
        self._begun = {**dict(begun), 0: self._stations[0].begun}
        """By the first instruction of each layer, the one after its input has been kept."""
        kept = program.layers.list_kept()
        self._shared = [view_floats(area.address, tokens, area.stride) for area in kept]
        """Areas that every chunk has its own content of."""
        self._places = [_Place(tokens=np.zeros(0, np.int32)) for _ in range(request.chunks)]
        for place, arrays in zip(
            self._places, keep_areas(program.memory, kept, request), strict=False
        ):
            place.kept = arrays
        self.kept_reads: list[F32] = []
        """Of each of several chunks, what its neurons read, if it is kept."""
        if program.layers.keeps_read:
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
        self.taken: list[tuple[int, int, int]] = []
        """Matrices of which other units compute the first rows: instruction, first and end of its
        own rows."""

    def view(self, area: Area, width: int) -> F32:
        """Return an area [tokens, width]; vectors of this width have no gaps between them."""
        found: F32 = view_floats(area.address, self._tokens, area.stride)[:, :width]
        return found

    def select_sequence(self, number: int) -> None:
        """Let ``embed`` and ``attend`` be about sequence ``number``, to begin with 0."""
        self._sequence = number

    def select_chunk(self, number: int) -> None:
        """Let the calls that follow be about chunk ``number``, of ``BuildRequest.chunks``, of a
        prompt. Each has its own x, and its own input and sum of the FFN; only the KV cache is
        common. Chunk 0 is selected at first."""
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
        """Set x [T, hidden] to the embeddings of ``tokens`` [T], the rows of which may be gone
        later; `attend` says where they stand."""
        now, self.is_step = self._place, False
        now.tokens, now.sequence, self.tokens = tokens, self._sequence, len(tokens)
        self.program.begin_piece(tokens)
        if self.look_up is not None:
            self.look_up(tokens)
        self._begin_call()

    def begin_step(self, tokens: I32, sequences: Sequence[int], positions: Sequence[int]) -> None:
        """Set x [T, hidden] of chunk 0 to the embeddings of ``tokens`` [T], the next ones of
        ``sequences``, at ``positions``; select token 0. Tokens of the same sequence come in the
        order of their positions, and each sees the earlier ones."""
        self.select_chunk(0)
        self.is_step, self.tokens = True, len(tokens)
        self.program.begin_step(tokens, sequences, positions)
        self._begin_call()

    def place(self, layer: int, position: int) -> None:
        """Give the position of a chunk's first token to ``layer``, if it is the first."""
        if layer == 0 and not self.is_step:
            self._place.position, self._place.sequence = position, self._sequence
            self.program.place(self._sequence, position)

    def catch_up(self) -> None:
        """Run instructions that were put off."""
        now = self._place
        if now.at < now.target:
            self.program.run(now.at, now.target)
            now.at = now.target

    def attend(self, layer: int, position: int) -> None:
        """Finish the previous layer, and add the mixers of ``layer``; token t of a chunk stands at
        ``position + t``, a step knows its positions."""
        self.place(layer, position)
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

    def read_head_input(self, first: int) -> F32:
        """Return what the head reads of the tokens from ``first`` on [n, hidden], of as many as
        ``logits`` gives; valid until the next call."""
        self.go_to(self.program.head)
        return self.program.read_head_input(first, self._model.shape.stored_hidden)

    def logits(self, first: int) -> F32:
        """Return logits [n, vocab] of the chunk's tokens from ``first`` on, n at most
        `pi2.plan.arithmetic.sizes.LOGIT_ROWS`; valid until the next call."""
        self.go_to(self.program.head)
        return self.program.logits(first)

    def close(self) -> None:
        self.program.close()

    def select_token(self, number: int) -> None:
        """Let calls for one token be about another one of a step. Predictions are requested in
        order: token 0's may be made for all."""
        self._token = number

    def _begin_call(self) -> None:
        now = self._place
        now.at = now.target = self.program.looked_up
        self.program.run(0, now.at)
        if self._token:
            self.select_token(0)
        for own in self.taken:
            self.program.take_rows(*own)

    def join(self, given: F32) -> None:
        """Join x, the embeddings of the tokens, with ``given`` [T, hidden], what the head of an MTP
        head's main model reads."""
        self.program.join(given[:, : self._model.shape.hidden])

    def list_experts(self) -> I32:
        """Return the experts, ascending, that the router chose in the last ``begin_ffn`` for the
        selected token; none if the model is no MoE model."""
        return _NONE if self._model.moe is None else list_chosen(self.read_routes()[self._token])

    def list_chunk_experts(self) -> I32:
        """Return the experts, ascending, that the router chose for any of the T tokens."""
        if self._model.moe is None:
            return _NONE
        return np.flatnonzero(self.read_routes().any(axis=0)).astype(np.int32)

    @abstractmethod
    def begin_ffn(self, layer: int) -> None:
        """Compute what the neurons of ``layer`` read, and clear their sum."""

    @abstractmethod
    def read_routes(self) -> F32:
        """Return the weights [T, experts] that the router gave in the last ``begin_ffn``, 0 to
        experts that do not compute a token; valid until the next call."""

    @abstractmethod
    def read_cutoffs(self) -> F32 | None:
        """Return the cutoffs [T, 1] of the gates in the last ``begin_ffn``, valid until the next
        call; None if the layer has none."""

    @abstractmethod
    def predict_low_rank(self, layer: int, threshold: float, experts: I32 | None = None) -> I32:
        """Return the stored indices, ascending, whose predictor score is >= ``threshold`` (T = 1).

        MoE: only neurons of ``experts``, by default of the chosen ones.  The array is valid until
        the next call."""

    @abstractmethod
    def read_scores(self) -> F32:
        """Return the scores [neurons] of the last ``predict_low_rank``, in an MoE model only of the
        neurons that it named; valid until the next prediction."""

    @property
    def foresees(self) -> bool:
        """Whether one call predicts a layer's neurons before the layer's own input is known and
        begins the present layer's FFN, for this model."""
        return False

    def foresee(self, following: int, layer: int, threshold: float) -> None:
        """Predict for every token as ``begin_ffn(following)`` and ``predict_low_rank(following,
        threshold)`` would, then ``begin_ffn(layer)``: with the same bits."""
        raise NotImplementedError

    def list_foreseen(self) -> I32:
        """Return what the last ``foresee`` has predicted for the selected token: stored indices,
        ascending.  They and what ``read_scores`` gives of them are valid until the next
        prediction."""
        raise NotImplementedError

    @abstractmethod
    def predict_gate(self, layer: int) -> I32:
        """Return the stored indices, ascending, whose gate is above the activation's threshold
        (T = 1); of a smooth activation, the ones that reach the first limit of the layer or of
        their expert.

        In an MoE model, of the chosen experts. The array is valid until the next call."""

    @abstractmethod
    def find_open(self, layer: int, arena: U8, slots: I32, indices: I32 | None = None) -> Bits:
        """Return whether the gate of each of the neurons in ``slots`` [n] of ``arena`` [slots,
        stride] is open (T = 1): no other has an effect.  Nothing but gates is read.  For neurons
        without biases that have gates, of an activation that is not smooth.  ``indices`` [n], their
        stored indices, are needed if scales are resident."""

    @abstractmethod
    def add_neurons(
        self, layer: int, arena: U8, slots: I32, indices: I32 | None = None, known: bool = False
    ) -> None:
        """Add the neurons in ``slots`` [n] of ``arena`` [slots, stride] (T = 1).

        ``indices`` [n], their stored indices, are needed if scales are resident or gates are
        ``known``: the last ``predict_gate`` was of this layer and input and has found all of them
        open. Neurons below the layer's second limit are left out then."""

    def add_named_neurons(
        self, layer: int, arena: U8, slots: I32, indices: I32, named: I64, known: bool = False
    ) -> None:
        """Add the neurons in ``slots`` [n] of ``arena`` [slots, stride], with the stored indices
        ``indices`` [n], to the tokens of a step that have ``named`` [n] them. Bit t is token t's,
        at least one is set. Gates may be ``known``, as in `add_neurons`. Token 0 is selected
        afterwards."""
        # Tokens of a step are 64 at most: a number has a bit for each.
        any_token = int(np.bitwise_or.reduce(named)) % 2**64
        for token in range(any_token.bit_length()):
            if any_token >> token & 1:
                own = (named >> token & 1).astype(np.bool_)
                self.select_token(token)
                self.add_neurons(layer, arena, slots.compress(own), indices.compress(own), known)
        self.select_token(0)

    @abstractmethod
    def add_dense(self, layer: int, bundles: U8, first: int = 0) -> None:
        """Add the neurons of ``bundles`` [n, stride], contiguous, for all T tokens; ``first`` is
        the stored index of the first."""

    @abstractmethod
    def share_input(self) -> tuple[F32, F32 | None]:
        """Return the input of the neurons since the last ``begin_ffn``, in main memory: u [T,
        hidden], or its projection for experts of another width [T, width]. An MoE model also gives
        the weights [T, experts] of its experts, others None. Valid until ``end_ffn``."""

    @abstractmethod
    def add_sum(self, values: F32) -> None:
        """Add ``values`` [T, hidden], or as wide as what neurons read, which another unit has
        computed, to the FFN's sum."""

    @abstractmethod
    def end_ffn(self, layer: int) -> None:
        """Add the FFN's sum to x."""

    @abstractmethod
    def count_active(self) -> int:
        """Return the neurons with a non-zero activation in ``add_neurons`` since the last call."""

    def observe(self, observer: ExecutorObserver | None) -> None:
        """Tell ``observer`` of every kernel and of the neurons of prompts."""
        assert self._observer is None or observer is None, "one observer at a time"
        self._observer = observer
        self.program.observe(None if observer is None else observer.note_kernel)
