"""The protocol of backends: a folder of this package whose module ``backend`` has the members of
`Backend`, and the members of one or more of `ExecutorBackend`, `ProgramBackend`, `WholeBackend`,
`TextBackend` and `UnitBackend`.

A backend serves compute units. Its module imports nothing heavy: `pi2 validate` asks it for its
limits and its memory. ``build`` turns a `BuildRequest` (plain numbers and arrays: a backend knows
nothing of files, caches or plans' texts) into an `Executor`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from pi2.plan.arithmetic.units import GraphFacts, UnitFacts, Verdict
from pi2.plan.documents.device import Unit, UnitKind
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import ActivationType, KvType
from pi2.plan.weights.layout import BundleLayout, Tensor
from pi2.progress import Progress, ignore_progress

if TYPE_CHECKING:
    from pathlib import Path

    from pi2.arrays import F32, I32, U8, Scales
    from pi2.backends.blocks.interpreter import Interpreter
    from pi2.backends.executor import Executor
    from pi2.backends.units import DenseUnit, UnitRequest, WholeModel, WholeRequest
    from pi2.plan.arithmetic.resolved import ResolvedPlan
    from pi2.plan.arithmetic.units import Need


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRequest:
    """Processor and threads of a program."""

    architecture: str
    """``x86-64`` or ``aarch64``."""
    features: frozenset[str]
    """CPU features that kernels may use."""
    threads: int
    """Compute threads; the caller's is one of them."""
    cores: tuple[int, ...] = ()
    """Cores to bind compute threads to, one each; empty lets the system move them."""
    progress: Progress = ignore_progress
    """Called with a label and the share done while something takes its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest(ProgramRequest):
    """Everything that a backend needs to run a model."""

    model: Model
    tensors: Mapping[str, Tensor]
    """Dense tensors by the names of `pi2.model.tensors`."""
    bundle: BundleLayout
    neurons: int
    """FFN neurons per layer."""
    chunk: int
    """Most tokens in a call of ``embed``."""
    chunks: int = 1
    """Chunks of a prompt that go through a layer before the next layer begins."""
    sequences: int = 1
    """Sequences that have a KV cache."""
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
    """Precision of activations if several tokens go through a layer together."""
    step_type: Literal["int8"] | None = None
    """Precision of activations if tokens of a step share weights; None: a single token's."""
    looks_ahead: bool = False
    """Whether layers' neurons are predicted before their own input is known."""
    passes: Literal[1, 2] | None = None
    """Passes of ``add_neurons`` over its neurons: one for everything, or gates first; None leaves
    it to the backend."""
    gate_rows: Mapping[int, tuple[U8, Scales | None]] | None = None
    """By layer, gate weights [neurons, weight_bytes] and scales [neurons, hidden / 32] in stored
    order, in an MoE model expert by expert, resident; of the layers that ``predict_gate`` will be
    asked about."""
    scales: Sequence[U8] | None = None
    """Per layer, the scales of its neurons [neurons, ``bundle.scales_stride``] in stored order,
    resident; None if the bundles have them."""
    gate_biases: Sequence[F32] | None = None
    """Per layer, biases of the gates [neurons], if there are any. If neurons have no gate, their up
    rows count as gates."""
    limits: Sequence[tuple[float, float]] | None = None
    """Per layer of a model with a smooth activation, what counts as zero in ``predict_gate``:
    act(gate) smaller than the first, act(gate) * up smaller than the second; None stands for 0."""
    expert_limits: Sequence[Sequence[float]] | None = None
    """Per layer of an MoE model, the first limit of each expert [experts], not the layer's."""
    expert_neurons: Sequence[I32] | None = None
    """Per layer of an MoE model, the stored indices [neurons] of its neurons, expert by expert,
    ascending within each: of the rows of predictors and gates; needed to name neurons only."""
    allocate: Callable[[str, int], U8]
    """``allocate(segment, size)`` gives zeroed bytes, 64-byte aligned, counted in the segment."""
    has_little_memory: bool = False
    """Whether libraries are compiled one after another, which takes less of it."""

    @property
    def whole_bundle(self) -> BundleLayout:
        return self.bundle if self.scales is None else self.bundle.inline


