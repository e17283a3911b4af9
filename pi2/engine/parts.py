"""The parts of a loaded model, built by the orchestrator, the bytes that its steps touch, and
observers of its FFNs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pi2.arrays import F32, I32, U8, Bits
from pi2.backends.executor import Executor, ExecutorObserver
from pi2.backends.protocol import BuildRequest
from pi2.diagnostics import UserError
from pi2.engine.statistics import read_peak_rss_bytes
from pi2.memory.budget import SegmentUse
from pi2.memory.matrix_pool import MatrixPool
from pi2.plan.weights.bundles import join_scales, slice_experts

if TYPE_CHECKING:
    from pi2.backends.units import SequenceModel
    from pi2.engine.accounts import Account
    from pi2.engine.dense_shares import BesideUnit
    from pi2.engine.feed_forward import FeedForward
    from pi2.engine.layer_model import LayerModel
    from pi2.engine.model_texts import ModelTexts
    from pi2.engine.sequences import Sequences
    from pi2.memory.budget import Budget
    from pi2.memory.cache import NeuronCache
    from pi2.memory.direct_files import FileReads
    from pi2.memory.flash import FlashReader
    from pi2.plan.arithmetic.resolved import ResolvedPlan


class ShareObserver:
    """Observes shares in the thread that drives them, doing nothing itself; times are of
    `time.perf_counter`."""

    def note_work(self, unit: str, name: str, start_s: float, end_s: float) -> None:
        """A unit has computed something; it is told when the job is finished."""

    def note_unit_wait(self, unit: str, layer: int | None, start_s: float, end_s: float) -> None:
        """The caller has waited for a unit, which had work of ``layer``, or of the head."""


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts that compute in a layer of an MoE model."""

    owners: I32
    """Expert of every neuron in stored order [neurons]."""
    computes: Bits
    """Whether an expert computes a token [T, experts]."""


FfnObserver = Callable[[int, F32, F32, Routing | None], None]
"""Called with a layer, its FFN's input [T, hidden] and its activations [T, neurons] in stored
order, of the tokens of a chunk; and with the routing of an MoE model, else None."""


class DenseObserver(ExecutorObserver):
    """Tells ``observer`` of every dense layer of an executor that it observes."""

    def __init__(
        self,
        executor: Executor,
        request: BuildRequest,
        observer: FfnObserver,
        compute: Callable[[BuildRequest, F32, U8, F32 | None], F32] | None = None,
    ) -> None:
        """``compute`` replaces activations of bundles, neurons last."""
        self._executor = executor
        self._request = request
        self._observer = observer
        self._compute = compute or compute_activations
        self._pieces: dict[int, list[F32]] = {}
        self._owners: dict[int, list[I32]] = {}
        self._chunk = 0

    def select_chunk(self, number: int) -> None:
        self._chunk = number

    def begin_ffn(self, layer: int) -> None:
        self._pieces.pop(self._chunk, None)
        self._owners.pop(self._chunk, None)

    def add_dense(self, layer: int, bundles: U8, first: int) -> None:
        whole, request = bundles, self._request
        if request.scales is not None:
            rows = slice(first, first + len(bundles))
            whole = join_scales(bundles, request.scales[layer], request.bundle, rows)
        cutoffs = self._executor.read_cutoffs()
        values = self._compute(request, self._read_input(), whole, cutoffs)
        if self._request.model.moe is not None:
            owners = slice_experts(whole, request.whole_bundle)
            values *= self._find_computing()[:, owners]
            self._owners.setdefault(self._chunk, []).append(owners)
        self._pieces.setdefault(self._chunk, []).append(values)

    def end_ffn(self, layer: int) -> None:
        """Tell the observer of a layer all of whose neurons were computed."""
        if pieces := self._pieces.pop(self._chunk, None):
            routing = None
            if owners := self._owners.pop(self._chunk, None):
                routing = Routing(np.concatenate(owners), self._find_computing())
            # In stored order: `FeedForward` sees to it for executors that are observed.
            values = np.concatenate(pieces, axis=-1)
            self._observer(layer, self._read_input(), values, routing)

    def _read_input(self) -> F32:
        return self._executor.share_input()[0]

    def _find_computing(self) -> Bits:
        """Whether an expert computes a token [T, experts]."""
        return np.asarray(self._executor.read_routes() != 0)


