"""llama.cpp as a contestant of `pi2.measuring.session`: the low-level interface of
llama-cpp-python, as llama-bench uses it."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pi2.diagnostics import UserError
from pi2.engine.accounts import TokenBytes, count_kv, size_tensor
from pi2.measuring.contestant import Profile
from pi2.measuring.report import Description, Sample, TokenSource, Workload
from pi2.model.tensor import EMBEDDING, HEAD
from pi2.model.tensors import list_tensors
from pi2.plan.documents.model import Model
from pi2.progress import Progress


def check_installed() -> None:
    """Exit with advice if llama-cpp-python is missing."""
    if importlib.util.find_spec("llama_cpp") is None:
        sys.exit(
            "comparing with llama.cpp needs llama-cpp-python: CMAKE_ARGS=-DGGML_NATIVE=ON "
            "pip install --no-binary llama-cpp-python 'pi2[bench]' compiles it: nine minutes and "
            "more on two cores"
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
            engine=f"llama.cpp (llama-cpp-python {self._library.__version__}, "
            + ("repacked)" if self._recipe.repack else "mapped)"),
            model=self._recipe.model.id,
            backend="cpu",
            threads=self._recipe.threads,
            synthetic=self._recipe.synthetic,
            load_s=self._load_s,
            notes=(
                describe_features(self._library.llama_print_system_info()),
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


def describe_features(info: bytes) -> str:
    """The features that a library says it was built with."""
    parts = [part.split(":")[-1].split("=") for part in info.decode().split("|") if "=" in part]
    return "built with " + " ".join(name.strip() for name, on in parts if on.strip() == "1")


def count_dense_bytes(model: Model, *, position: float) -> TokenBytes:
    """Bytes per token of a dense engine with an fp16 KV cache and the same precisions."""
    shape = model.shape
    sizes = {tensor.name: size_tensor(tensor) for tensor in list_tensors(model, None)}
    embedding = sizes.pop(EMBEDDING)
    head = embedding if model.tied_head else sizes.pop(HEAD)
    bundle = model.lay_out_bundle()
    return TokenBytes(
        attention=sum(sizes.values()) + embedding / shape.vocab,
        head=head,
        predictor=0.0,
        neurons=model.token_neurons * (2 * bundle.gate_bytes + bundle.down_bytes),
        kv=count_kv(model, position, "fp16"),
    )
