"""What a backend is: a folder of this one whose module ``backend`` has the members of `Backend` and
those of `ExecutorBackend`, `WholeBackend`, `TextBackend` and `UnitBackend`, of one or more.

A backend serves compute units.  Its module imports nothing heavy: `pi2 validate` asks it what it
can compute and how much memory that takes.  ``build`` turns a `BuildRequest` (plain numbers and
arrays: a backend knows nothing of files, caches or plans' texts) into an `Executor`, which holds
the keys and values of some sequences and computes a chunk of tokens of one of them, or a token each
of several, layer by layer.

Order of calls for a chunk of T tokens at ``position``::

    embed(tokens)                                   x = embedding[tokens]; where layers have
                                                    embeddings of their own, rows 0 .. T - 1 of
                                                    that tensor are these tokens'
    for each layer:
        attend(layer, position)                     x += attention(norm(x)), keys and values kept
        begin_ffn(layer)                            u = norm(x), y = 0
        list_experts (T = 1)                        -> experts that the router chose, in a mixture
        list_chunk_experts                          -> those that it chose for any of the tokens
        predict_low_rank / predict_gate (T = 1)     -> stored indices of neurons that may fire
        find_open, any number (T = 1)               -> of some neurons, those whose gates are open
        share_input                                 -> u, for units beside the executor
        add_neurons / add_dense, any number         y += neurons(u)
        add_sum, any number                         y += what other units have computed
        end_ffn(layer)                              x += y
    logits(first, T)                                head(norm(x[first:]))

Of several sequences (``BuildRequest.sequences``), ``select_sequence`` says whose a chunk is.  A
step that computes T tokens (``BuildRequest.step_tokens``), one of each of them or several that
follow each other in one, begins with ``begin_step`` instead of ``embed`` and has
``attend_step`` instead of ``attend``.  What stands for T = 1 above is about one of its tokens then:
the one that ``select_token`` names, at first token 0.  Every token is computed as it would be
alone; weights are read once for all where that is quicker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from pi2.backends.observer import ExecutorObserver
from pi2.plan.arithmetic.units import GraphFacts, UnitFacts
from pi2.plan.documents.device import Unit, UnitKind
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan_memory import KvType
from pi2.plan.documents.plan_running import ActivationType
from pi2.plan.weights.gates import GateRecord
from pi2.plan.weights.layout import BundleLayout, Precision, TwinPrecision

if TYPE_CHECKING:
    from pathlib import Path

    from pi2.arrays import F32, I32, I64, U8, Bits, Raw, Scales
    from pi2.backends.dense_unit import DenseUnit, UnitRequest
    from pi2.backends.text_model import TextModel, TextRequest
    from pi2.backends.whole_model import WholeModel, WholeRequest
    from pi2.plan.arithmetic.needs import Need
    from pi2.plan.arithmetic.resolved import ResolvedPlan
    from pi2.plan.arithmetic.rows import DividedRows
    from pi2.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor of the store, in memory, not copied.

    Quantised (`pi2.plan.weights.layout`): ``weights`` uint8 [rows, weight_bytes], ``scales``
    float16 [rows, length / 32], of ternary float32 [rows, 1].  fp16: ``weights`` uint8
    [rows, 2 length], no scales.  ``precision`` None is float32: ``weights`` float32 [rows, length].
    64-byte aligned.
    """

    name: str
    rows: int
    length: int
    precision: Precision | None
    weights: Raw
    scales: Scales | None = None

    def take_rows(self, first: int, end: int | None = None) -> Tensor:
        """Return the rows from ``first`` to ``end``, by default the last, not copied."""
        rows = slice(first, self.rows if end is None else end)
        count = rows.stop - rows.start
        weights = self.weights.reshape(self.rows, -1)[rows]
        scales = None if self.scales is None else self.scales.reshape(self.rows, -1)[rows]
        return replace(self, rows=count, weights=weights, scales=scales)


