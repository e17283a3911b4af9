"""What `pi2 bench` measures: a plan, loaded in a process of its own."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from pi2.diagnostics import UserError
from pi2.engine.loaded_model import LoadedModel
from pi2.measuring.contestant import Profile, Profiler, observe_parts
from pi2.measuring.samples import (
    Description,
    Sample,
    TokenBytes,
    TokenSource,
    Workload,
    count_token_bytes,
)
from pi2.orchestrator import load
from pi2.plan.arithmetic.units import count_kv_token_bytes
from pi2.progress import Progress
from pi2.store.reader import NeuronStore


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecipe:
    """Loads a plan in the process that is to be timed."""

    path: Path
    overrides: Mapping[str, object]
    text: str | None = None
    """Text that tokens are taken from; without it, tokens of the vocabulary in order."""

    def __call__(self, progress: Progress) -> PlanContestant:
        model = load(self.path, set=dict(self.overrides), progress=progress)
        return PlanContestant(model, self.path, self.text)


class PlanContestant:
    def __init__(self, model: LoadedModel, path: Path, text: str | None) -> None:
        self._model = model
        self._path = path
        self._named: Counter[int] = Counter()
        """Neurons that tokens named, by the number of sequences."""
        self._different: Counter[int] = Counter()
        """Different ones of those in each step."""
        self._filled: tuple[int, int] | None = None
        """Tokens of each sequence that steps go on from, and how many sequences."""
        shape, tokenizer = model.plan.model.shape, model.plan.model.tokenizer
        if text is None:
            self._tokens = TokenSource.walk_vocabulary(shape.vocab, tokenizer.eos)
        else:
            ids = model.encode(text)
            if not ids:
                raise UserError.of("P641", "the text has no tokens")
            self._tokens = TokenSource(np.array(ids, np.int32))

    def describe(self) -> Description:
        resolved, store = self._model.plan, self._model._parts.store
        notes = []
        if self._model.fallback is not None:
            notes.append(f"reads go through the page cache: {self._model.fallback}")
        if store is None:
            notes.append("dry run: nothing is computed or read")
        return Description(
            engine=f"pi2 {version('pi2')}",
            model=resolved.model.id,
            backend=resolved.name_backend(resolved.sparse_unit),
            threads=self._model.compute_threads,
            synthetic=isinstance(store, NeuronStore) and store.manifest.synthetic,
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
        watch = Profiler()
        with observe_parts(self._model._parts, watch, watch, watch):
            seconds = self._time(workload)
        return watch.report(workload.tokens * self._count_sequences(workload), seconds)

    def count_bytes(self, workload: Workload, active: float | None) -> TokenBytes | None:
        store, file = self._model._parts.store, self._model.plan.file
        if workload.kind == "pp" or store is None:
            return None
        if file is not None:
            model = self._model.plan.model
            kept = model.shape.layers * count_kv_token_bytes(model, "fp16")
            return TokenBytes(
                attention=file.token_bytes / self._count_sequences(workload),
                head=0.0,
                predictor=0.0,
                neurons=0.0,
                kv=kept * workload.mean_position,
            )
        assert isinstance(store, NeuronStore)
        predictor, sequences = store.manifest.predictor, self._count_sequences(workload)
        return count_token_bytes(
            self._model.plan,
            ranks=None if predictor is None else predictor.rank,
            active=active,
            position=workload.mean_position,
            shared=self._find_shared_share(sequences),
            sequences=sequences,
        )

    def _find_shared_share(self, sequences: int) -> float:
        if self._model.plan.plan.decode.predictor == "none":
            return 1 / sequences
        named = self._named[sequences]
        return self._different[sequences] / named if named else 1.0

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
        if workload.depth and workload.kind == "tg" and self._filled == (workload.depth, count):
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
