"""Activations of the FFN in float32, one neuron at a time.

Scalar on purpose: vectors of floats need v68, and the emulator has none.  A neuron takes some 20
operations here, and thousands of products before.
"""

from __future__ import annotations

import math

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.hexagon.kernels import code as c
from pi2.backends.hexagon.specification import FfnShape

MAGIC = 12582912.0
"""1.5 * 2^23: added to a float, it leaves the nearest integer in the lowest bits."""
_MAGIC_BITS = 0x4B400000


def activate(ffn: FfnShape, gate: c.Expr, up: c.Expr | None) -> c.Expr:
    """Return a neuron's value; ``up`` is None where neurons have no gate."""
    gate, zero, one = v.let(gate), c.number(0.0), c.number(1.0)
    match ffn.activation:
        case "relu" | "drelu":
            active = T.max(gate, zero)
        case "fatrelu":
            active = T.Select(gate > c.number(ffn.threshold), gate, zero)
        case "relu2":
            positive = v.let(T.max(gate, zero))
            active = positive * positive
        case "silu":
            if ffn.limit is not None:
                gate = v.let(T.min(gate, c.number(ffn.limit)))
            steep = gate if ffn.slope == 1.0 else v.let(c.number(ffn.slope) * gate)
            active = gate / (one + v.take_exponential(zero - steep, 1, _round_off))
        case "gelu":
            scaled = gate * c.number(math.sqrt(0.5))
            active = c.number(0.5) * gate * (one + v.take_error_function(scaled, 1, _round_off))
        case "gelu_tanh":
            cube = gate * gate * gate
            inner = c.number(math.sqrt(2 / math.pi)) * (gate + c.number(0.044715) * cube)
            active = c.number(0.5) * gate * (one + v.take_tanh(v.let(inner), 1, _round_off))
    active = v.let(active)
    if up is None:
        return active
    if ffn.activation == "drelu":
        up = T.max(up, zero)
    if ffn.limit is not None:
        up = T.max(T.min(up, c.number(ffn.limit)), c.number(-ffn.limit))
    if ffn.up_offset:
        up = up + c.number(ffn.up_offset)
    return v.let(active * up)


def round_to_integer(value: c.Expr) -> c.Expr:
    """Return the nearest int32 of a float32 below 2^22 in size; of two, the even one."""
    return T.reinterpret(value + c.number(MAGIC), dtype="int32") - T.int32(_MAGIC_BITS)


def _round_off(value: c.Expr) -> c.Expr:
    return T.cast(round_to_integer(value), "float32")
