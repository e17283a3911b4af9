"""A model that a unit has as a whole, in its own memory: all weights, all neurons, keys and values.

A backend that can do so has ``build_whole`` (`pi2.backends.protocol.WholeBackend`).  Nobody needs
to know the model's layers then: tokens go in and logits come out, and nothing waits in between.
The neurons that compute a token are found where they are.

Order of calls::

    put(tensor, first)              dense tensors in pieces of rows, in any order, while loading
    keep(layer, first, bundles)     each layer's neurons in stored order
    expect(end)                     before each of the following
    prefill(tokens, sequence, position)     a chunk of a prompt, all neurons; returns at once
    logits(first)                           -> those of the chunk's tokens from first on
    step(tokens, sequences, positions)      -> logits of a token each of several sequences
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pi2.plan.documents.device import Unit
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan_memory import KvType
from pi2.plan.documents.plan_running import PredictorMode
from pi2.plan.weights.layout import BundleLayout
from pi2.progress import Progress, ignore_progress

if TYPE_CHECKING:
    from pi2.arrays import F32, I32, U8
    from pi2.backends.observer import ExecutorObserver
    from pi2.backends.protocol import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRequest:
    """Everything that a unit needs to have a model as a whole."""

    name: str
    """The unit's name in the device and the plan."""
    unit: Unit
    """What the device document says of it."""
    model: Model
    bundle: BundleLayout
    """How neurons lie in the store, their scales in them."""
    chunk: int
    """Most tokens in a call of ``prefill``."""
    sequences: int
    """Sequences whose keys and values are kept, and that a step may be of."""
    context: int
    """Tokens of a sequence that the KV cache holds."""
    kv_type: KvType
    """What its elements are."""
    predictor: PredictorMode
    """What names the neurons that compute a token in a step."""
    threshold: float
    """Score from which the predictor names a neuron."""
    expert_neurons: Sequence[I32] | None = None
    """Per layer of a mixture, the stored indices [neurons] of its neurons, expert by expert,
    ascending within each; needed to name neurons only."""
    count: Callable[[int], None]
    """Counts bytes of the unit's memory."""
    progress: Progress = ignore_progress
    """Called with a label and the share done while something takes its time."""


class SequenceModel(Protocol):
    """A model whose layers nobody needs to know: tokens go in, logits come out.  One calling
    thread."""

    def expect(self, end: int) -> None:
        """Tell that the calls that follow bring a sequence to ``end`` tokens at most."""

    def prefill(self, tokens: I32, sequence: int, position: int) -> None:
        """Begin to compute ``tokens`` [T] of a sequence, the first of which stands at
        ``position``, with all neurons."""

    def logits(self, first: int) -> F32:
        """Logits [n, vocab] of the last chunk's tokens from ``first`` on, n at most
        `pi2.plan.arithmetic.sizes.LOGIT_ROWS`; valid until the next call."""

    def step(self, tokens: I32, sequences: Sequence[int], positions: Sequence[int]) -> F32:
        """Compute ``tokens`` [T], the next ones of different sequences, with the neurons that the
        predictor names; return their logits [T, vocab], valid until the next call."""

    def count_named(self) -> int:
        """Neurons that the predictor has named in steps since the last call."""

    def observe(self, observer: ExecutorObserver | None) -> None:
        """Tell ``observer`` of chunks and steps from now on; None ends it."""

    @property
    def busy_s(self) -> float:
        """Seconds from where work was submitted until its logits had arrived."""

    def close(self) -> None:
        """Give the unit back.  Never fails, and may be called twice."""


class WholeModel(SequenceModel, Protocol):
    """A model on a unit, whose weights are brought there."""

    def put(self, tensor: Tensor, first: int) -> None:
        """Copy rows of a dense tensor, from row ``first`` on, a multiple of 32: those of
        ``tensor``, which has a multiple of 32 rows or the last one."""

    def keep(self, layer: int, first: int, bundles: U8) -> None:
        """Copy ``bundles`` [n, stride], the neurons of ``layer`` from stored index ``first`` on."""
