"""pi2 itself under test."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from pi2.benchmarks.profile import Profile, watch_parts
from pi2.benchmarks.samples import Description, Sample, TokenBytes
from pi2.benchmarks.token_bytes import count_token_bytes
from pi2.benchmarks.workloads import TokenSource, Workload
from pi2.diagnostics import UserError
from pi2.engine.loaded_model import LoadedModel
from pi2.orchestrator import load
from pi2.plan.arithmetic.kept_sizes import count_kv_token_bytes
from pi2.progress import Progress
from pi2.store.reader import NeuronStore


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecipe:
    """Loads a plan in the process that is to be timed."""

    path: Path
    overrides: Mapping[str, object]
    text: str | None = None
    """Text that tokens are taken from; without it, tokens of the vocabulary in order."""

    @property
    def subject(self) -> str:
        """See `pi2.benchmarks.contestant`."""
        return "pi2"

    def __call__(self, progress: Progress) -> PlanContestant:
        model = load(self.path, set=dict(self.overrides), progress=progress)
        return PlanContestant(model, self.path, self.text)


class PlanContestant:
    """A loaded plan."""

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
        """See `pi2.benchmarks.contestant`."""
        resolved, store = self._model.plan, self._model._parts.store
        backend = resolved.name_backend(resolved.sparse_unit)
        notes = []
        if self._model.fallback is not None:
            notes.append(f"reads go through the page cache: {self._model.fallback}")
        if store is None:
            notes.append("dry run: nothing is computed or read")
        return Description(
            engine=f"pi2 {version('pi2')}",
            model=resolved.model.id,
            backend=backend,
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
        """See `pi2.benchmarks.contestant`."""
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
        """Seconds that each unit beside the sparse one has worked since loading."""
        return {unit.name: unit.busy_s for unit in self._model.units}

    def profile(self, workload: Workload) -> Profile | None:
        """See `pi2.benchmarks.contestant`."""
        self._prepare(workload)
        with watch_parts(self._model._parts) as watches:
            seconds = self._time(workload)
        tokens = workload.tokens * self._count_sequences(workload)
        return watches.report(tokens, seconds)

    def count_bytes(self, workload: Workload, active: float | None) -> TokenBytes | None:
        """See `pi2.benchmarks.contestant`."""
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
        """Different neurons of a step, as a share of those that its tokens name."""
        if self._model.plan.plan.decode.predictor == "none":
            return 1 / sequences
        named = self._named[sequences]
        return self._different[sequences] / named if named else 1.0

    def close(self) -> None:
        """See `pi2.benchmarks.contestant`."""
        self._model.close()

    def _prepare(self, workload: Workload) -> None:
        """Begin new sequences and fill them up to the workload's depth; those of a workload that
        is repeated are taken back to it."""
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