@dataclass(frozen=True, slots=True, kw_only=True)
class Twins:
    """Copies of neurons in fewer bits (`pi2.plan.weights.layout`), in memory."""

    precision: TwinPrecision
    bundles: Sequence[U8]
    """Per layer [n, stride], in stored order, the last one that of the layer's last neuron."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gates:
    """Room for the gates of a mixture's experts, which come and go while the model runs."""

    record: GateRecord
    """How the gates of an expert lie."""
    arena: U8
    """[slots, ``record.stride``]: a record in each slot, 64-byte aligned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """Everything that a backend needs to run a model."""

    model: Model
    tensors: Mapping[str, Tensor]
    """Dense tensors by the names of `pi2.plan.weights.tensor_names`."""
    bundle: BundleLayout
    neurons: int
    """FFN neurons per layer."""
    chunk: int
    """Most tokens in a call of ``embed``."""
    chunks: int = 1
    """Chunks of a prompt that go through a layer before the next layer begins."""
    sequences: int = 1
    """Sequences whose keys and values are kept."""
    step_tokens: int = 1
    """Most tokens of a step: at least one of each sequence, and more where several of one sequence
    are verified together."""
    context: int
    """Tokens of a sequence that the KV cache holds."""
    kv_type: KvType = "fp16"
    """What its elements are: ``int8`` has a scale for every head's vector of a token."""
    token_type: ActivationType = "int16"
    """What the inputs of projections are rounded to where one token goes through a layer, by
    backends that round them: integers with a scale for 32 of them, or not at all (fp32)."""
    chunk_type: ActivationType = "int16"
    """What they are rounded to where several tokens go through a layer together."""
    step_type: Literal["int8"] | None = None
    """What they are rounded to where several tokens of a step share weights; None as of one."""
    looks_ahead: bool = False
    """Whether layers' neurons are predicted before their own input is known (`Foreseer`)."""
    passes: Literal[1, 2] | None = None
    """Passes of ``add_neurons`` over its neurons: one for everything, or gates first; None leaves
    it to the backend."""
    gate_rows: Mapping[int, tuple[U8, Scales | None]] | None
    """By layer, gate weights [neurons, weight_bytes] and scales [neurons, hidden / 32] in stored
    order, in a mixture expert by expert, resident; of the layers that ``predict_gate`` will be
    asked about."""
    gates: Gates | None = None
    """What ``predict_gate`` finds the gates of a mixture's experts in, instead of ``gate_rows``."""
    scales: Sequence[U8] | None = None
    """Per layer, the scales of its neurons [neurons, ``bundle.scales_stride``] in stored order,
    resident; None where they lie in the bundles."""
    twins: Twins | None = None
    """Copies of the neurons that may be missing; None where nothing is computed with such."""
    gate_biases: Sequence[F32] | None = None
    """Per layer, what to add to the gates [neurons], where they have biases.  Where neurons have
    no gate, their up rows stand for gates."""
    limits: Sequence[tuple[float, float]] | None = None
    """Per layer of a model with a smooth activation, what counts as zero in ``predict_gate``:
    act(gate) smaller than the first, act(gate) * up smaller than the second; None stands for 0."""
    expert_limits: Sequence[Sequence[float]] | None = None
    """Per layer of a mixture, the first limit of each expert [experts], instead of the layer's."""
    expert_neurons: Sequence[I32] | None = None
    """Per layer of a mixture, the stored indices [neurons] of its neurons, expert by expert,
    ascending within each: of the rows of predictors and gates; needed to name neurons only."""
    rows: DividedRows | None = None
    """First rows of projections and of the head that another unit computes; the executor is a
    `RowDivider` then, and multiplies with the others."""
    threads: int
    """Compute threads."""
    features: frozenset[str]
    """CPU features that kernels may use."""
    architecture: str
    """``x86-64`` or ``aarch64``."""
    cores: tuple[int, ...] = ()
    """Cores to bind compute threads to, one each; empty lets the system move them."""
    allocate: Callable[[str, int], U8]
    """``allocate(segment, size)`` gives zeroed bytes, 64-byte aligned, counted in the segment."""
    progress: Progress
    """Called with a label and the share done while something takes its time."""

    @property
    def whole_bundle(self) -> BundleLayout:
        """A neuron with its scales in it, wherever they lie."""
        return self.bundle if self.scales is None else self.bundle.inline


