"""llama.cpp under test, through llama-cpp-python."""

from __future__ import annotations

import ctypes
import importlib.util
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pi2.benchmarks.gguf_file import INSTALL_HELP, find_gguf, write_gguf
from pi2.benchmarks.profile import Profile
from pi2.benchmarks.samples import Description, Sample, TokenBytes
from pi2.benchmarks.token_bytes import count_dense_bytes
from pi2.benchmarks.workloads import TokenSource, Workload
from pi2.diagnostics import UserError
from pi2.plan.documents.model import Model
from pi2.progress import Progress
from pi2.store.reader import NeuronStore


def check_installed() -> None:
    """`UserError` P653 if llama-cpp-python or gguf is missing."""
    missing = [
        package
        for package, module in (("llama-cpp-python", "llama_cpp"), ("gguf", "gguf"))
        if importlib.util.find_spec(module) is None
    ]
    if missing:
        raise UserError.of(
            "P653",
            f"comparing with llama.cpp needs {' and '.join(missing)}",
            help=INSTALL_HELP,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaRecipe:
    """Loads a random model of the same shape in llama.cpp with its default settings."""

    model: Model
    context: int
    threads: int
    folder: Path
    repack: bool = True
    """Repack weights at loading, as llama.cpp does by default; without, they stay mapped."""
    like: NeuronStore | None = None
    """A store whose words and routers the file has; see `write_gguf`."""
    given: Path | None = None
    """A file of real weights that it reads instead."""

    @property
    def subject(self) -> str:
        """See `pi2.benchmarks.contestant`."""
        return "llama.cpp"

    @property
    def file(self) -> Path:
        """The file that it reads, and writes if it is not there."""
        return self.given or find_gguf(self.model, self.folder, self.like)

    def __call__(self, progress: Progress) -> LlamaContestant:
        check_installed()
        path = self.file
        if not path.exists():
            write_gguf(self.model, path, progress, self.like)
        return LlamaContestant(self, path)


class LlamaContestant:
    """A model in llama.cpp; the low-level interface, as llama-bench uses it."""

    def __init__(self, recipe: LlamaRecipe, path: Path) -> None:
        import llama_cpp

        self._recipe = recipe
        self._library = llama_cpp
        self._silence = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._silence, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        start = time.perf_counter()
        settings = llama_cpp.llama_model_default_params()
        settings.use_extra_bufts = recipe.repack
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
        if not self._model:
            raise UserError.of(
                "P652",
                f"llama.cpp cannot load {path}",
                help="remove the file; it is written again",
            )
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
        """See `pi2.benchmarks.contestant`."""
        return Description(
            engine=f"llama.cpp (llama-cpp-python {self._library.__version__})",
            model=self._recipe.model.id,
            backend="cpu",
            threads=self._recipe.threads,
            synthetic=self._recipe.given is None,
            load_s=self._load_s,
            notes=(
                "default settings" if self._recipe.repack else "mapped, not repacked",
                "dense, SiLU" if self._recipe.given is None else "the same file",
            ),
        )

    def run(self, workload: Workload) -> Sample:
        """See `pi2.benchmarks.contestant`."""
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
        """Fill the context up to ``depth``, or take back what has come after it."""
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
        """Everything is read for every token."""
        if workload.kind == "pp":
            return None
        if self._recipe.given is not None:
            return None  # pi2 says what the file's tokens read
        return count_dense_bytes(self._recipe.model, position=workload.mean_position)

    def close(self) -> None:
        """See `pi2.benchmarks.contestant`."""
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
