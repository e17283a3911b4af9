"""The one way from a plan to a model that runs: open -> give out memory -> build."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pi2.backends.host import load_host_loops
from pi2.backends.units import WholeRequest
from pi2.diagnostics import UserError
from pi2.engine.accounts import WholeAccount
from pi2.engine.parts import Parts, refuse_layers
from pi2.engine.sequences import make_sequences
from pi2.fitting import find_backend, find_whole_backend
from pi2.fitting.misfits import check_fit
from pi2.fitting.sources import WholeSource
from pi2.logging import get_logger
from pi2.machine import detect_machine
from pi2.memory.arena import allocate_cache, allocate_staging
from pi2.memory.budget import make_budget
from pi2.memory.matrix_pool import MatrixPool
from pi2.plan.arithmetic.sizes import count_piece_bytes
from pi2.plan.arithmetic.sources import FileFacts
from pi2.progress import Progress, ignore_progress

if TYPE_CHECKING:
    from pi2.arrays import U8
    from pi2.backends.executor import Executor, ExecutorObserver
    from pi2.backends.protocol import BuildRequest
    from pi2.backends.units import SequenceModel
    from pi2.engine.model_texts import ModelTexts
    from pi2.memory.arena import ContextLoan
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

    def load(self, release: ExitStack, shared: Mapping[str, U8] = MappingProxyType({})) -> Parts:
        """``shared``: matrices that an MTP head finds in its model's memory; ``release`` will give
        everything back."""
        placed, self._release = self.place(shared), release
        self._draft = None if self.draft is None else self.draft.load(ExitStack(), placed)
        return self.build()

    def finish(
        self,
        model: SequenceModel,
        report: Mapping[str, object],
        *,
        chunks: int = 1,
        loan: ContextLoan | None = None,
        **parts: Any,
    ) -> Parts:
        """The parts with ``model``; ``report``: what the log says of it; ``chunks`` of a prompt go
        through a layer one after the other."""
        resolved = self.resolved
        get_logger(plan_digest=resolved.digest[:12]).info(
            "model loaded", plan=str(resolved.path), **report
        )
        return Parts(
            resolved=resolved,
            texts=self.texts,
            budget=self.budget,
            forward=make_sequences(model, resolved, chunks=chunks, loan=loan),
            draft=self._draft,
            load_s=time.perf_counter() - self.wish.start,
            pool=self.wish.pool,
            release=self._release,
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
        parts = opened.load(ExitStack())
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