class Backend(Protocol):
    """Members of every backend's module ``backend``."""

    VERDICT: Verdict
    """What plans do with it: in a dry run nothing is computed, and no neuron store is opened."""
    NATIVE: bool
    """Whether it needs the processor that the device describes."""
    KINDS: tuple[UnitKind, ...]
    """Kinds of units that plans give to it by default; none for replacements."""
    ONLY_EMULATED: bool
    """Whether its devices have been emulated so far, wherever it ran."""

    def find_obstacles(self, features: frozenset[str], architecture: str) -> list[str]:
        """What keeps this backend from running here; empty if nothing does."""

    def find_limits(self, facts: UnitFacts) -> list[str]:
        """Parts of a plan that it cannot compute, each as the end of a sentence that begins with
        its name, such as ``computes no MoE models``; empty if nothing."""


class ExecutorBackend(Backend, Protocol):
    """Members of a backend's module that computes whole models."""

    def count_segments(
        self,
        resolved: ResolvedPlan,
        *,
        threads: int | None,
        chunks: int,
        architecture: str | None,
        features: Collection[str] | None,
    ) -> Mapping[str, int]:
        """Bytes that its executor takes of each segment on such a processor, None: on any;
        ``chunks`` of a prompt go through a layer before the next layer begins."""

    def build(self, request: BuildRequest) -> Executor:
        """Compile or load kernels and make the executor."""


class ProgramBackend(Backend, Protocol):
    """Members of a backend's module that runs the programs of GGUF files."""

    def interpret(
        self, request: ProgramRequest, model: Model, formats: list[str], kv: KvType
    ) -> Interpreter:
        """Make the interpreter of a model's program over tensors of some formats."""


class Preparer(Protocol):
    """Members of a backend's module whose executors need something made first."""

    def prepare(self, request: BuildRequest) -> Callable[[BuildRequest], Executor]:
        """Compile kernels, unless they are cached; returns a function that builds the executor with
        them.

        Called before any memory is filled, with a request that has no room in memory yet: its
        tensors are the store's. Takes no memory that stays. The function is called with the same
        request, completed."""


class _Serving(Backend, Protocol):
    def find_unit_obstacles(self, unit: Unit) -> list[str]:
        """What keeps a unit of the device, or a program, from being used here, such as a driver
        that is missing; empty if nothing does.  May take a second."""

    def need_unit_memory(self, facts: UnitFacts) -> Need:
        """Bytes that a unit needs for what the plan gives it."""


class WholeBackend(_Serving, Protocol):
    """Members of a backend's module whose units have whole models in their own memory."""

    def build_whole(self, request: WholeRequest) -> WholeModel:
        """Compile or load kernels and make room for the model."""


class TextBackend(_Serving, Protocol):
    """Members of a backend's module that drives a program which has a model as a whole and gives
    text, not logits."""

    WEIGHTS: str
    """The file by which its folders of weights are known; the plan's ``weights`` are one."""

    def check_weights(self, folder: Path, model: Model) -> None:
        """UserError unless the folder has weights of the model, as far as one can see."""


class UnitBackend(_Serving, Protocol):
    """Members of a backend's module that serves units next to an executor."""

    def build_unit(self, request: UnitRequest) -> DenseUnit:
        """Compile or load kernels and make the unit."""


class GraphBackend(Protocol):
    """A unit's backend whose programs have fixed shapes; a backend need not be one."""

    def list_graphs(self, facts: UnitFacts) -> tuple[GraphFacts, ...]:
        """Return the graphs of neurons that a unit of the plan has."""

    def list_graph_tokens(self, facts: UnitFacts) -> tuple[int, ...]:
        """Return the numbers of tokens that its graphs have, ascending."""
