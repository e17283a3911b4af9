"""The dense tensors of a model in float32, and the norms whose weights they are."""

from __future__ import annotations

import numpy as np

from pi2.arrays import F32, I32
from pi2.backends.protocol import BuildRequest, Tensor
from pi2.backends.reference.operators import normalize
from pi2.plan.weights.rounding import dequantize
from pi2.plan.weights.tensor_names import name_layer_tensor


class DenseTensors:
    """Widens them when they are asked for."""

    def __init__(self, request: BuildRequest) -> None:
        self._tensors = request.tensors
        self._model = request.model

    def read(self, name: str) -> F32:
        """Return a tensor [rows, length]."""
        return widen(self._tensors[name])

    def read_layer(self, layer: int, kind: str) -> F32:
        """Return a tensor of a layer [rows, length]."""
        return self.read(name_layer_tensor(layer, kind))

    def take_rows(self, name: str, rows: I32) -> F32:
        """Return rows of an embedding [n, length]."""
        tensor = self._tensors[name]
        assert tensor.precision is not None
        weights = np.asarray(tensor.weights).view(np.uint8)[rows]
        scales = None if tensor.scales is None else tensor.scales[rows]
        return dequantize(weights, scales, tensor.length, tensor.precision)

    def normalize(self, x: F32, name: str) -> F32:
        """Return the norm of x [T, hidden] whose weights are the tensor ``name``."""
        bias = self.read(f"{name}_bias") if self._model.norm.bias else None
        width = self._model.shape.hidden
        return normalize(self._model.norm, x, self.read(name), bias, width)

    def normalize_input(self, x: F32, layer: int, kind: str) -> F32:
        """Return what attention or the FFN reads of x [T, hidden]."""
        if not self._model.norm.inputs:
            return x
        return self.normalize(x, name_layer_tensor(layer, kind))

    def normalize_output(self, output: F32, layer: int, kind: str) -> F32:
        """Return what is added of what attention or the FFN gives [T, hidden]."""
        if not self._model.norm.outputs:
            return output
        weights, width = self.read_layer(layer, kind), self._model.shape.hidden
        return normalize(self._model.norm, output, weights, width=width)


def widen(tensor: Tensor) -> F32:
    """Return a tensor in float32 [rows, length]."""
    if tensor.precision is None:
        return tensor.weights.reshape(tensor.rows, tensor.length).astype(np.float32)
    weights = np.asarray(tensor.weights).view(np.uint8)
    return dequantize(weights, tensor.scales, tensor.length, tensor.precision)
