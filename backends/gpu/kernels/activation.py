"""Activations of the FFN in float32."""

from __future__ import annotations

import math

from tvm.tirx.script import builder as T

from pi2.backends.gpu.kernels import code as c
from pi2.backends.gpu.kernels.specification import FfnKernels


def activate(ffn: FfnKernels, gate: c.Expr, up: c.Expr | None) -> c.Expr:
    """Return a neuron's value; ``up`` is None where neurons have no gate."""
    gate, zero = c.let(gate), c.number(0.0)
    match ffn.activation:
        case "relu" | "drelu":
            active = T.max(gate, zero)
        case "fatrelu":
            active = T.Select(gate > c.number(ffn.threshold), gate, zero)
        case "relu2":
            positive = c.let(T.max(gate, zero))
            active = positive * positive
        case "silu":
            if ffn.limit is not None:
                gate = c.let(T.min(gate, c.number(ffn.limit)))
            steep = gate if ffn.slope == 1.0 else c.let(c.number(ffn.slope) * gate)
            active = gate / (c.number(1.0) + T.exp(zero - steep))
        case "gelu":
            scaled = c.let(gate * c.number(math.sqrt(0.5)))
            active = c.number(0.5) * gate * (c.number(1.0) + T.erf(scaled))
        case "gelu_tanh":
            cube = gate * gate * gate
            inner = c.number(math.sqrt(2 / math.pi)) * (gate + c.number(0.044715) * cube)
            active = c.number(0.5) * gate * (c.number(1.0) + compute_tanh(c.let(inner)))
    active = c.let(active)
    if up is None:
        return active
    if ffn.activation == "drelu":
        up = T.max(up, zero)
    if ffn.limit is not None:
        up = T.max(T.min(up, c.number(ffn.limit)), c.number(-ffn.limit))
    if ffn.up_offset:
        up = up + c.number(ffn.up_offset)
    return c.let(active * up)


def compute_tanh(x: c.Expr) -> c.Expr:
    """Return tanh of a named value, which does not overflow on any API."""
    size = c.let(T.max(x, c.number(0.0) - x))
    falling = c.let(T.exp(c.number(-2.0) * size))
    result = c.let((c.number(1.0) - falling) / (c.number(1.0) + falling))
    return T.Select(x < c.number(0.0), c.number(0.0) - result, result)
