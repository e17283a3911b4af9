"""Which neurons may fire: predictors and gates, of a layer or of each chosen expert."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pi2.arrays import F32, I32, Bits
from pi2.backends.experts import slice_tensor
from pi2.backends.protocol import BuildRequest, Tensor
from pi2.backends.reference.operators import activate
from pi2.plan.weights.rounding import dequantize
from pi2.plan.weights.tensor_names import name_layer_tensor


class Prediction:
    """Names neurons for the input ``u`` [1, hidden] of a token's FFN."""

    def __init__(self, request: BuildRequest, widen: Callable[[Tensor], F32]) -> None:
        """``widen`` makes a tensor float32."""
        self._request = request
        self._model = request.model
        self._widen = widen
        self.scores: F32 = np.zeros(0, np.float32)
        """Scores [neurons] of the last prediction by predictors; -inf where none was asked."""

    def find_named(self, layer: int, threshold: float, u: F32, experts: I32) -> I32:
        """Return the neurons, of ``experts`` in a mixture, whose score reaches ``threshold``."""
        if self._model.moe is None:
            self.scores = self.score(layer, 0, u)[0]
        else:
            groups = self._group(layer)
            self.scores = np.full(self._request.neurons, -np.inf, np.float32)
            for expert in experts.tolist():
                self.scores[groups[expert]] = self.score(layer, expert, u)[0]
        return np.flatnonzero(self.scores >= threshold).astype(np.int32)

    def score(self, layer: int, expert: int, u: F32) -> F32:
        """Predictor scores [T, ffn] of the neurons of an expert (0 without experts) at inputs
        ``u`` [T, hidden]."""
        inner, outer, bias = (
            self._widen(
                slice_tensor(
                    self._request.tensors[name_layer_tensor(layer, kind)],
                    expert,
                    self._model.expert_count,
                )
            )
            for kind in ("predictor_in", "predictor_out", "predictor_bias")
        )
        return np.asarray(np.maximum(u @ inner.T, 0) @ outer.T + bias)

    def find_open(self, layer: int, u: F32, experts: I32, cutoffs: F32 | None) -> I32:
        """Return the neurons, of ``experts`` in a mixture, whose gates are open.

        By the layer's gate rows; ``cutoffs`` [1, 1] of gates, where the layer has them.
        """
        assert self._request.gate_rows is not None
        weights, scales = self._request.gate_rows[layer]
        layout = self._request.bundle
        gate = dequantize(weights, scales, layout.hidden, layout.precision) @ u[0]
        if self._request.gate_biases is not None:
            gate = gate + self._request.gate_biases[layer]
        if self._model.is_smooth:
            value = activate(self._model, gate[None], None, cutoffs)[0]
            fires = np.abs(value) >= self._find_gate_limits(layer)
            if cutoffs is not None:
                fires &= value != 0
        else:
            fires = self.is_open(gate)
        if self._request.expert_neurons is None:
            return np.flatnonzero(fires).astype(np.int32)
        groups = self._group(layer)
        named = [groups[n][fires.reshape(groups.shape)[n]] for n in experts.tolist()]
        return np.sort(np.concatenate(named))

    def is_open(self, gates: F32) -> Bits:
        """Whether these gates, of an activation that is not smooth, let anything through."""
        fatrelu = self._model.ffn.activation == "fatrelu"
        return np.asarray(gates > (self._model.ffn.threshold if fatrelu else 0.0))

    def get_limits(self, layer: int) -> tuple[float, float]:
        """What counts as zero of a smooth activation, and of its product with the up."""
        return (0.0, 0.0) if self._request.limits is None else self._request.limits[layer]

    def _find_gate_limits(self, layer: int) -> F32 | float:
        """The first limit: of the layer, or in a mixture of every gate row [neurons]."""
        if self._request.expert_limits is None:
            return self.get_limits(layer)[0]
        limits = np.array(self._request.expert_limits[layer], np.float32)
        return np.repeat(limits, self._model.shape.ffn)

    def _group(self, layer: int) -> I32:
        """Stored indices of the neurons of each expert [experts, ffn]."""
        assert self._request.expert_neurons is not None
        return self._request.expert_neurons[layer].reshape(self._model.expert_count, -1)
