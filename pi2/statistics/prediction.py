"""What low-rank predictors say of a whole chunk of tokens, and how right they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pi2.backends.protocol import BuildRequest, Tensor
from pi2.plan.packing import dequantize
from pi2.plan.tensor_names import name_layer_tensor

F32 = npt.NDArray[np.float32]


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
    """Scores [T, neurons] of a layer's predictor for FFN inputs [T, hidden]."""
    inner = np.maximum(inputs @ _read(request, layer, "predictor_in").T, 0)
    outer = inner @ _read(request, layer, "predictor_out").T
    return np.asarray(outer + _read(request, layer, "predictor_bias"))


def _read(request: BuildRequest, layer: int, kind: str) -> F32:
    tensor: Tensor = request.tensors[name_layer_tensor(layer, kind)]
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
        self._counts: dict[int, npt.NDArray[np.int64]] = {}

    def __call__(self, layer: int, inputs: F32, activations: F32) -> None:
        predicted = compute_scores(self._request, layer, inputs) >= self.threshold
        active = activations != 0
        counts = (active.size, active.sum(), predicted.sum(), (active & predicted).sum())
        known = self._counts.setdefault(layer, np.zeros(4, np.int64))
        known += np.array(counts, np.int64)

    def describe_layers(self) -> list[LayerRecall]:
        """Shares by layer."""
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
