"""What low-rank predictors say of a whole chunk of tokens, and how right they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pi2.arrays import F32, I32, I64
from pi2.backends.experts import slice_tensor
from pi2.backends.protocol import BuildRequest, Tensor
from pi2.engine.observation import Routing
from pi2.plan.weights.rounding import dequantize
from pi2.plan.weights.tensor_names import name_layer_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRecall:
    """A layer's neurons over the tokens of a text."""

    active: float
    """Share of neurons with a non-zero activation."""
    predicted: float
    """Share of neurons that the predictor names."""
    recall: float | None
    """Share of active neurons that it names; None if no neuron was active."""


def compute_scores(request: BuildRequest, layer: int, inputs: F32) -> F32:
    """Scores [T, neurons] of a layer's predictors for FFN inputs [T, hidden], of all experts."""
    scores = np.empty((len(inputs), request.neurons), np.float32)
    for expert, neurons in enumerate(_list_groups(request, layer)):
        inner, outer, bias = (
            _read(request, layer, kind, expert)
            for kind in ("predictor_in", "predictor_out", "predictor_bias")
        )
        scores[:, neurons] = np.maximum(inputs @ inner.T, 0) @ outer.T + bias
    return scores


def can_compare(request: BuildRequest) -> bool:
    """Whether there are predictors, and it is known which neurons are whose expert's."""
    has_predictors = name_layer_tensor(0, "predictor_in") in request.tensors
    return has_predictors and (request.model.moe is None or request.expert_neurons is not None)


def _list_groups(request: BuildRequest, layer: int) -> I32:
    """Stored indices [experts, ffn] of the neurons of a layer's experts, or of its one FFN."""
    every = np.arange(request.neurons, dtype=np.int32)
    order = every if request.expert_neurons is None else request.expert_neurons[layer]
    return order.reshape(request.model.expert_count, -1)


def _read(request: BuildRequest, layer: int, kind: str, expert: int) -> F32:
    whole: Tensor = request.tensors[name_layer_tensor(layer, kind)]
    tensor = slice_tensor(whole, expert, request.model.expert_count)
    if tensor.precision is None:
        return np.asarray(tensor.weights, np.float32)
    weights = np.asarray(tensor.weights).view(np.uint8)
    return dequantize(weights, tensor.scales, tensor.length, tensor.precision)


class RecallCounter:
    """An observer of FFNs that compares predictors with what neurons do."""

    def __init__(self, request: BuildRequest) -> None:
        """The predictors are those of ``request``."""
        self.threshold = 0.0
        """Score from which a neuron counts as predicted."""
        self._request = request
        self._counts: dict[int, I64] = {}

    def __call__(
        self, layer: int, inputs: F32, activations: F32, routing: Routing | None = None
    ) -> None:
        predicted = compute_scores(self._request, layer, inputs) >= self.threshold
        active = activations != 0
        possible = active.size
        if routing is not None:
            # Predictors of experts that do not compute a token are not asked.
            computing = routing.computes[:, routing.owners]
            predicted &= computing
            possible = int(computing.sum())
        counts = (possible, active.sum(), predicted.sum(), (active & predicted).sum())
        known = self._counts.setdefault(layer, np.zeros(4, np.int64))
        known += np.array(counts, np.int64)

    def describe_layers(self) -> list[LayerRecall]:
        """Describe the shares of each layer."""
        return [
            LayerRecall(
                active=active / size,
                predicted=predicted / size,
                recall=found / active if active else None,
            )
            for size, active, predicted, found in (
                self._counts[layer].tolist() for layer in sorted(self._counts)
            )
        ]
