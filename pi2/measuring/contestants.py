"""What `pi2 bench` compares: plans, and llama.cpp."""

from __future__ import annotations

import ctypes
import importlib.util
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

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
    count_dense_bytes,
    count_token_bytes,
)
from pi2.orchestrator import load
from pi2.plan.arithmetic.units import count_kv_token_bytes
from pi2.plan.documents.model import Model
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


def check_installed() -> None:
    """`UserError` P653 if llama-cpp-python is missing."""
    if importlib.util.find_spec("llama_cpp") is None:
        raise UserError.of(
            "P653",
            "comparing with llama.cpp needs llama-cpp-python",
            help="CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary llama-cpp-python "
            "'pi2[bench]' compiles it: nine minutes and more on two cores (-v shows progress)",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaRecipe:
    """Loads a GGUF file of the same shape in llama.cpp with its default settings."""

    model: Model
    context: int
    threads: int
    file: Path
    repack: bool = True
    """Repack weights at loading, as llama.cpp does by default; without, they stay mapped."""
    synthetic: bool = False
    """Whether the file is another one than the plan's, such as one of random weights."""

    def __call__(self, progress: Progress) -> LlamaContestant:
        check_installed()
        return LlamaContestant(self)


class LlamaContestant:
    """A model in llama.cpp; the low-level interface, as llama-bench uses it."""

    def __init__(self, recipe: LlamaRecipe) -> None:
        import llama_cpp

        self._recipe = recipe
        self._library = llama_cpp
        self._silence = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._silence, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        start = time.perf_counter()
        settings = llama_cpp.llama_model_default_params()
        settings.use_extra_bufts = recipe.repack
        self._model = llama_cpp.llama_model_load_from_file(str(recipe.file).encode(), settings)
        if not self._model:
            raise UserError.of("P652", f"llama.cpp cannot load {recipe.file}")
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = recipe.context
        parameters.n_threads = recipe.threads
        parameters.n_threads_batch = recipe.threads
        self._context = llama_cpp.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise UserError.of("P652", "llama.cpp has not enough memory for its context")
        self._load_s = time.perf_counter() - start
        self._batch_tokens = parameters.n_batch
        self._filled = 0
        """Tokens of the context that runs go on from."""
        self._tokens = TokenSource.walk_vocabulary(
            recipe.model.shape.vocab, recipe.model.tokenizer.eos
        )

    def describe(self) -> Description:
        return Description(
            engine=f"llama.cpp (llama-cpp-python {self._library.__version__})",
            model=self._recipe.model.id,
            backend="cpu",
            threads=self._recipe.threads,
            synthetic=self._recipe.synthetic,
            load_s=self._load_s,
            notes=(
                "default settings" if self._recipe.repack else "mapped, not repacked",
                "another file" if self._recipe.synthetic else "the same file",
            ),
        )

    def run(self, workload: Workload) -> Sample:
        self._prepare(workload.depth)
        tokens = self._tokens.take(workload.tokens)
        start = time.perf_counter()
        if workload.kind == "pp":
            self._decode(tokens)
        else:
            for index in range(workload.tokens):
                self._decode(tokens[index : index + 1])
        return Sample(tokens=workload.tokens, seconds=time.perf_counter() - start)

    def _prepare(self, depth: int) -> None:
        """Fill the context up to ``depth``, or take back later tokens."""
        llama = self._library
        memory = llama.llama_get_memory(self._context)
        if depth and depth == self._filled and llama.llama_memory_seq_rm(memory, 0, depth, -1):
            return
        llama.llama_memory_clear(memory, True)
        if depth:
            self._decode(self._tokens.take(depth))
        self._filled = depth

    def profile(self, workload: Workload) -> Profile | None:
        """Always None: llama.cpp cannot be profiled."""
        return None

    def count_bytes(self, workload: Workload, active: float | None) -> TokenBytes | None:
        if workload.kind == "pp" or not self._recipe.synthetic:
            return None  # of the plan's own file pi2 says what tokens read
        return count_dense_bytes(self._recipe.model, position=workload.mean_position)

    def close(self) -> None:
        self._library.llama_free(self._context)
        self._library.llama_model_free(self._model)

    def _decode(self, tokens: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        llama = self._library
        for first in range(0, len(tokens), self._batch_tokens):
            piece = np.ascontiguousarray(tokens[first : first + self._batch_tokens])
            pointer = piece.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
            code = llama.llama_decode(self._context, llama.llama_batch_get_one(pointer, len(piece)))
            if code:
                raise UserError.of("P652", f"llama_decode failed with {code}")
        llama.llama_synchronize(self._context)
