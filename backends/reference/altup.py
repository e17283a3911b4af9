"""Residual streams that predict each other, and LAuReL (`pi2.plan.documents.model_residual`)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from pi2.arrays import F32
from pi2.backends.reference.operators import normalize
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_residual import SMALLEST_SQUARE
from pi2.plan.weights.tensor_names import STREAM_IN, STREAM_OUT, name_layer_tensor


class AltUp:
    """Computes them for a model; one without them asks for none.

    Of T tokens, ``x`` [T, hidden] is the first stream, ``others`` [streams - 1, T, hidden] are the
    rest.
    """

    def __init__(self, model: Model, read: Callable[[str], F32]) -> None:
        """``read`` gives a tensor of the store in float32 [rows, length]."""
        self._model = model
        self._read = read
        self._count = 0 if model.altup is None else model.altup.streams - 1

    def make_none(self) -> F32:
        """The other streams of no token."""
        return np.zeros((self._count, 0, self._model.shape.stored_hidden), np.float32)

    def make(self, x: F32) -> F32:
        """The other streams of embeddings ``x``."""
        projected = x @ self._read(STREAM_IN).T
        each = (len(x), self._count, x.shape[1])
        return self._scale_like(x, np.moveaxis(projected.reshape(each), 1, 0))

    def _scale_like(self, x: F32, others: F32) -> F32:
        """``others`` with the root mean square of ``x``."""
        width = self._model.shape.hidden
        wanted = np.sqrt(np.square(x).sum(axis=-1, keepdims=True) / width)
        squares = np.square(others).sum(axis=-1, keepdims=True) / width
        found = np.sqrt(np.maximum(squares, np.float32(SMALLEST_SQUARE)))
        return np.asarray(others * (wanted / found), np.float32)

    def predict(self, layer: int, x: F32, others: F32) -> tuple[F32, F32]:
        """What ``layer`` begins with: predictions of all streams."""
        streams = np.concatenate([x[None], others])
        shape = (len(x), len(streams), len(streams))
        routed = self._route(layer, x) @ self._read(name_layer_tensor(layer, "altup_predict")).T
        predicted = streams + np.einsum("tba,ath->bth", routed.reshape(shape), streams)
        return predicted[0], predicted[1:]

    def correct(self, layer: int, x: F32, before: F32, others: F32) -> tuple[F32, F32]:
        """What ``layer`` gives, by predictions ``before`` and ``others`` and ``x`` as attention and
        the FFN have changed it."""
        factors = (
            1 + self._route(layer, x) @ self._read(name_layer_tensor(layer, "altup_correct")).T
        )
        changes = factors.T[:, :, None] * (x - before)
        return before + changes[0], others + changes[1:]

    def _route(self, layer: int, x: F32) -> F32:
        """What coefficients are made of [T, streams]."""
        weight = self._read(name_layer_tensor(layer, "altup_router_norm"))
        width = self._model.shape.hidden
        read = normalize(self._model.norm, x, weight, width=width) / np.float32(width)
        return np.tanh(read @ self._read(name_layer_tensor(layer, "altup_router")).T)

    def add_laurel(self, layer: int, x: F32, read: F32) -> F32:
        """``x`` after attention, which has ``read`` [T, hidden], and LAuReL."""
        inner = read @ self._read(name_layer_tensor(layer, "laurel_in")).T
        weights = self._read(name_layer_tensor(layer, "laurel_out"))
        output = np.pad(inner, ((0, 0), (0, weights.shape[1] - inner.shape[1]))) @ weights.T
        weight = self._read(name_layer_tensor(layer, "laurel_norm"))
        output = normalize(self._model.norm, output, weight, width=self._model.shape.hidden)
        return np.asarray((x + read + output) * np.float32(math.sqrt(0.5)))

    def scale_gate_input(self, layer: int, x: F32) -> F32:
        """What gates the layer's own embedding."""
        altup = self._model.altup
        if altup is None or not altup.scaled:
            return x
        return x * self._read(name_layer_tensor(layer, "altup_scale"))

    def join(self, x: F32, others: F32) -> F32:
        """What the last norm reads."""
        weights = self._read(STREAM_OUT).reshape(self._count, x.shape[1], -1)
        projected = np.einsum("nth,nkh->ntk", others, weights)
        streams = np.concatenate([x[None], self._scale_like(x, projected)])
        return np.asarray(streams.mean(axis=0))
