"""The one way from a plan to the parts of a model that runs: open -> give out memory -> build."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from pi2.backends.host import load_host_loops
from pi2.backends.units import WholeRequest
from pi2.diagnostics import UserError
from pi2.engine.accounts import Account, WholeAccount
from pi2.engine.layer_model import LayerModel, refuse_layers
from pi2.engine.sequences import Sequences
from pi2.engine.statistics import UnitUse, read_peak_rss_bytes
from pi2.fitting import find_backend, find_whole_backend
from pi2.fitting.misfits import check_fit
from pi2.fitting.sources import WholeSource
from pi2.logging import get_logger
from pi2.machine import detect_machine
from pi2.memory.arena import allocate_cache, allocate_staging
from pi2.memory.budget import Budget, SegmentUse, make_budget
from pi2.memory.matrix_pool import MatrixPool
from pi2.plan.arithmetic.sizes import count_piece_bytes
from pi2.plan.arithmetic.sources import FileFacts
from pi2.progress import Progress, ignore_progress

if TYPE_CHECKING:
    from pi2.arrays import U8
    from pi2.backends.executor import Executor, ExecutorObserver
    from pi2.backends.protocol import BuildRequest
    from pi2.backends.units import SequenceModel
    from pi2.engine.dense_shares import BesideUnit
    from pi2.engine.feed_forward import FeedForward
    from pi2.engine.model_texts import ModelTexts
    from pi2.memory.arena import ContextLoan
    from pi2.memory.cache import NeuronCache
    from pi2.memory.direct_files import FileReads
    from pi2.memory.flash import FlashReader
    from pi2.plan.arithmetic.resolved import ResolvedPlan

MakeObserver = Callable[["Executor", "BuildRequest"], "ExecutorObserver | None"]
"""Makes an observer of an executor's dense layers, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Settings of loading that no plan states."""

    progress: Progress = ignore_progress
    start: float = field(default_factory=time.perf_counter)
    """When it began, by `time.perf_counter`."""
    pool: MatrixPool = field(default_factory=MatrixPool)
    """Matrices of other models."""
    make_observer: MakeObserver | None = None


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
    """The parts of a plan's model."""

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

    def count_reads(self) -> tuple[int, float]:
        """Bytes of neurons and streamed weights read so far, and seconds that computing waited."""
        return self.reader.read_bytes, self.model.waited_s

    def list_units(self) -> tuple[UnitUse, ...]:
        """The work of each unit but the sparse one since loading."""
        resolved = self.resolved
        return tuple(
            UnitUse(
                name=unit.name,
                owned_share=resolved.find_owned_share(unit.name),
                computed_neurons=unit.computed,
                busy_s=unit.unit.busy_s,
                lost=unit.lost,
                padding=None if unit.unit.padding is None else unit.unit.padding.share,
                emulated=bool(resolved.device.units[unit.name].emulated),
            )
            for unit in self.units.values()
        )

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


class Opening(ABC):
    """A plan whose weights are open, and whose kernels are compiled as far as that is possible
    without the memory of the budget: compilers need over 100 MB."""

    texts: ModelTexts

    def __init__(self, resolved: ResolvedPlan, wish: Wish, cleanup: ExitStack) -> None:
        """``cleanup`` closes it. UserError P3xx for the machine, P618, and others."""
        self.resolved, self.wish, self.cleanup = resolved, wish, cleanup
        self.machine = detect_machine()
        self.verdict = find_backend(resolved.name_backend(resolved.sparse_unit)).VERDICT
        check_fit(resolved, self.machine)
        self.open()
        self.draft: Opening | None = None
        if resolved.draft is not None:
            own = Wish(progress=wish.progress, start=wish.start, pool=wish.pool)
            self.draft = open_source(resolved.draft, own, cleanup)
            if not self.texts.has_tokens_of(self.draft.texts):
                raise UserError.of(
                    "P618",
                    f"{resolved.draft.path} cannot draft for this plan: its tokens are others",
                    help="name the plan of a model with the same tokenizer in "
                    "decode.speculation.plan",
                    file=str(resolved.path),
                )
        self.budget = make_budget(resolved)

    @abstractmethod
    def open(self) -> None:
        """Open files and texts, and compile."""

    def place(self, shared: Mapping[str, U8]) -> Mapping[str, U8]:
        """Give out memory of matrices, some of which are ``shared``, by name."""
        return {}

    @abstractmethod
    def build(self) -> Parts:
        """Read the weights, and build what computes them; `finish` makes the parts of it."""

    def load(self, shared: Mapping[str, U8] = MappingProxyType({})) -> Parts:
        """``shared``: matrices that an MTP head finds in its model's memory."""
        placed = self.place(shared)
        self._draft = None if self.draft is None else self.draft.load(placed)
        return self.build()

    def finish(
        self,
        model: SequenceModel,
        report: Mapping[str, object],
        *,
        loan: ContextLoan | None = None,
        **parts: Any,
    ) -> Parts:
        """The parts with ``model``; ``report``: what the log says of it."""
        resolved, plan = self.resolved, self.resolved.plan
        get_logger(plan_digest=resolved.digest[:12]).info(
            "model loaded", plan=str(resolved.path), **report
        )
        return Parts(
            resolved=resolved,
            texts=self.texts,
            budget=self.budget,
            forward=Sequences(
                model,
                context=plan.kv.context,
                sequences=plan.decode.batch,
                piece=plan.prefill.chunk * resolved.chunks,
                loan=loan,
                has_states=bool(resolved.model.state_layers),
            ),
            draft=self._draft,
            load_s=time.perf_counter() - self.wish.start,
            pool=self.wish.pool,
            release=ExitStack(),
            **parts,
        )