class Executor(Protocol):
    """A model built for a unit.  One calling thread."""

    def select_chunk(self, number: int) -> None:
        """Let the calls that follow be about chunk ``number`` of a prompt, of those that
        ``BuildRequest.chunks`` keeps: each has its x, and what its FFN reads and adds up.  Only
        keys and values are common.  Chunk 0 is selected to begin with."""

    def select_sequence(self, number: int) -> None:
        """Let ``embed`` and ``attend`` be about sequence ``number``, to begin with 0."""

    # For steps of more than one token only:

    def begin_step(self, tokens: I32, sequences: Sequence[int], positions: Sequence[int]) -> None:
        """Set x [T, hidden] of chunk 0 to the embeddings of ``tokens`` [T], the next ones of
        ``sequences``, where they stand at ``positions``; select token 0.  Tokens of the same
        sequence come in the order of their positions, and each sees those before it."""

    def attend_step(self, layer: int) -> None:
        """Add the attention block of ``layer`` in a step."""

    def select_token(self, number: int) -> None:
        """Let calls for one token be about token ``number`` of a step.  Predictions are asked for
        in order: that of token 0 may be made for all."""

    # For all:

    def embed(self, tokens: I32) -> None:
        """Set x [T, hidden] to the embeddings of ``tokens`` [T]."""

    def attend(self, layer: int, position: int) -> None:
        """Add the attention block of ``layer``; token t stands at ``position + t``."""

    def begin_ffn(self, layer: int) -> None:
        """Normalise x for the FFN of ``layer`` and clear its sum."""

    def list_experts(self) -> I32:
        """Experts, ascending, that the router chose in the last ``begin_ffn`` (T = 1); none where
        the model is no mixture."""

    def list_chunk_experts(self) -> I32:
        """Experts, ascending, that the router chose in the last ``begin_ffn`` for any of the T
        tokens; none where the model is no mixture."""

    def predict_low_rank(self, layer: int, threshold: float, experts: I32 | None = None) -> I32:
        """Stored indices, ascending, whose predictor score is >= ``threshold`` (T = 1).

        In a mixture, those of ``experts`` alone, by default of the chosen ones.  The array is valid
        until the next call.
        """

    def read_scores(self) -> F32:
        """Scores [neurons] of the last ``predict_low_rank``, in a mixture of those that it named
        alone; valid until the next prediction."""

    def predict_gate(self, layer: int, experts: I32 | None = None, slots: I32 | None = None) -> I32:
        """Stored indices, ascending, whose gate is above the activation's threshold (T = 1); of a
        smooth activation, those that reach the first limit of the layer or of their expert.

        In a mixture, of the chosen experts; or, with ``BuildRequest.gates``, of ``experts`` [n],
        ascending, whose records are in ``slots`` [n].  The array is valid until the next call.
        """

    def find_open(self, layer: int, arena: U8, slots: I32, indices: I32 | None = None) -> Bits:
        """Whether the gate of each of the neurons in ``slots`` [n] of ``arena`` [slots, stride] is
        open (T = 1): no other has an effect.  Nothing but gates is read.  For neurons without
        biases that have gates, of an activation that is not smooth.  ``indices`` [n], their stored
        indices, are needed where scales are resident."""

    def add_neurons(
        self,
        layer: int,
        arena: U8,
        slots: I32,
        indices: I32 | None = None,
        known: bool = False,
        stretch: int = 1,
    ) -> None:
        """Add the neurons in ``slots`` [n] of ``arena`` [slots, stride] (T = 1).

        ``indices`` [n], their stored indices, are needed where scales are resident or gates are
        ``known``: the last ``predict_gate`` was of this layer and input and has found all of them
        open.  Neurons below the layer's second limit are left out then.  With a ``stretch``,
        ``slots`` and ``indices`` are numbers of stretches of so many neurons
        (`pi2.backends.stretches`); the result has the same bits as that of the single neurons.
        """

    def add_twins(self, layer: int, indices: I32) -> None:
        """Add the twins of the neurons with the stored ``indices`` [n] (T = 1), which have some
        (``BuildRequest.twins``)."""

    def add_named_neurons(
        self,
        layer: int,
        arena: U8,
        slots: I32,
        indices: I32,
        named: I64,
        known: bool = False,
        stretch: int = 1,
    ) -> None:
        """Add the neurons in ``slots`` [n] of ``arena`` [slots, stride], whose stored indices are
        ``indices`` [n], to those tokens of a step that have ``named`` [n] them: bit t of token t,
        at least one each; gates may be ``known``, and ``slots``, ``indices`` and ``named`` be about
        stretches, as `add_neurons` says.  Token 0 is selected afterwards."""

    def add_dense(self, layer: int, bundles: U8, first: int = 0) -> None:
        """Add the neurons of ``bundles`` [n, stride], contiguous, for all T tokens; ``first`` is
        the stored index of the first."""

    def share_input(self) -> tuple[F32, F32 | None]:
        """What neurons read since the last ``begin_ffn``, in main memory: u [T, hidden], or what
        is made of it for experts of another width [T, width], and in a mixture the weights
        [T, experts] of its experts, else None; valid until ``end_ffn``."""

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
        """Tell ``observer`` of what is done from now on; None ends it.  One at a time."""

    def close(self) -> None:
        """Give back threads and memory."""


