"""What a backend is given to run a model: plain numbers, choices of the plan, and arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pi2.plan.documents.model import Model
from pi2.plan.documents.plan_memory import KvType
from pi2.plan.documents.plan_running import ActivationType
from pi2.plan.weights.layout import BundleLayout, Precision

if TYPE_CHECKING:
    from pi2.arrays import F32, I32, U8, Raw, Scales
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
    scales: Sequence[U8] | None = None
    """Per layer, the scales of its neurons [neurons, ``bundle.scales_stride``] in stored order,
    resident; None where they lie in the bundles."""
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