def compute_activations(
    request: BuildRequest, inputs: F32, bundles: U8, cutoffs: F32 | None
) -> F32:
    """Activations [T, n] of neurons for ``inputs`` [T, hidden] and, if the layer has them,
    ``cutoffs`` [T, 1] of gates. ``bundles`` [n, .] are laid out as ``request.whole_bundle``."""
    from pi2.backends.reference import neurons

    return neurons.compute_activations(
        request.model, request.whole_bundle, inputs, bundles, cutoffs=cutoffs
    )


def refuse_layers() -> LayerModel:
    """UserError P662 for callers that want to observe layers."""
    raise UserError.of(
        "P662",
        "this run does not show what its neurons do, and shows none of its layers",
        help="take a plan of a store whose split gives the neurons to a CPU, and the backend cpu "
        "or reference",
    )


FLASH_WEIGHT = 10
"""Bytes in memory that count as one byte from flash: drives give a tenth of the memory's rate, or
less. Drafts of resident neurons touch more memory to read less."""


class Touched(NamedTuple):
    """Bytes that steps have touched."""

    memory: int
    flash: int

    @property
    def total(self) -> int:
        """All bytes: bytes from flash are touched there and in memory."""
        return self.memory + self.flash

    @property
    def weight(self) -> int:
        return self.memory + FLASH_WEIGHT * self.flash


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts that the orchestrator has built for a plan."""

    resolved: ResolvedPlan
    texts: ModelTexts
    budget: Budget
    reader: FlashReader | FileReads
    forward: Sequences
    load_s: float
    units: Mapping[str, BesideUnit] = field(default_factory=dict)
    """Units next to the executor."""
    loaded_bytes: int = 0
    """Read in bulk."""
    account: Account
    compute_threads: int
    resident: Sequence[U8] = ()
    """Resident weights that steps read, in one array or several."""
    pool: MatrixPool = field(default_factory=MatrixPool)
    """Resident weights that models share."""
    has_pooled_matrices: bool = False
    """Whether the pool gives segment ``hot`` back."""
    check: Callable[[], None] = lambda: None
    """Raises `UserError` where a file that steps read is not as it was loaded."""
    show_layers: Callable[[], LayerModel] = refuse_layers
    """Gives the model if its layers are computed one by one, else raises `UserError` P662."""
    lock_fallback: str | None = None
    """Why memory is not locked, if the plan wants it."""
    draft: Parts | None = None
    """The draft model's, if there is one."""
    release: ExitStack
    """Gives back threads, files and memory, the last that was taken first."""

    def measure_segments(self) -> dict[str, SegmentUse]:
        """Stated and taken bytes by segment; ``draft.NAME`` belongs to the model that drafts, and
        ``runtime`` has the rest of the process's peak."""
        found = self.budget.measure()
        if self.draft is not None:
            own = self.draft.budget.measure().items()
            found |= {f"draft.{name}": use for name, use in own if name != "runtime"}
        parts = [use.taken_bytes for name, use in found.items() if name != "runtime"]
        taken = None
        if None not in parts:
            taken = max(0, read_peak_rss_bytes() - sum(part for part in parts if part is not None))
        stated = self.resolved.plan.memory.segments.runtime
        found["runtime"] = SegmentUse(stated_bytes=stated, allocated_bytes=None, taken_bytes=taken)
        return found

    def count_touched(self) -> Touched:
        """Bytes that steps have touched: dense weights and predictors once a step, neurons that any
        token of it used once, the KV cache for each token; the reads of prompts count as well.  A
        step of a GGUF file reads its dense matrices and one token's experts."""
        forward, account = self.forward, self.account
        memory = forward.steps * (account.step_bytes or 0)
        memory += forward.attended_tokens * account.context_bytes
        return Touched(memory + forward.model.touched_bytes, self.reader.read_bytes)

    @property
    def model(self) -> SequenceModel:
        return self.forward.model

    @property
    def executor(self) -> Executor:
        return self.show_layers().executor

    @property
    def cache(self) -> NeuronCache:
        return self.feed_forward.cache

    @property
    def feed_forward(self) -> FeedForward:
        return self.show_layers().feed_forward