@runtime_checkable
class InputReader(Protocol):
    """An executor that shows what its FFNs read, and how it has routed, for statistics; a backend
    need not have it."""

    def read_ffn_input(self) -> F32:
        """u [T, hidden] of the last ``begin_ffn``, which routers read; valid until the next
        call."""

    def read_router_input(self) -> F32:
        """What a mixture's router read there [T, hidden], which may be something else
        (``moe.router_input``); valid until the next call."""

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
class RowDivider(Protocol):
    """An executor that leaves rows of its projections and of its head to another unit; a backend
    need not have it.  ``attend``, or ``attend_step`` in a step, is divided into::

        begin_attention(layer, position)    -> u [T, hidden], what the projection reads
        project(layer)                      its own rows, while the other unit computes the first
        put_projected(layer, values)        the first rows [T, n]
        mix(layer, position)                -> what attention has mixed [T, heads x head_dim]
        project_output(layer), put_output(layer, values)

    and ``logits(first)`` comes between ``read_head_input(first)`` and ``put_logits(values)``.
    Positions are those of ``begin_step`` in a step.  Arrays are valid until the next call.
    """

    def begin_attention(self, layer: int, position: int) -> F32:
        """Normalise x for the attention of ``layer``, as the other unit reads it."""

    def project(self, layer: int) -> None:
        """Multiply with its own rows of the projection to queries, keys and values."""

    def put_projected(self, layer: int, values: F32) -> None:
        """Take the products [T, n] with the first rows, biases not added."""

    def mix(self, layer: int, position: int) -> F32:
        """Keep keys and values; return what every query has mixed."""

    def project_output(self, layer: int) -> None:
        """Add the products of what was mixed with its own rows to x."""

    def put_output(self, layer: int, values: F32) -> None:
        """Add the products [T, n] with the first rows to x."""

    def read_head_input(self, first: int) -> F32:
        """What the head reads of the tokens from ``first`` on [n, hidden], of as many as
        ``logits`` gives."""

    def put_logits(self, values: F32) -> F32:
        """Complete the logits [n, vocab] of the last call with the products [n, m] with the first
        rows; return them."""


@runtime_checkable
class LengthAware(Protocol):
    """An executor that computes long sequences otherwise; a backend need not have it."""

    def expect(self, end: int) -> None:
        """Tell that the calls that follow bring the sequence to ``end`` tokens."""


CONTEXT_BLOCK = 16
"""Keys and values are copied for so many tokens at once."""


@runtime_checkable
class ContextKeeper(Protocol):
    """An executor that copies keys and values; a backend need not have it."""

    def read_context(self, sequence: int, first: int, end: int) -> U8:
        """A copy [n] of the keys and values of a sequence's tokens from ``first`` to ``end``,
        multiples of ``CONTEXT_BLOCK``, in an order of the executor's own."""

    def put_context(self, sequence: int, first: int, end: int, kept: U8) -> None:
        """Put back what `read_context` gave for these tokens, of this sequence or another one."""


@runtime_checkable
class StateKeeper(Protocol):
    """An executor that copies the states of layers that have one instead of keys and values.

    Keys and values of a position stay as they are when later ones come; a state is that after the
    last token, and nothing else.  Whoever wants to go on from an earlier token keeps a copy.  A
    sequence that begins at position 0 begins with an empty state, whatever was there.
    """

    def read_state(self, sequence: int) -> F32:
        """A copy [n] of all states of a sequence, in an order of the executor's own; empty for a
        model without such layers."""

    def put_state(self, sequence: int, state: F32) -> None:
        """Put back what `read_state` gave, of this sequence or of another one."""


