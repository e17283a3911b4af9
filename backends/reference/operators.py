"""Activations, norms, caps and rotations in float32, one array at a time."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from pi2.arrays import F32, I32, U8, Bits
from pi2.backends.arithmetic import slice_tensor
from pi2.backends.protocol import BuildRequest, Tensor
from pi2.formats import find_packing
from pi2.model.tensor import (
    LAYER_PROJECTION,
    LAYER_PROJECTION_NORM,
    STREAM_IN,
    STREAM_OUT,
    name_layer_tensor,
)
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_mixing import SMALLEST_SQUARE
from pi2.plan.documents.model_parts import Norm
from pi2.plan.weights.bundles import slice_bias, slice_experts, slice_factors, unpack_part
from pi2.plan.weights.layout import BundleLayout


def activate(model: Model, gate: F32, up: F32 | None, cutoffs: F32 | None = None) -> F32:
    """The model's FFN activation, shape kept; without gates ``gate`` is the neuron's value.
    ``cutoffs`` are subtracted from gates, and close those below."""
    if cutoffs is not None:
        gate = np.maximum(gate - cutoffs, 0)
    match model.ffn.activation:
        case "relu" | "drelu":
            active = np.maximum(gate, 0)
        case "fatrelu":
            active = np.where(gate > model.ffn.threshold, gate, 0)
        case "relu2":
            active = np.square(np.maximum(gate, 0))
        case "silu":
            limit = model.ffn.limit
            if limit is not None:
                gate = np.minimum(gate, limit)
                up = None if up is None else np.clip(up, -limit, limit)
            with np.errstate(over="ignore"):
                # Of a very negative gate: divided by infinity it is zero, as it should be.
                active = gate / (1 + np.exp(-np.float32(model.ffn.slope) * gate))
        case "gelu":
            active = 0.5 * gate * (1 + _erf(gate * np.float32(math.sqrt(0.5))))
        case "gelu_tanh":
            inner = np.float32(math.sqrt(2 / math.pi)) * (gate + 0.044715 * gate**3)
            active = 0.5 * gate * (1 + np.tanh(inner))
    if up is None:
        return np.asarray(active)
    if model.ffn.activation == "drelu":
        up = np.maximum(up, 0)
    return np.asarray(active * (up + np.float32(model.ffn.up_offset)))


def _erf(x: F32) -> F32:
    """The error function; numpy has none."""
    return np.asarray(np.frompyfunc(math.erf, 1, 1)(x), np.float32)


def normalize(
    norm: Norm, x: F32, weight: F32, bias: F32 | None = None, width: int | None = None
) -> F32:
    """RMSNorm or LayerNorm over the last axis, or its first ``width`` elements: ``weight`` and
    ``bias`` are zero beyond."""
    if norm.kind == "layernorm":
        x = x - np.mean(x[..., :width], axis=-1, keepdims=True)
    mean_square = np.mean(np.square(x[..., :width]), axis=-1, keepdims=True)
    result = x / np.sqrt(mean_square + np.float32(norm.epsilon)) * weight
    return np.asarray(result if bias is None else result + bias)


def join_input(model: Model, x: F32, given: F32, read: Callable[[str], F32]) -> F32:
    """What the layer of an MTP head reads [T, hidden], of embeddings ``x`` and of ``given``, which
    the main model's head reads; ``read`` gives a tensor of the layer by its kind."""
    width = model.shape.hidden
    parts = [
        normalize(model.norm, rows[:, :width], read(f"mtp_{kind}_norm"))
        for kind, rows in (("token", x), ("stream", given))
    ]
    joined = np.zeros_like(x)
    joined[:, :width] = np.concatenate(parts, axis=1) @ read("mtp_in").T
    return joined


def enter_layers(model: Model, rows: F32) -> F32:
    """Rows of the embedding [n, hidden] as the first layer reads them."""
    x = rows * np.float32(model.multipliers.embedding)
    if not model.norm.embedding or model.norm.embedding_weights:
        return np.asarray(x)
    norm, ones = model.norm.model_copy(update={"kind": "rmsnorm"}), np.ones(1, np.float32)
    return normalize(norm, x, ones, width=model.shape.hidden)


def cap(x: F32, limit: float | None) -> F32:
    """Soft cap: limit * tanh(x / limit), or x as it is."""
    return x if limit is None else np.asarray(np.float32(limit) * np.tanh(x / np.float32(limit)))


