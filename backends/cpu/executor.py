"""The executor of the cpu backend: a program computes everything but neurons, kernels of a library
compute these."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pi2.arrays import F32, I32, I64, U8, Bits
from pi2.backends.arithmetic import read_rows
from pi2.backends.blocks.interpreter import CompiledInterpreter
from pi2.backends.compiler.runtime import BoundCall, Library
from pi2.backends.cpu.arrays import Arrays, NeuronArrays
from pi2.backends.cpu.neurons import NeighbourCalls, Neurons
from pi2.backends.cpu.prediction import Prediction
from pi2.backends.cpu.views import TensorViews, Views, measure_arrays, wrap_all, wrap_table
from pi2.backends.executor import Executor, ExecutorObserver
from pi2.backends.kernels.spec import KernelSpec
from pi2.backends.protocol import BuildRequest
from pi2.formats import find_packing
from pi2.model.tensor import name_layer_tensor
from pi2.plan.weights.layout import GROUP, Precision, split_lanes


def order_by_lanes(hidden: int, precision: Precision) -> I32 | None:
    """Elements [hidden] in *lane order* (`pi2.backends.kernels.neurons`): natural position of each;
    None if both orders are the same."""
    if find_packing(precision).is_plain:
        return None
    blocks, first = [], 0
    for lanes in split_lanes(hidden):
        elements = np.arange(first, first + lanes * GROUP, dtype=np.int32).reshape(lanes, GROUP)
        # Within a block, element e of all its groups comes before element e + 1 of any.
        blocks.append(elements.T.reshape(-1))
        first += lanes * GROUP
    return np.concatenate(blocks)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Arrays of a chunk's neurons, and the calls that take them: ``begin`` and ``neighbours`` by
    layer."""

    arrays: Arrays
    begin: list[BoundCall]
    end: BoundCall
    neighbours: list[NeighbourCalls]


