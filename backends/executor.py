"""The protocol of executors: a model built for a unit, with the KV cache of some sequences. It
computes a chunk of tokens of one sequence, or a token each of several, layer by layer.

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
other in one. It begins with ``begin_step`` instead of ``embed`` and has ``attend_step`` instead of
``attend``. Calls for T = 1 above are about one of its tokens then, which ``select_token`` names, at
first token 0. Every token is computed as in a step of its own; weights are read once for all if
that is quicker."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast, runtime_checkable

if TYPE_CHECKING:
    from pi2.arrays import F32, I32, I64, U8, Bits


Method = TypeVar("Method", bound=Callable[..., Any])
_WITHOUT_LAYER = frozenset({"embed", "logits"})


class ExecutorObserver:
    """Is told by the executor that it observes, in the thread that drives it; does nothing itself.

    `pi2.backends.protocol.InputReader` shows an observer what an FFN reads meanwhile."""

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
    """Let the executor's observer be told of every call of ``method``, whose first argument may be
    a layer; noted methods do not call one another."""
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
            has_layer = name not in _WITHOUT_LAYER
            layer = arguments[0] if has_layer else None
            observer.note_kernel(name, layer, start_s, time.perf_counter())

    return cast(Method, call)


class Executor(Protocol):
    """A model built for a unit.  One calling thread."""

    def select_chunk(self, number: int) -> None:
        """Select chunk ``number`` of a prompt, of ``BuildRequest.chunks``, for the following calls.
        Each chunk has its own x, and its own input and sum of the FFN; only the KV cache is common.
        Chunk 0 is selected at first."""

    def select_sequence(self, number: int) -> None:
        """Let ``embed`` and ``attend`` be about sequence ``number``, to begin with 0."""

    # For steps of more than one token only:

    def begin_step(self, tokens: I32, sequences: Sequence[int], positions: Sequence[int]) -> None:
        """Set x [T, hidden] of chunk 0 to the embeddings of ``tokens`` [T], the next ones of
        ``sequences``, at ``positions``; select token 0. Tokens of the same sequence come in the
        order of their positions, and each sees the earlier ones."""

    def attend_step(self, layer: int) -> None:
        """Add the attention block of ``layer`` in a step."""

    def select_token(self, number: int) -> None:
        """Select token ``number`` of a step for calls about one token. Predictions are requested in
        order: token 0's may be made for all."""

    # For all:

    def embed(self, tokens: I32) -> None:
        """Set x [T, hidden] to the embeddings of ``tokens`` [T]."""

    def attend(self, layer: int, position: int) -> None:
        """Add the attention block of ``layer``; token t stands at ``position + t``."""

    def begin_ffn(self, layer: int) -> None:
        """Normalise x for the FFN of ``layer`` and clear its sum."""

    def list_experts(self) -> I32:
        """Experts, ascending, that the router chose in the last ``begin_ffn`` (T = 1); none where
        the model is no MoE model."""

    def list_chunk_experts(self) -> I32:
        """Experts, ascending, that the router chose in the last ``begin_ffn`` for any of the T
        tokens; none where the model is no MoE model."""

    def predict_low_rank(self, layer: int, threshold: float, experts: I32 | None = None) -> I32:
        """Stored indices, ascending, whose predictor score is >= ``threshold`` (T = 1).

        MoE: only neurons of ``experts``, by default of the chosen ones.  The array is valid until
        the next call."""

    def read_scores(self) -> F32:
        """Scores [neurons] of the last ``predict_low_rank``, in an MoE model only of the neurons
        that it named; valid until the next prediction."""

    def predict_gate(self, layer: int) -> I32:
        """Stored indices, ascending, whose gate is above the activation's threshold (T = 1); of a
        smooth activation, the ones that reach the first limit of the layer or of their expert.

        In an MoE model, of the chosen experts. The array is valid until the next call."""

    def find_open(self, layer: int, arena: U8, slots: I32, indices: I32 | None = None) -> Bits:
        """Whether the gate of each of the neurons in ``slots`` [n] of ``arena`` [slots, stride] is
        open (T = 1): no other has an effect.  Nothing but gates is read.  For neurons without
        biases that have gates, of an activation that is not smooth.  ``indices`` [n], their stored
        indices, are needed where scales are resident."""

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

    def add_dense(self, layer: int, bundles: U8, first: int = 0) -> None:
        """Add the neurons of ``bundles`` [n, stride], contiguous, for all T tokens; ``first`` is
        the stored index of the first."""

    def share_input(self) -> tuple[F32, F32 | None]:
        """Input of the neurons since the last ``begin_ffn``, in main memory: u [T, hidden], or its
        projection for experts of another width [T, width]. An MoE model also gives the weights [T,
        experts] of its experts, others None. Valid until ``end_ffn``."""

    def add_sum(self, values: F32) -> None:
        """Add ``values`` [T, hidden], or as wide as what neurons read, which another unit has
        computed, to the FFN's sum."""

    def end_ffn(self, layer: int) -> None:
        """Add the FFN's sum to x."""

    def logits(self, first: int) -> F32:
        """Logits [n, vocab] of the chunk's tokens from ``first`` on, n at most
        `pi2.plan.arithmetic.sizes.LOGIT_ROWS`;
        valid until the next call."""

    def count_active(self) -> int:
        """Neurons with a non-zero activation in ``add_neurons`` since the last call."""

    def observe(self, observer: ExecutorObserver | None) -> None:
        """Tell ``observer`` of work from now on; None ends it.  One at a time."""

    def close(self) -> None:
        """Give back threads and memory."""


