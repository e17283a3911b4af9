"""Which neurons may fire: predictors and gates, of a layer or of each chosen expert."""

from collections.abc import Callable

import numpy as np

from pi2.arrays import F32, I32
from pi2.backends.compiler.runtime import BoundCall, Library
from pi2.backends.cpu.arrays import NeuronArrays
from pi2.backends.cpu.views import TensorViews, Views, wrap_all, wrap_table
from pi2.backends.kernels.spec import KernelSpec
from pi2.backends.protocol import BuildRequest
from pi2.model.tensor import name_layer_tensor


class Prediction:
    """Kernels that name neurons, and their last results."""

    def __init__(
        self,
        request: BuildRequest,
        arrays: NeuronArrays,
        spec: KernelSpec,
        library: Library,
        views: Views,
        tensors: TensorViews,
        later: Views,
    ) -> None:
        """``views``: arrays of the first chunk, which predictions read; ``later``: what predictions
        for the next layer read instead."""
        neurons, layers = request.neurons, request.model.shape.layers
        self._neurons = neurons
        self._is_mixture = request.model.moe is not None
        self.wanted: I32 = arrays.wanted
        self._indices: I32 = arrays.lists["indices"]
        self._found: I32 = arrays.lists["found"]
        self._scores: F32 = arrays.lists["scores"]
        self._named_scores: F32 = arrays.named_scores
        self._tokens = self._token = 0
        lists = wrap_all(library, arrays.lists)
        self.known_gates: list[Views] = []
        """By token, views of the gates that `find_open` computed, and of ``wanted``."""
        self._limits: list[tuple[float, ...]] = [()] * layers
        self._expert_limits = request.expert_limits
        self._gates: list[list[BoundCall]] = []
        """By layer and expert."""
        if spec.gates:
            scores = [library.wrap(row) for row in self._scores]
            wanted = library.wrap(self.wanted)
            self.known_gates = [{"scores": row, "indices": wanted} for row in scores]
            if spec.is_smooth:
                self._limits = list(request.limits or [(0.0, 0.0)] * layers)
            given = f"neurons {'limit' if spec.is_smooth else ''} first tokens"
            self._gates = [
                [
                    library.bind("predict_gate", given, gates, lists, views, layer=layer)
                    for gates in _wrap_gates(request, library, layer)
                ]
                for layer in range(layers if request.gate_rows else 0)
            ]
        self._expert_neurons = [
            order.reshape(request.model.expert_count, -1) for order in request.expert_neurons or ()
        ]
        middle = {rank: wrap_all(library, own) for rank, own in arrays.middle.items()}

        def bind_low_rank(read: Views) -> list[list[BoundCall]]:
            return [
                [
                    library.bind(
                        f"predict_low_rank_{rank}",
                        "neurons threshold first tokens",
                        *(weights, middle[rank], lists, read),
                        layer=layer,
                        name="predict_low_rank",
                    )
                    for rank, weights in _wrap_predictors(request, tensors, layer)
                ]
                for layer in range(layers if spec.ranks else 0)
            ]

        self._low_rank = bind_low_rank(views)
        """By layer and expert."""
        self._ahead = bind_low_rank(views | later) if later else self._low_rank

    def foresee(self, layer: int, threshold: float, tokens: int, *, is_next: bool) -> None:
        """Predict the neurons of a layer, which may be the next one, for all tokens."""
        calls = self._ahead if is_next else self._low_rank
        calls[layer][0](self._neurons, float(threshold), 0, tokens)

    def list_foreseen(self) -> I32:
        """Return the neurons that `foresee` has found for the selected token."""
        return self._list_found(self._token)

    @property
    def has_gates(self) -> bool:
        """Whether `find_open` may be called."""
        return bool(self._gates)

    def begin(self, tokens: int) -> None:
        self._tokens = tokens

    def select_token(self, number: int) -> None:
        self._token = number

    def get_second_limit(self, layer: int) -> tuple[float, ...]:
        """Return the layer's limit of act(gate) * up, if it has one."""
        return self._limits[layer][1:]

    def find_named(self, layer: int, threshold: float, experts: I32) -> I32:
        """Return the neurons whose predictor score reaches ``threshold``."""
        calls, least = self._low_rank[layer], float(threshold)
        if not self._is_mixture:
            if self._token == 0:
                calls[0](self._neurons, least, 0, self._tokens)
            return self._list_found(self._token)
        return self._collect(layer, experts, lambda size, n: calls[n](size, least, self._token, 1))

    def find_open(self, layer: int, experts: I32) -> I32:
        calls, limits = self._gates[layer], self._limits[layer][:1]
        if not self._is_mixture:
            if self._token == 0:
                calls[0](self._neurons, *limits, 0, self._tokens)
            return self._list_found(self._token)
        every = [limits] * len(calls)
        if limits and self._expert_limits is not None:
            every = [(limit,) for limit in self._expert_limits[layer]]
        return self._collect(
            layer, experts, lambda size, n: calls[n](size, *every[n], self._token, 1)
        )

    def _list_found(self, token: int) -> I32:
        return self._indices[token, : self._found[token]]

    def read_scores(self) -> F32:
        return self._named_scores if self._is_mixture else self._scores[self._token]

    def _collect(self, layer: int, experts: I32, find: Callable[[int, int], object]) -> I32:
        """Return the neurons, ascending, that ``find(neurons, expert)`` names of each expert."""
        groups, end = self._expert_neurons[layer], 0
        for expert in experts.tolist():
            find(groups.shape[1], expert)
            rows = self._list_found(0)
            count = len(rows)
            named = self.wanted[end : end + count]
            groups[expert].take(rows, out=named)
            self._named_scores[named] = self._scores[0].take(rows)
            end += count
        self.wanted[:end].sort()
        return self.wanted[:end]


def _wrap_gates(request: BuildRequest, library: Library, layer: int) -> list[Views]:
    assert request.gate_rows is not None
    if layer not in request.gate_rows:
        return []
    rows, scales = request.gate_rows[layer]
    wrapped = []
    for expert in range(request.model.expert_count):
        size = request.model.shape.ffn
        part = slice(expert * size, (expert + 1) * size)
        views = {"gate_weights": library.wrap(rows[part])}
        # Rows without scales stand in for them, and are not read as such.
        views["gate_scales"] = views["gate_weights"]
        views |= wrap_table(library, request.model.quantization.gates, "gate_scales")
        if scales is not None:
            views["gate_scales"] = library.wrap(scales[part].view(np.uint8))
        if request.gate_biases is not None:
            views["biases"] = library.wrap(request.gate_biases[layer][part].view(np.uint8))
        wrapped.append(views)
    return wrapped


def _wrap_predictors(
    request: BuildRequest, tensors: TensorViews, layer: int
) -> list[tuple[int, Views]]:
    parts = request.model.expert_count
    inner, outer, bias = (
        name_layer_tensor(layer, f"predictor_{part}") for part in ("in", "out", "bias")
    )
    rank = request.tensors[inner].rows // parts
    return [
        (rank, tensors.wrap_parts(expert, parts, inner=inner, outer=outer, bias=bias))
        for expert in range(parts)
    ]
