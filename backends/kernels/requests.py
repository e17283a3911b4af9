"""Cache lines that are asked for before they are needed, a few at a time: requests in bunches would
wait for each other."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.operands import Vector
from pi2.plan.weights.layout import round_up, weight_bytes

LINE = 64
"""Bytes of a cache line."""
REQUESTS = 8
"""Tiles of tokens in which vectors that are multiplied next are asked for, a part of them in each.
"""


def emit_request(vectors: Sequence[Vector], length: int, turn: v.Expr) -> None:
    """Ask for ``vectors``, for the second-level cache: in each of the first `REQUESTS` turns for a
    part of them."""
    with T.If(turn < REQUESTS), T.Then():
        for vector in vectors:
            size = round_up(weight_bytes(length, vector.precision), REQUESTS * LINE) // REQUESTS
            begin = v.let(vector.weights_base + v.wide(turn) * size)
            for line in range(0, size, LINE):
                v.prefetch(vector.weights, begin + line, 2)