@runtime_checkable
class InputReader(Protocol):
    """An executor that shows what its FFNs read, and how it has routed, for statistics; a backend
    need not have it."""

    def read_routes(self) -> F32:
        """Weights [T, experts] that the router gave in the last ``begin_ffn``, 0 to experts that do
        not compute a token; valid until the next call."""

    def read_cutoffs(self) -> F32 | None:
        """Cutoffs [T, 1] of the gates in the last ``begin_ffn``, valid until the next call; None
        where the layer has none."""


@runtime_checkable
class Foreseer(Protocol):
    """An executor that predicts a layer's neurons before the layer's own input is known and begins
    the present layer's FFN, in one call; a backend need not have it."""

    @property
    def foresees(self) -> bool:
        """Whether it does so for the model that it was built for."""

    def foresee(self, following: int, layer: int, threshold: float) -> None:
        """Predict for every token as ``begin_ffn(following)`` and ``predict_low_rank(following,
        threshold)`` would, then ``begin_ffn(layer)``: with the same bits."""

    def list_foreseen(self) -> I32:
        """What the last ``foresee`` has predicted for the selected token: stored indices,
        ascending.  They and what ``read_scores`` gives of them are valid until the next
        prediction."""


@runtime_checkable
class HeadReader(Protocol):
    """An executor, or a unit's whole model, that shows what its head reads."""

    def read_head_input(self, first: int) -> F32:
        """What the head reads of the tokens from ``first`` on [n, hidden], of as many as
        ``logits`` gives; valid until the next call."""


