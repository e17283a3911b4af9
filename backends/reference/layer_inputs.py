"""Embeddings that layers have of their own: what is made of them, and what a layer adds."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from pi2.arrays import F32
from pi2.backends.reference.operators import activate, normalize
from pi2.plan.documents.model import Model
from pi2.plan.weights.tensor_names import (
    LAYER_PROJECTION,
    LAYER_PROJECTION_NORM,
    name_layer_tensor,
)


class LayerInputs:
    """Computes them for a model; one without such embeddings asks for none."""

    def __init__(self, model: Model, read: Callable[[str], F32]) -> None:
        """``read`` gives a tensor of the store in float32 [rows, length]."""
        self._model = model
        self._read = read

    def make_none(self) -> F32:
        """What layers have of no token."""
        return np.zeros((self._model.shape.layers, 0, 0), np.float32)

    def make(self, rows: F32, x: F32) -> F32:
        """What layers add of their own [layers, T, width], by the table's ``rows`` [T, layers width
        or more] and the first layer's input ``x`` [T, hidden]."""
        own, layers = self._model.layer_embedding, self._model.shape.layers
        assert own is not None
        each = (len(x), layers, own.width)
        found = (rows[:, : layers * own.width] * np.float32(own.factor)).reshape(each)
        projected = (x @ self._read(LAYER_PROJECTION).T) * np.float32(own.projection_factor)
        weight = self._read(LAYER_PROJECTION_NORM)[:, : own.width]
        projected = normalize(self._model.norm, projected.reshape(each), weight)
        both = (projected + found) * np.float32(math.sqrt(0.5))
        return np.ascontiguousarray(both.transpose(1, 0, 2))

    def mix(self, layer: int, x: F32, added: F32) -> F32:
        """What ``layer`` adds to ``x`` [T, hidden] of its own ``added`` [T, width]."""
        gate = x @ self._read(name_layer_tensor(layer, "layer_input_gate")).T
        value = activate(self._model, gate, None) * added
        weights = self._read(name_layer_tensor(layer, "layer_input_output"))
        padding = ((0, 0), (0, weights.shape[1] - value.shape[1]))
        output = np.pad(value, padding) @ weights.T
        weight = self._read(name_layer_tensor(layer, "layer_input_norm"))
        return normalize(self._model.norm, output, weight, width=self._model.shape.hidden)
