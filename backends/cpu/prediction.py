"""Which neurons may fire: predictors and gates, of a layer or of each chosen expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pi2.arrays import F32, I32
from pi2.backends.chunk_state import Arguments
from pi2.backends.compiler.runtime import Library
from pi2.backends.cpu.workspace import Workspace
from pi2.backends.kernels.spec import KernelSpec
from pi2.backends.protocol import BuildRequest
from pi2.plan.weights.layout import round_up
from pi2.plan.weights.tensor_names import name_layer_tensor


class Prediction:
    """Kernels that name neurons, their arguments, and what they found last."""

    def __init__(
        self,
        request: BuildRequest,
        space: Workspace,
        spec: KernelSpec,
        library: Library,
        hidden: Arguments,
    ) -> None:
        neurons, layers = request.neurons, request.model.shape.layers
        self._neurons = neurons
        self._is_mixture = request.model.moe is not None
        self.wanted: I32 = space.make("int32", neurons)
        """Room for the stored indices of neurons."""
        rows = request.sequences
        # Of every token in whole lines.
        self._indices = space.make("int32", rows, round_up(neurons, 16))
        self._found = space.make("int32", rows)
        self._scores = space.make("float32", rows, round_up(neurons, 16))
        self._is_several = spec.sequences
        self._tokens = self._token = 0
        self._named_scores = space.make("float32", neurons if spec.experts else 1)
        scores = space.wrap(self._scores)
        found = (scores, space.wrap(self._indices), space.wrap(self._found))
        self._known_gates: list[Arguments] = []
        self._limits: list[tuple[float, ...]] = [()] * layers
        self._expert_limits = request.expert_limits
        self._open: Any = None
        if spec.gate_rows is not None:
            self._open = library.find("predict_gate")
            views = [space.wrap(row) for row in self._scores] if spec.sequences else [scores]
            self._known_gates = [(view, space.wrap(self.wanted)) for view in views]
            if spec.is_smooth:
                self._limits = list(request.limits or [(0.0, 0.0)] * layers)
            self._gate_arguments = [
                [(*gates, *hidden, *found) for gates in _bind_gates(request, space, layer)]
                for layer in range(layers)
            ]
        self._expert_neurons = [
            order.reshape(request.model.expert_count, -1) for order in request.expert_neurons or ()
        ]
        self._low_rank = _bind_predictors(request, space, spec, library, hidden, found)

    @property
    def has_gates(self) -> bool:
        """Whether `find_open` may be called."""
        return self._open is not None

    def begin(self, tokens: int) -> None:
        """Let the next predictions be those of so many tokens."""
        self._tokens = tokens

    def select_token(self, number: int) -> None:
        """Let predictions be those of another token."""
        self._token = number

    def get_known_gates(self, token: int = 0) -> Arguments:
        """Return views of the gates that `find_open` computed for a token, and of ``wanted``."""
        return self._known_gates[token]

    def get_second_limit(self, layer: int) -> tuple[float, ...]:
        """Return the layer's limit of act(gate) * up, if it has one."""
        return self._limits[layer][1:]

    def find_named(self, layer: int, threshold: float, experts: I32) -> I32:
        """Return the neurons whose predictor score reaches ``threshold``."""
        kernel, arguments = self._low_rank[layer]
        if not self._is_mixture:
            if self._token == 0:
                kernel(self._neurons, float(threshold), *self._list_all(), *arguments[0])
            return self._list_found(self._token)
        one = self._list_one()
        return self._collect(
            layer, experts, lambda size, n: kernel(size, float(threshold), *one, *arguments[n])
        )

    def find_open(self, layer: int, experts: I32) -> I32:
        """Return the neurons whose gate is open."""
        kernel, arguments = self._open, self._gate_arguments[layer]
        limits = self._limits[layer][:1]
        if not self._is_mixture:
            if self._token == 0:
                kernel(self._neurons, *limits, *self._list_all(), *arguments[0])
            return self._list_found(self._token)
        one = self._list_one()
        every = [limits] * len(arguments)
        if limits and self._expert_limits is not None:
            every = [(limit,) for limit in self._expert_limits[layer]]
        return self._collect(
            layer, experts, lambda size, n: kernel(size, *every[n], *one, *arguments[n])
        )

    def _list_all(self) -> tuple[int, ...]:
        """First token and number of tokens of a prediction for all, where kernels ask."""
        return (0, self._tokens) if self._is_several else ()

    def _list_one(self) -> tuple[int, ...]:
        """The same of a prediction for the selected one; its results are those of token 0."""
        return (self._token, 1) if self._is_several else ()

    def _list_found(self, token: int) -> I32:
        return self._indices[token, : self._found[token]]

    def read_scores(self) -> F32:
        """Return the scores of the last prediction."""
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

    def close(self) -> None:
        """Forget the kernels' views."""
        self._low_rank.clear()


def _bind_gates(request: BuildRequest, space: Workspace, layer: int) -> list[Arguments]:
    """Return views of the gate rows, scales and biases of each of a layer's experts."""
    assert request.gate_rows is not None
    rows, scales = request.gate_rows[layer]
    bound = []
    for expert in range(request.model.expert_count):
        size = request.model.shape.ffn
        part = slice(expert * size, (expert + 1) * size)
        weights = space.wrap(rows[part])
        views: Arguments = (weights,)
        views += (weights if scales is None else space.wrap(scales[part].view(np.uint8)),)
        if request.gate_biases is not None:
            views += (space.wrap_floats(request.gate_biases[layer][part]),)
        bound.append(views)
    return bound


def _bind_predictors(
    request: BuildRequest,
    space: Workspace,
    spec: KernelSpec,
    library: Library,
    hidden: Arguments,
    found: Arguments,
) -> list[tuple[Any, list[Arguments]]]:
    """Return kernel and arguments of every expert for each layer; empty if the model has no
    predictors."""
    if not spec.ranks:
        return []
    rows = request.sequences
    middle = {rank: space.make_activations(rows, rank, spec.planes) for rank in spec.ranks}
    bound = []
    for layer in range(request.model.shape.layers):
        parts = request.model.expert_count
        names = [name_layer_tensor(layer, f"predictor_{part}") for part in ("in", "out", "bias")]
        rank = request.tensors[names[0]].rows // parts
        arguments = [
            (
                *space.wrap_part(names[0], expert, parts),
                *space.wrap_part(names[1], expert, parts),
                *space.wrap_part(names[2], expert, parts),
                *hidden,
                *middle[rank],
                *found,
            )
            for expert in range(parts)
        ]
        bound.append((library.find(f"predict_low_rank_{rank}"), arguments))
    return bound
