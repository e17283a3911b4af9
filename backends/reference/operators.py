"""Activations, norms, caps and rotations in float32, one array at a time."""

from __future__ import annotations

import math

import numpy as np

from pi2.arrays import F32
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_shape import Norm


def activate(model: Model, gate: F32, up: F32 | None, cutoffs: F32 | None = None) -> F32:
    """Apply the model's FFN activation: float32 arrays of equal shape -> the same shape.

    ``up`` is None where neurons have no gate: their own value then comes as ``gate``.  ``cutoffs``:
    what is subtracted from gates, where those below it are closed.
    """
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


def enter_layers(model: Model, rows: F32) -> F32:
    """Rows of the embedding [n, hidden] as the first layer reads them."""
    x = rows * np.float32(model.multipliers.embedding)
    if not model.norm.embedding:
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
    """x sigmoid(x)."""
    return np.asarray(x * take_sigmoid(x), np.float32)


def take_softplus(x: F32) -> F32:
    """ln(1 + exp(x)), also where the exponential would overflow."""
    return np.asarray(np.logaddexp(np.float32(0), x), np.float32)