class CpuExecutor(Executor):
    """Computes neurons by kernels of a library."""

    def __init__(self, request: BuildRequest, spec: KernelSpec, path: Path) -> None:
        """``path``: the library of the kernels of neurons, which the program's threads compute."""
        model, layers = request.model, range(request.model.shape.layers)
        super().__init__(request)
        interpreter = self.program.interpreter
        assert isinstance(interpreter, CompiledInterpreter)
        launcher = interpreter.workers.find_launcher()
        library = Library(path, measure_arrays(request), launcher=launcher)
        self._spec, self._library = spec, library
        self._lanes = order_by_lanes(spec.hidden, spec.precision.ffn)
        self._shares_arrays = request.chunks == 1
        """Whether the program's arrays belong to the only chunk."""
        memory = self.program.memory
        arrays = NeuronArrays(spec, request, memory, keeps_read=self.program.layers.keeps_read)
        for chunk, read in zip(arrays.chunks, self.kept_reads, strict=False):
            chunk["hidden_values"] = read
        given = {"given": library.wrap(self.view(self.exchange.given, spec.hidden))}
        given |= wrap_table(library, spec.precision.gates, "block_table")
        each = [self._share_areas() | chunk for chunk in arrays.chunks]
        chunks = [wrap_all(library, chunk) | given for chunk in each]
        views, tensors = chunks[0], TensorViews(library, request.tensors)
        later: Views = {}
        if spec.foresees:
            ahead = self.exchange.ahead
            assert ahead is not None
            later = {"hidden_values": library.wrap(self.view(ahead, spec.hidden))}
        self._prediction = Prediction(request, arrays, spec, library, views, tensors, later)
        scratch = self.program.scratch
        self._neurons = Neurons(request, arrays, spec, library, views, self._prediction, scratch)
        deviations = [model.blocks[layer].ffn.cutoff for layer in layers]
        self._signs: list[tuple[float, ...]] = [
            () if own is None else (math.copysign(1.0, own),) for own in deviations
        ]
        """By layer, the side of their mean on which gates have a cutoff; nothing without one."""
        self._cutoffs = wrap_all(library, arrays.cutoffs)
        self._layers = [
            tensors.wrap_parts(0, 1, gate_cutoff=name_layer_tensor(layer, "gate_cutoff"))
            for layer in layers
        ]
        self._chunks = [
            _Chunk(
                own,
                self._bind_begin("ffn", seen),
                library.bind("end_ffn", "tokens", seen, name="end_ffn"),
                self._neurons.bind_chunk(seen),
            )
            for own, seen in zip(each, chunks, strict=True)
        ]
        self._now = self._chunks[0]
        self._step_begin = self._now.begin
        if spec.sequences and spec.has_other_chunks:
            self._step_begin = self._bind_begin("step", views)
        if later:
            # What the following layer would read is rounded in the place of this one's.
            kind = "step" if self._step_begin is not self._now.begin else "ffn"
            seen = views | later
            self._read_ahead = library.bind(f"begin_{kind}", "tokens", seen, name="begin_ffn")
        self._down_biases: list[F32] = []
        """By layer of an MoE model whose FFNs have biases [experts, hidden]."""
        if model.moe is not None and model.ffn.bias:
            self._down_biases = [
                read_rows(request.tensors[name_layer_tensor(layer, "down_bias")])
                for layer in layers
            ]
        self._has_cutoffs = False
        """Whether gates of the layer that is computed have a cutoff."""

    def _share_areas(self) -> Arrays:
        """Return the program's arrays that neurons read."""
        shared = {"hidden_values": self.view(self.exchange.read, self._spec.hidden)}
        if self.exchange.routes is not None:
            shared["routes"] = self.view(self.exchange.routes, self._spec.experts)
        return shared

    def _bind_begin(self, what: str, views: Views) -> list[BoundCall]:
        """Return the calls that begin the neurons of each layer, in a chunk (``ffn``) or a step."""
        calls = []
        for layer, own in enumerate(self._layers):
            name, given = f"begin_{what}", "tokens"
            if self._signs[layer]:
                name, given = f"begin_cut_{what}", "tokens sign"
            arrays = (own, self._cutoffs, views)
            calls.append(self._library.bind(name, given, *arrays, layer=layer, name="begin_ffn"))
        return calls

    def select_chunk(self, number: int) -> None:
        super().select_chunk(number)
        self._now = self._chunks[number]

    def select_token(self, number: int) -> None:
        super().select_token(number)
        self._prediction.select_token(number)
        self._neurons.select_token(number)

    def begin_ffn(self, layer: int) -> None:
        """Compute what neurons read, and clear their sum."""
        self.read_layer(layer)
        self._begin(layer)

    def _begin(self, layer: int) -> None:
        if not self._shares_arrays:
            self._take_arrays()
        begin = self._step_begin if self.is_step else self._now.begin
        begin[layer](self.tokens, *self._signs[layer])
        self._has_cutoffs = bool(self._signs[layer])
        self._prediction.begin(self.tokens)
        if self._observer is not None:
            self._observer.begin_ffn(layer)

    def _take_arrays(self) -> None:
        """Copy what neurons read to the chunk's own arrays."""
        for name, area in self._share_areas().items():
            self._now.arrays[name][: self.tokens] = area[: self.tokens]

    @property
    def foresees(self) -> bool:
        return self._spec.foresees

    def foresee(self, following: int, layer: int, threshold: float) -> None:
        self.read_layer(layer)
        if following != layer:
            self._read_ahead(self.tokens)
            self._prediction.foresee(following, threshold, self.tokens, is_next=True)
        self._begin(layer)
        if following == layer:
            self._prediction.foresee(layer, threshold, self.tokens, is_next=False)

    def list_foreseen(self) -> I32:
        return self._prediction.list_foreseen()

    def predict_low_rank(self, layer: int, threshold: float, experts: I32 | None = None) -> I32:
        """Return the neurons whose predictor score reaches ``threshold``."""
        chosen = self.list_experts() if experts is None else experts
        return self._prediction.find_named(layer, threshold, chosen)

    def read_scores(self) -> F32:
        return self._prediction.read_scores()

    def predict_gate(self, layer: int) -> I32:
        assert self._prediction.has_gates, "gate rows were not given to build"
        return self._prediction.find_open(layer, self.list_experts())

    def find_open(self, layer: int, arena: U8, slots: I32, indices: I32 | None = None) -> Bits:
        return self._neurons.find_open(layer, arena, slots, indices)

    def add_neurons(
        self, layer: int, arena: U8, slots: I32, indices: I32 | None = None, known: bool = False
    ) -> None:
        self._neurons.add_gathered(layer, arena, slots, indices, known)

    def add_named_neurons(
        self, layer: int, arena: U8, slots: I32, indices: I32, named: I64, known: bool = False
    ) -> None:
        tokens = self.tokens
        if not self._neurons.can_share(tokens, known):
            super().add_named_neurons(layer, arena, slots, indices, named, known)
        elif len(slots):
            self._neurons.add_shared(layer, arena, slots, indices, named, tokens)

    def add_dense(self, layer: int, bundles: U8, first: int = 0) -> None:
        now = self._now
        routes = None if self._model.moe is None else self.read_routes()
        if self._observer is not None:
            self._observer.add_dense(layer, bundles, first)
        self._neurons.add_neighbours(
            bundles, first, self.tokens, now.neighbours[layer], routes, is_step=self.is_step
        )

    def share_input(self) -> tuple[F32, F32 | None]:
        """Return what neurons read, before it was rounded to integers, and the routes."""
        read: F32 = self._now.arrays["hidden_values"][: self.tokens]
        return read, None if self._model.moe is None else self.read_routes()

    def add_sum(self, values: F32) -> None:
        if self._lanes is not None:
            values = values.take(self._lanes, axis=1)
        self._now.arrays["y"][: len(values)] += values

    def end_ffn(self, layer: int) -> None:
        """Give the neurons' sum to the program."""
        if self._observer is not None:
            self._observer.end_ffn(layer)
        if self._down_biases:
            # Here, because a plan may change the routes after ``begin_ffn``.
            routes, biases = self.read_routes(), self._down_biases[layer]
            used = np.flatnonzero(routes.any(axis=0))
            self.add_sum(np.asarray(routes[:, used] @ biases[used]))
        self._now.end(self.tokens)
        self.finish(layer)

    def read_routes(self) -> F32:
        """Return the weights of an MoE model's experts."""
        routes: F32 = self._now.arrays["routes"][: self.tokens]
        return routes

    def read_cutoffs(self) -> F32 | None:
        if not self._has_cutoffs:
            return None
        found: F32 = self._now.arrays["cutoffs"][: self.tokens, None]
        return found

    def count_active(self) -> int:
        """Return the non-zero activations since the last call."""
        return self._neurons.count_active()

    def observe(self, observer: ExecutorObserver | None) -> None:
        super().observe(observer)
        self._library.observe(None if observer is None else observer.note_kernel)

    def close(self) -> None:
        super().close()
        self._library.close()
        self._neurons.close()
        self._chunks.clear()
