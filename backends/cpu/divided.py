"""What the executor does beside its kernels where another unit computes rows of projections and of
the head: norms of what both read, and the other unit's products put into their places."""

from __future__ import annotations

import numpy as np

from pi2.arrays import F32
from pi2.backends.protocol import BuildRequest
from pi2.backends.reference.operators import cap, normalize
from pi2.plan.weights.tensor_names import FINAL_NORM, HEAD_BIAS, name_layer_tensor


class DividedEnds:
    """Norms before projections and head, and what comes after products."""

    def __init__(self, request: BuildRequest) -> None:
        self._request = request
        self._model = request.model

    def _read(self, name: str) -> F32 | None:
        """A float32 tensor [1, n] as a vector; None where the model has none."""
        tensor = self._request.tensors.get(name)
        return None if tensor is None else np.asarray(tensor.weights).view(np.float32).reshape(-1)

    def normalize(self, x: F32, name: str) -> F32:
        """``x`` [T, hidden] by the norm ``name``."""
        weight = self._read(name)
        assert weight is not None, name
        bias = self._read(f"{name}_bias") if self._model.norm.bias else None
        return normalize(self._model.norm, x, weight, bias, self._model.shape.hidden)

    def normalize_attention(self, x: F32, layer: int) -> F32:
        """What a layer's projection reads [T, hidden]."""
        if not self._model.norm.inputs:
            return x
        return self.normalize(x, name_layer_tensor(layer, "attention_norm"))

    def normalize_head(self, x: F32) -> F32:
        """What the head reads [T, hidden]."""
        return self.normalize(x, FINAL_NORM)

    def put_projected(self, qkv: F32, layer: int, values: F32) -> None:
        """Set the first columns of ``qkv`` [T, rows] to ``values`` [T, n] and their biases."""
        bias = self._read(name_layer_tensor(layer, "qkv_bias"))
        count = values.shape[1]
        qkv[:, :count] = values if bias is None else values + bias[:count]

    def put_output(self, x: F32, layer: int, values: F32) -> None:
        """Add ``values`` [T, n] and their biases to the first columns of ``x`` [T, hidden]."""
        bias = self._read(name_layer_tensor(layer, "output_bias"))
        count = values.shape[1]
        total = values if bias is None else values + bias[:count]
        x[:, :count] += total * np.float32(self._model.multipliers.residual)

    def put_logits(self, logits: F32, values: F32) -> None:
        """Set the first columns of ``logits`` [T, vocab] by ``values`` [T, n]."""
        count = values.shape[1]
        bias = self._read(HEAD_BIAS) if self._model.head_bias else None
        total = values if bias is None else values + bias[:count]
        total = total * np.float32(self._model.multipliers.logits)
        logits[:, :count] = cap(total, self._model.logit_softcap)
