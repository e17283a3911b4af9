"""The course of a benchmark: load, warm up, repeat in turns, measure the limit in between.

A plan is loaded in a process of its own."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from itertools import groupby
from pathlib import Path

import numpy as np

from pi2.diagnostics import UserError
from pi2.engine.accounts import TokenBytes
from pi2.machine import detect_memory
from pi2.measuring.contestant import (
    BUFFER_BYTES,
    BandwidthLimit,
    Profile,
    RemoteContestant,
    observe_parts,
)
from pi2.measuring.report import (
    Bandwidth,
    Description,
    Row,
    Sample,
    TokenSource,
    Workload,
    add_counters,
)
from pi2.orchestrator import load
from pi2.progress import Progress, ignore_progress
from pi2.refit import FittedPlan


class PlanContestant:
    """A plan that is loaded in the process that is to be timed."""

    def __init__(
        self,
        path: Path,
        overrides: Mapping[str, object],
        text: str | None = None,
        progress: Progress = ignore_progress,
    ) -> None:
        """``text`` gives the tokens; without it, they are of the vocabulary in order."""
        self._model = load(path, set=dict(overrides), progress=progress)
        self._path = path
        self._named: Counter[int] = Counter()
        """Neurons that tokens named, by the number of sequences."""
        self._different: Counter[int] = Counter()
        """Different ones of those in each step."""
        self._filled: tuple[int, int] | None = None
        """Tokens of each sequence that steps go on from, and how many sequences."""
        if text is None:
            model = self._model.plan.model
            self._tokens = TokenSource.walk_vocabulary(model.shape.vocab, model.tokenizer.eos)
        else:
            ids = self._model.encode(text)
            if not ids:
                raise UserError.of("P641", "the text has no tokens")
            self._tokens = TokenSource(np.array(ids, np.int32))

    def describe(self) -> Description:
        resolved, texts = self._model.plan, self._model.texts
        notes = []
        if self._model.fallback is not None:
            notes.append(f"reads go through the page cache: {self._model.fallback}")
        notes += [remark.split(";")[0] for remark in self._model.account.remarks]
        return Description(
            engine=f"pi2 {version('pi2')}",
            model=resolved.model.id,
            backend=resolved.name_backend(resolved.sparse_unit),
            threads=self._model.compute_threads,
            synthetic=texts.is_synthetic,
            predictor=resolved.plan.decode.predictor,
            batch=resolved.plan.decode.batch,
            plan=str(self._path),
            digest=resolved.digest,
            budget_bytes=resolved.plan.memory.budget,
            load_s=self._model.load_s,
            notes=tuple(notes),
        )

    def run(self, workload: Workload) -> Sample:
        self._prepare(workload)
        before, idle = self._model.stats, self._read_busy_s()
        seconds = self._time(workload)
        sequences = self._count_sequences(workload)
        tokens = workload.tokens * sequences
        counters = self._model.stats - before
        self._named[sequences] += counters.predicted_neurons
        self._different[sequences] += counters.cache_hits + counters.cache_misses
        busy_s = {name: busy - idle[name] for name, busy in self._read_busy_s().items()}
        return Sample(tokens=tokens, seconds=seconds, counters=counters, busy_s=busy_s)

    def _read_busy_s(self) -> dict[str, float]:
        return {unit.name: unit.busy_s for unit in self._model.units}

    def profile(self, workload: Workload) -> Profile | None:
        self._prepare(workload)
        watch = Profile(tokens=workload.tokens * self._count_sequences(workload))
        with observe_parts(self._model._parts, watch, watch, watch):
            watch.total_s = self._time(workload)
        return watch

    def count_bytes(self, workload: Workload, active: float | None) -> TokenBytes | None:
        if workload.kind == "pp":
            return None
        sequences = self._count_sequences(workload)
        shared = 1 / sequences
        if self._model.plan.plan.decode.predictor != "none":
            named = self._named[sequences]
            shared = self._different[sequences] / named if named else 1.0
        return self._model.account.count_token_bytes(
            workload.mean_position, sequences, active, shared
        )

    def close(self) -> None:
        self._model.close()

    def _prepare(self, workload: Workload) -> None:
        """Fill new sequences up to the workload's depth, or take a repeated workload back to it."""
        context = self._model.plan.plan.kv.context
        if workload.depth + workload.tokens > context:
            raise UserError.of(
                "P642",
                f"{workload.name} needs {workload.depth + workload.tokens} tokens of context, "
                f"the plan has {context}",
                help="raise kv.context and memory.segments.kv, or measure less",
                file=str(self._path),
            )
        forward, count = self._model._parts.forward, self._count_sequences(workload)
        is_filled = self._filled == (workload.depth, count) and all(
            workload.depth >= earliest for earliest in forward.earliest[:count]
        )
        if workload.depth and workload.kind == "tg" and is_filled:
            for sequence in range(count):
                forward.take_back(sequence, workload.depth)
            return
        forward.reset_all()
        self._filled = None
        if not workload.depth:
            return
        for sequence in range(count):
            forward.prefill(self._tokens.take(workload.depth), sequence=sequence)
            forward.mark(sequence)
        if workload.kind == "tg":
            self._filled = (workload.depth, count)

    def _count_sequences(self, workload: Workload) -> int:
        """Prompts are read one after the other; as many are continued as the plan says."""
        if workload.kind == "pp":
            return 1
        return workload.sequences or self._model.plan.plan.decode.batch

    def _time(self, workload: Workload) -> float:
        forward = self._model._parts.forward
        if workload.kind == "pp":
            tokens = self._tokens.take(workload.tokens)
            start = time.perf_counter()
            forward.prefill(tokens)
            return time.perf_counter() - start
        sequences = range(self._count_sequences(workload))
        # Each goes through a stretch of its own.
        steps = np.stack([self._tokens.take(workload.tokens) for _ in sequences], axis=1).tolist()
        start = time.perf_counter()
        for tokens in steps:
            forward.step(tokens, sequences)
        return time.perf_counter() - start


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A row, and where its time goes if that was asked for."""

    row: Row
    profile: Profile | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    workloads: Sequence[Workload]
    repetitions: int
    with_profile: bool = False
    text: str | None = None
    """Tokens are taken from it; without, from the vocabulary in order."""


@dataclass(slots=True)
class _Turn:
    contestant: RemoteContestant
    workload: Workload
    samples: list[Sample] = field(default_factory=list)


def run_session(
    contestants: Sequence[RemoteContestant],
    course: Course,
    limit: BandwidthLimit,
    progress: Progress = ignore_progress,
) -> Iterator[Outcome]:
    """Measure a course with all contestants in turns, after a warm-up, and the bandwidth in
    between."""
    for _, alike in groupby(course.workloads, lambda workload: replace(workload, sequences=None)):
        turns = [_Turn(contestant, workload) for workload in alike for contestant in contestants]
        label, steps = f"measuring {turns[0].workload.name}", course.repetitions + 1
        progress(label, 0.0)
        for turn in turns:
            turn.contestant.run(turn.workload)
        speeds = limit.measure()
        for repetition in range(course.repetitions):
            progress(label, (repetition + 1) / steps)
            for turn in turns:
                turn.samples.append(turn.contestant.run(turn.workload))
            if repetition == course.repetitions // 2:
                speeds += limit.measure()
        speeds += limit.measure()
        progress(label, 1.0)
        bandwidth = limit.summarise(speeds)
        for turn in turns:
            profile = turn.contestant.profile(turn.workload) if course.with_profile else None
            yield Outcome(row=_make_row(turn, bandwidth), profile=profile)


def _make_row(turn: _Turn, bandwidth: Bandwidth) -> Row:
    contestant, workload, samples = turn.contestant, turn.workload, turn.samples
    counters = add_counters(samples)
    active = None if counters is None else counters.active_share
    return Row(
        description=contestant.description,
        workload=workload,
        samples=tuple(samples),
        peak_rss_bytes=contestant.read_peak_rss_bytes(),
        token_bytes=contestant.count_bytes(workload, active),
        bandwidth=bandwidth,
    )


_LEAST_BUFFER_BYTES = 64 << 20
_BUFFER_PART = 8


def open_limit(threads: int) -> BandwidthLimit:
    """What measures the bandwidth: with a small part of the free memory, which plans need, but more
    than most caches."""
    most = detect_memory().available_bytes // _BUFFER_PART
    size_bytes = min(BUFFER_BYTES, max(_LEAST_BUFFER_BYTES, most))
    return BandwidthLimit(threads, size_bytes=size_bytes)


def open_plan(found: FittedPlan, text: str | None, progress: Progress) -> RemoteContestant:
    """A plan in a process of its own; UserError P641."""
    recipe = partial(PlanContestant, found.resolved.path, dict(found.overrides), text)
    return RemoteContestant(recipe, progress, "pi2")


def measure_plan(
    found: FittedPlan, course: Course, progress: Progress = ignore_progress
) -> list[Outcome]:
    """Measure ``course`` with a plan; UserError P641, P642."""
    with open_plan(found, course.text, progress) as contestant:
        with open_limit(contestant.description.threads) as limit:
            return list(run_session([contestant], course, limit, progress))
