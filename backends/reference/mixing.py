"""What mixes tokens in a layer, step by step: attention, or a layer with a state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pi2.arrays import F32
from pi2.backends.protocol import BuildRequest
from pi2.backends.reference.attention import Attention
from pi2.backends.reference.dense_tensors import DenseTensors
from pi2.backends.reference.latent import LatentAttention
from pi2.backends.reference.operators import normalize
from pi2.backends.reference.states import States
from pi2.plan.arithmetic.rows import DividedRows
from pi2.plan.documents.model_states import Mixer
from pi2.plan.weights.states import describe_state
from pi2.plan.weights.tensor_names import name_state_tensor

Part = tuple[slice, int, int]
"""Tokens of a sequence, the sequence, and the position of the first of them."""


class Mixing:
    """One mixer after the other: a layer may have two of them."""

    def __init__(self, request: BuildRequest, tensors: DenseTensors) -> None:
        self._model = request.model
        self._tensors = tensors
        latent = self._model.attention.latent
        self.attention = Attention(request) if latent is None else LatentAttention(request)
        """Keys and values."""
        self._shape = describe_state(self._model)
        self.states = None if self._shape is None else States(request, self._shape)
        """States of layers that have one; None without such layers."""
        self._divided = request.rows or DividedRows(unit="")
        self._mixer: Mixer = "attention"
        self._number = 0
        """Which of the layer's mixers it is."""
        self.read: F32 = np.zeros((0, self._model.shape.stored_hidden), np.float32)
        """What it reads [T, hidden]."""
        self._products = self._gates = self._mixed = self._output = self.read

    def begin(self, layer: int, number: int, read: F32) -> None:
        """Let the calls that follow be about a layer's mixer ``number``, which reads ``read`` [T,
        hidden]."""
        self._mixer, self._number = self._model.list_mixers(layer)[number], number
        self.read = read

    def project(self, layer: int) -> None:
        """Multiply with the rows of its projection that no other unit computes."""
        if self._mixer != "attention":
            self._project_state(layer)
            return
        first = self._divided.qkv
        weights = self._tensors.read_layer(layer, "qkv")
        self._products = np.zeros((len(self.read), len(weights)), np.float32)
        self._products[:, first:] = self.read @ weights[first:].T
        if self._model.attention.has_bias:
            self._products += self._tensors.read_layer(layer, "qkv_bias")[0]

    def _project_state(self, layer: int) -> None:
        """Multiply with the projections into a layer with a state."""
        assert self._shape is not None
        self._products = self.read @ self._read_state(layer, "state_in").T
        if self._shape.projection_bias:
            self._products = self._products + self._read_state(layer, "state_in_bias")[0]
        self._gates = np.zeros((len(self.read), 0), np.float32)
        if self._shape.gates:
            self._gates = self.read @ self._read_state(layer, "state_gates").T

    def _read_state(self, layer: int, kind: str) -> F32:
        """Return a tensor of the mixer with a state whose turn it is."""
        return self._tensors.read(name_state_tensor(layer, self._number, kind))

    def put_projected(self, values: F32) -> None:
        """Add the products [T, n] with the first rows."""
        self._products[:, : values.shape[1]] += values

    def mix(self, layer: int, parts: Sequence[Part]) -> F32:
        """Return what the mixer makes of all tokens [T, width], and keep what later ones need."""
        if self._mixer != "attention":
            assert self.states is not None
            mixed = [
                self.states.mix(
                    (sequence, layer, self._number),
                    self._products[tokens],
                    self._gates[tokens],
                    first,
                )
                for tokens, sequence, first in parts
            ]
        else:
            mixed = [
                self.attention.mix(layer, self._products[tokens], *place)
                for tokens, *place in parts
            ]
        self._mixed = np.concatenate(mixed)
        if self._mixer == "attention" and self._model.attention.sub_norm:
            weights = self._tensors.read_layer(layer, "attention_sub_norm")
            width = self._model.shape.query
            self._mixed = normalize(self._model.norm, self._mixed, weights, width=width)
        return self._mixed

    def project_output(self, layer: int) -> F32 | None:
        """Return the products with what was mixed [T, hidden]; None where those of the first rows
        are missing, which another unit computes."""
        if self._shape is not None and self._mixer != "attention":
            first, has_bias = 0, self._shape.projection_bias
            weights = self._read_state(layer, "state_output")
            bias = self._read_state(layer, "state_output_bias") if has_bias else None
        else:
            first, has_bias = self._divided.output, self._model.attention.output_bias
            weights = self._tensors.read_layer(layer, "output")
            bias = self._tensors.read_layer(layer, "output_bias") if has_bias else None
        self._output = np.zeros((len(self._mixed), len(weights)), np.float32)
        self._output[:, first:] = self._mixed @ weights[first:].T
        if bias is not None:
            self._output += bias[0]
        return self._output if first == 0 else None

    def put_output(self, values: F32) -> F32:
        """Complete what `project_output` has left with the products [T, n] with the first rows;
        return it [T, hidden]."""
        self._output[:, : values.shape[1]] += values
        return self._output