def rotate(x: F32, cosines: F32, sines: F32) -> F32:
    """Rotate the halves of each head: x [T, heads, d], cosines and sines [T, d / 2]."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = cosines[:, None, :], sines[:, None, :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def take_sigmoid(x: F32) -> F32:
    """1 / (1 + exp(-x)), also where the exponential would overflow."""
    return np.asarray(0.5 * (1 + np.tanh(0.5 * x)), np.float32)


def take_silu(x: F32) -> F32:
    return np.asarray(x * take_sigmoid(x), np.float32)


def take_softplus(x: F32) -> F32:
    """ln(1 + exp(x)), also where the exponential would overflow."""
    return np.asarray(np.logaddexp(np.float32(0), x), np.float32)


def compute_activations(
    model: Model,
    layout: BundleLayout,
    inputs: F32,
    bundles: U8,
    routes: F32 | None = None,
    cutoffs: F32 | None = None,
) -> F32:
    """Activations [T, n] of ``bundles`` [n, stride] for ``inputs`` [T, hidden], times ``routes``
    [T, experts] in an MoE model; ``cutoffs`` [T, 1] of gates."""
    values = []
    for index in range(2 if layout.is_gated else 1):
        value = inputs @ unpack_part(bundles, layout, index).T
        values.append(value + slice_bias(bundles, layout, index) if layout.biases else value)
    if layout.expert_offset is None or routes is None:
        return activate(model, values[0], values[1] if layout.is_gated else None, cutoffs)
    return weigh_activations(model, values, routes[:, slice_experts(bundles, layout)], cutoffs)


def weigh_activations(
    model: Model, values: Sequence[F32], weights: F32, cutoffs: F32 | None = None
) -> F32:
    """Activations float32 [T, n] of experts' neurons; ``values`` [T, n] are their gates and ups, or
    only their ups, and ``weights`` [T, n] their experts' weights."""
    is_input = model.moe is not None and model.moe.weighs == "input"
    gate, *up = [value * weights for value in values] if is_input else values
    active = activate(model, gate, up[0] if up else None, cutoffs)
    return active if is_input else np.asarray(active * weights)


def multiply_down(layout: BundleLayout, active: F32, bundles: U8) -> F32:
    """Sum float32 [T, hidden] of the down columns of ``bundles`` [n, stride], which have their
    scales, times ``active`` [T, n] and the factors of these, if they are normalised later."""
    if layout.factor_offset is not None:
        active = active * slice_factors(bundles, layout)
    return np.asarray(active @ unpack_part(bundles, layout, len(layout.parts) - 1))


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
        return find_packing(tensor.precision).dequantize(weights, scales, tensor.length)

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
        """Return the part of attention's or the FFN's output that is added [T, hidden]."""
        if not self._model.norm.outputs:
            return output
        weights, width = self.read_layer(layer, kind), self._model.shape.hidden
        return normalize(self._model.norm, output, weights, width=width)


def widen(tensor: Tensor) -> F32:
    """Return a tensor in float32 [rows, length]."""
    if tensor.precision is None:
        return tensor.weights.reshape(tensor.rows, tensor.length).astype(np.float32)
    weights = np.asarray(tensor.weights).view(np.uint8)
    return find_packing(tensor.precision).dequantize(weights, tensor.scales, tensor.length)


class LayerInputs:
    """Computes them for a model; one without such embeddings asks for none."""

    def __init__(self, model: Model, read: Callable[[str], F32]) -> None:
        """``read`` gives a tensor of the store in float32 [rows, length]."""
        self._model = model
        self._read = read

    def make_none(self) -> F32:
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


class AltUp:
    """AltUp of a model: ``x`` [T, hidden] is the first stream, ``others`` [streams - 1, T, hidden]
    the rest."""

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
        altup = self._model.altup
        if altup is None or not altup.scaled:
            return x
        return x * self._read(name_layer_tensor(layer, "altup_scale"))

    def join(self, x: F32, others: F32) -> F32:
        weights = self._read(STREAM_OUT).reshape(self._count, x.shape[1], -1)
        projected = np.einsum("nth,nkh->ntk", others, weights)
        streams = np.concatenate([x[None], self._scale_like(x, projected)])
        return np.asarray(streams.mean(axis=0))


class Prediction:
    """Names neurons for the input ``u`` [1, hidden] of a token's FFN."""

    def __init__(self, request: BuildRequest) -> None:
        self._request = request
        self._model = request.model
        self.scores: F32 = np.zeros(0, np.float32)
        """Scores [neurons] of the last prediction by predictors; -inf where none was asked."""

    def find_named(self, layer: int, threshold: float, u: F32, experts: I32) -> I32:
        """Return the neurons, of ``experts`` in an MoE model, whose score reaches ``threshold``."""
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
            widen(
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
        """Neurons whose gates are open by the gate rows, of ``experts`` in an MoE model;
        ``cutoffs`` [1, 1]."""
        assert self._request.gate_rows is not None
        weights, scales = self._request.gate_rows[layer]
        layout = self._request.bundle
        gate = find_packing(layout.gate_up).dequantize(weights, scales, layout.hidden) @ u[0]
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
        """The first limit: of the layer, or in an MoE model of every gate row [neurons]."""
        if self._request.expert_limits is None:
            return self.get_limits(layer)[0]
        limits = np.array(self._request.expert_limits[layer], np.float32)
        return np.repeat(limits, self._model.shape.ffn)

    def _group(self, layer: int) -> I32:
        """Stored indices of the neurons of each expert [experts, ffn]."""
        assert self._request.expert_neurons is not None
        return self._request.expert_neurons[layer].reshape(self._model.expert_count, -1)