class WholeOpening(Opening):
    """Weights of a store; UserError P662 for observed neurons."""

    def open(self) -> None:
        if self.wish.make_observer is not None:
            refuse_layers()
        from pi2.engine.loading import WEIGHTS

        self.weights = WEIGHTS[self.verdict](self.resolved, self.cleanup)
        self.texts = self.weights.texts

    def build(self) -> Parts:
        """Make room on the unit, and bring dense tensors and neurons there; meanwhile main memory
        has a piece of a tensor and staging buffers of neurons."""
        from pi2.engine.loading import read_neurons

        resolved, budget, progress = self.resolved, self.budget, self.wish.progress
        plan, name = resolved.plan, resolved.sparse_unit
        finish_hashes = self.weights.begin_hashes(reads_all=False)
        grouped = self.weights.group_by_expert(budget)
        backend = find_whole_backend(resolved.name_backend(name))
        assert backend is not None, name
        model = backend.build_whole(
            WholeRequest(
                name=name,
                resolved=resolved,
                expert_neurons=None if plan.decode.predictor == "none" else grouped,
                count=partial(budget.charge, resolved.name_segment(name)),
                progress=progress,
            )
        )
        self.cleanup.callback(model.close)
        loops = load_host_loops(progress, self.machine.features)
        reader = self.weights.open_reader(allocate_cache(resolved, budget, loops))
        staging = allocate_staging(resolved, budget)
        buffer = budget.allocate("workspace", count_piece_bytes(resolved))
        self.weights.copy_dense(model, buffer, progress)
        layers = len(resolved.layers)
        for layer in range(layers):
            for first, piece in read_neurons(
                reader, layer, resolved.model.layer_neurons, staging[0]
            ):
                model.keep(layer, first, piece)
            progress(f"loading neurons of {name}", (layer + 1) / layers)
        finish_hashes()
        report = {
            "backend": resolved.name_backend(name),
            "whole_on": name,
            "predictor": plan.decode.predictor,
        }
        return self.finish(
            model,
            report,
            account=WholeAccount(resolved, self.verdict),
            reader=reader,
            compute_threads=1,
        )


def load_parts(resolved: ResolvedPlan, wish: Wish) -> Parts:
    """Load a plan's model."""
    with ExitStack() as cleanup:
        opened = open_source(resolved, wish, cleanup)
        parts = opened.load()
        parts.release.enter_context(cleanup.pop_all())
    return parts


def open_source(resolved: ResolvedPlan, wish: Wish, cleanup: ExitStack) -> Opening:
    """Open the weights of a plan, closed by ``cleanup``."""
    match resolved.source:
        case FileFacts() as facts:
            from pi2.engine.file_loading import FileOpening

            return FileOpening(facts, resolved, wish, cleanup)
        case WholeSource():
            return WholeOpening(resolved, wish, cleanup)
        case _:
            from pi2.engine.assembly import LayersOpening

            return LayersOpening(resolved, wish, cleanup)