@runtime_checkable
class RowDivider(HeadReader, Protocol):
    """An executor that leaves rows of its projections and of its head to another unit; a backend
    need not have it.  ``attend``, or ``attend_step`` in a step, is divided into::

        begin_attention(layer, position)    -> u [T, hidden], what the projection reads
        project(layer)                      its own rows, while the other unit computes the first
        put_projected(layer, values)        the first rows [T, n]
        mix(layer, position)                -> what attention has mixed [T, heads x head_dim]
        project_output(layer), put_output(layer, values)

    and ``logits(first)`` comes between ``read_head_input(first)`` and ``put_logits(values)``.
    Positions are those of ``begin_step`` in a step.  Arrays are valid until the next call."""

    def begin_attention(self, layer: int, position: int) -> F32:
        """Normalise x for the attention of ``layer``, as the other unit reads it."""

    def project(self, layer: int) -> None:
        """Multiply with its own rows of the QKV projection."""

    def put_projected(self, layer: int, values: F32) -> None:
        """Take the products [T, n] with the first rows, biases not added."""

    def mix(self, layer: int, position: int) -> F32:
        """Append to the KV cache; return the mixed values of every query."""

    def project_output(self, layer: int) -> None:
        """Add the products of the mixer's output with its own rows to x."""

    def put_output(self, layer: int, values: F32) -> None:
        """Add the products [T, n] with the first rows to x."""

    def put_logits(self, values: F32) -> F32:
        """Complete the logits [n, vocab] of the last call with the products [n, m] with the first
        rows; return them."""


@runtime_checkable
class InputJoiner(Protocol):
    """An executor of MTP heads, or the whole model of one; a backend need not have it."""

    def join(self, given: F32) -> None:
        """Join x, the embeddings of the tokens, with ``given`` [T, hidden], what the main model's
        head reads (`HeadReader.read_head_input`): at once, or in the next call."""


@runtime_checkable
class LengthAware(Protocol):
    """An executor that computes long sequences otherwise; a backend need not have it."""

    def expect(self, end: int) -> None:
        """Tell that the calls that follow bring the sequence to ``end`` tokens."""


CONTEXT_BLOCK = 16
"""The KV cache is copied in pieces of so many tokens."""


@runtime_checkable
class ContextKeeper(Protocol):
    """An executor that copies KV caches; a backend need not have it."""

    def read_context(self, sequence: int, first: int, end: int) -> U8:
        """A copy [n] of the KV cache of a sequence's tokens from ``first`` to ``end``, multiples of
        ``CONTEXT_BLOCK``, in an order of the executor's own."""

    def put_context(self, sequence: int, first: int, end: int, kept: U8) -> None:
        """Put back what `read_context` gave for these tokens, of this sequence or another one."""


@dataclass(frozen=True, slots=True)
class Ring:
    """The last positions of a sequence that layers with a window keep."""

    window: int
    positions: int

    @property
    def slack(self) -> int:
        """Tokens by which a sequence may be taken back."""
        return self.positions - self.window


@runtime_checkable
class RingKeeper(Protocol):
    """An executor whose layers with a window keep no whole contexts.

    To go on from an earlier token, all positions of its window must be there.  `ContextKeeper`
    copies places: pieces that are put back in order leave the last positions."""

    @property
    def ring(self) -> Ring | None:
        """None if every layer keeps the whole context."""


@runtime_checkable
class StateKeeper(Protocol):
    """An executor that copies the states of layers that have one instead of a KV cache.

    The KV cache of a position stays as it is when later ones come; a state is that after the last
    token, and nothing else. To go on from an earlier token, keep a copy. A sequence that begins at
    position 0 begins with an empty state."""

    def read_state(self, sequence: int) -> F32:
        """A copy [n] of all states of a sequence, in an order of the executor's own; empty for a
        model without such layers."""

    def put_state(self, sequence: int, state: F32) -> None:
        """Put back what `read_state` gave, of this sequence or of another one."""


def add_one_by_one(
    executor: Executor, layer: int, arena: U8, slots: I32, indices: I32, named: I64, known: bool
) -> None:
    # Whoever asks what a backend can do needs no numpy.
    import numpy as np

    # Tokens of a step are 64 at most: a number has a bit for each.
    any_token = int(np.bitwise_or.reduce(named)) % 2**64
    for token in range(any_token.bit_length()):
        if any_token >> token & 1:
            own = (named >> token & 1).astype(np.bool_)
            executor.select_token(token)
            mine = slots.compress(own)
            executor.add_neurons(layer, arena, mine, indices.compress(own), known)
    executor.select_token(0)
