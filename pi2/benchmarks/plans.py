"""Measuring one plan, alone or against another engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from pi2.benchmarks.bandwidth import BUFFER_BYTES, BandwidthLimit
from pi2.benchmarks.contestant import RemoteContestant
from pi2.benchmarks.llama_cpp import LlamaRecipe, check_installed
from pi2.benchmarks.plan_contestant import PlanRecipe
from pi2.benchmarks.session import NoteLost, Outcome, run_session
from pi2.benchmarks.workloads import Workload
from pi2.caches import find_cache_folder
from pi2.diagnostics import UserError
from pi2.progress import Progress, ignore_progress
from pi2.refit import read_plan
from pi2.sharing.resolver import LockedReferences

_ENDS = ("P640", "P652")
"""Findings of an engine that has failed, not of what it was asked for."""


def measure_plan(
    path: Path,
    overrides: Mapping[str, object],
    workloads: Sequence[Workload],
    *,
    repetitions: int,
    with_profile: bool = False,
    against: str | None = None,
    text: str | None = None,
    progress: Progress = ignore_progress,
    note_lost: NoteLost = lambda error: None,
    note_file: Callable[[Path], None] = lambda path: None,
    buffer_bytes: int = BUFFER_BYTES,
) -> list[Outcome]:
    """Measure ``workloads`` with the plan at ``path``.

    ``against`` names an engine (``llama.cpp``) that does the same in turns with the plan, on the
    same file where the plan runs a GGUF file, else on one with random weights; ``text``
    is what tokens are taken from.  Raises `UserError` as loading does, P641 and P642 for what
    cannot be measured, P653 and P654 if the other engine is not there.  ``note_lost`` is told where
    it fails (P652) or crashes (P640): the plan is measured without it.  ``note_file`` is told the
    file that the other engine reads, before it is written.
    """
    found = read_plan(path, overrides=overrides, resolver=LockedReferences(path.parent))
    resolved = found.resolved
    if against is not None:
        check_installed()
    with ExitStack() as stack:
        recipe = PlanRecipe(path=path, overrides=dict(overrides), text=text)
        contestants = [stack.enter_context(RemoteContestant(recipe, progress))]
        threads = contestants[0].description.threads
        if against is not None:
            other = LlamaRecipe(
                model=resolved.model,
                context=resolved.plan.kv.context,
                threads=threads,
                folder=find_cache_folder("peers"),
                given=None if resolved.file is None else resolved.file.path,
            )
            if not other.file.exists():
                note_file(other.file)
            try:
                contestants.append(stack.enter_context(RemoteContestant(other, progress)))
            except UserError as error:
                if error.diagnostics[0].code not in _ENDS:
                    raise
                note_lost(error)
        limit = stack.enter_context(BandwidthLimit(threads, size_bytes=buffer_bytes))
        return list(
            run_session(
                contestants,
                workloads,
                repetitions=repetitions,
                limit=limit,
                with_profile=with_profile,
                progress=progress,
                note_lost=note_lost,
            )
        )