class Backend(Protocol):
    """Members of every backend's module ``backend``."""

    COMPUTES: bool
    """Whether it computes anything; one that does not runs plans dry, without a store."""
    NATIVE: bool
    """Whether it needs the processor that the device describes."""
    KINDS: tuple[UnitKind, ...]
    """Kinds of units that plans give to it unless somebody says otherwise; none for backends that
    stand in for others."""
    ONLY_EMULATED: bool
    """Whether its devices have been emulated so far, wherever it ran."""

    def find_obstacles(self, features: frozenset[str], architecture: str) -> list[str]:
        """What keeps this backend from running here; empty if nothing does."""

    def find_limits(self, facts: UnitFacts) -> list[str]:
        """What it cannot compute of a plan, each as the end of a sentence that begins with its
        name, such as ``computes no mixtures``; empty if nothing."""


class ExecutorBackend(Backend, Protocol):
    """Members of a backend's module that computes whole models."""

    def need_workspace(self, resolved: ResolvedPlan) -> Need:
        """Bytes that its executor needs in the segment ``workspace``, staging buffers of the engine
        not included."""

    def count_chunk_bytes(self, resolved: ResolvedPlan) -> int:
        """Bytes in ``workspace`` of every chunk of a prompt beyond the first that goes through a
        layer before the next layer begins."""

    def build(self, request: BuildRequest) -> Executor:
        """Compile or load kernels and make the executor."""


class WholeBackend(Backend, Protocol):
    """Members of a backend's module whose units have whole models in their own memory."""

    def find_unit_obstacles(self, unit: Unit) -> list[str]:
        """What keeps a unit of the device from being used here; empty if nothing does."""

    def need_unit_memory(self, facts: UnitFacts) -> Need:
        """Bytes that a unit needs for what the plan gives it."""

    def build_whole(self, request: WholeRequest) -> WholeModel:
        """Compile or load kernels and make room for the model."""


class TextBackend(Backend, Protocol):
    """Members of a backend's module that drives a program which has a model as a whole and gives
    text, not logits."""

    WEIGHTS: str
    """The file by which its folders of weights are known; the plan's ``store`` is one."""

    def find_unit_obstacles(self, unit: Unit) -> list[str]:
        """What keeps the program from being started here; empty if nothing does."""

    def need_unit_memory(self, facts: UnitFacts) -> Need:
        """Bytes of the plan's budgets that it needs."""

    def check_weights(self, folder: Path, model: Model) -> None:
        """UserError unless the folder has weights of the model, as far as one can see."""

    def open_text(self, request: TextRequest) -> TextModel:
        """Start the program with its weights."""


class GraphBackend(Protocol):
    """A unit's backend whose programs have fixed shapes; a backend need not be one."""

    def list_graphs(self, facts: UnitFacts) -> tuple[GraphFacts, ...]:
        """Return the graphs of neurons that a unit of the plan has."""

    def list_graph_tokens(self, facts: UnitFacts) -> tuple[int, ...]:
        """Return the numbers of tokens that its graphs have, ascending."""


class UnitBackend(Backend, Protocol):
    """Members of a backend's module that serves units beside an executor."""

    def find_unit_obstacles(self, unit: Unit) -> list[str]:
        """What keeps a unit of the device from being used here, such as a driver that is missing;
        empty if nothing does.  May take a second."""

    def need_unit_memory(self, facts: UnitFacts) -> Need:
        """Bytes that a unit needs for what the plan gives it."""

    def build_unit(self, request: UnitRequest) -> DenseUnit:
        """Compile or load kernels and make the unit."""


def add_one_by_one(
    executor: Executor,
    layer: int,
    arena: U8,
    slots: I32,
    indices: I32,
    named: I64,
    known: bool,
    stretch: int = 1,
) -> None:
    """Do what `Executor.add_named_neurons` does, one token after the other."""
    # Whoever asks what a backend can do needs no numpy.
    import numpy as np

    # Tokens of a step are 64 at most: a number has a bit for each.
    any_token = int(np.bitwise_or.reduce(named)) % 2**64
    for token in range(any_token.bit_length()):
        if any_token >> token & 1:
            own = (named >> token & 1).astype(np.bool_)
            executor.select_token(token)
            mine = slots.compress(own)
            executor.add_neurons(layer, arena, mine, indices.compress(own), known, stretch)
    executor.select_token(0)
