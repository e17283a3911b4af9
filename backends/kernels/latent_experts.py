"""Experts that are narrower or wider than the residual stream: the projections before and behind
them (Nemotron 3)."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.compiler.parameters import Parameters
from pi2.backends.kernels.matrix import Matrix, emit_multiply
from pi2.backends.kernels.neurons import emit_leave_lane_order
from pi2.backends.kernels.operands import Activations
from pi2.backends.kernels.parameters import emit_each_token, take_matrix
from pi2.backends.kernels.quantize import emit_quantize
from pi2.backends.kernels.rows import emit_fill
from pi2.backends.kernels.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentExperts:
    """One of the two projections, and the vectors of the experts' width."""

    schedule: Schedule
    matrix: Matrix
    inner: Activations
    """What experts read, and later what they give."""

    def emit_lead(self, hidden: Activations, tokens: v.Expr) -> None:
        """Set what experts read of ``tokens``, of what the FFN reads."""
        spec, inner = self.schedule.spec, self.inner

        def store(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
            # Zeros fill the last group up: nobody writes there.
            v.store(inner.values, token * inner.length + row, value, 1)

        emit_multiply(self.schedule.isa, spec.threads, self.matrix, hidden, tokens, store)
        emit_each_token(tokens, lambda token: emit_quantize(inner, token))

    def emit_back(self, y: v.Buffer, x: v.Buffer, tokens: v.Expr) -> None:
        """Add what experts give, y [tokens, width] in lane order, to x."""
        spec, inner = self.schedule.spec, self.inner

        def prepare(token: v.Expr) -> None:
            emit_fill(inner.values, v.let(token * inner.length), inner.length, 0.0)
            emit_leave_lane_order(inner.length, spec.ffn, y, inner.values, token)
            emit_quantize(inner, token)

        def add(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
            place = v.let(token * spec.hidden + row)
            factor = v.constant(spec.residual_factor, "float32")
            v.store(x, place, T.fma(value, factor, x[place]), 1)

        emit_each_token(tokens, prepare)
        emit_multiply(self.schedule.isa, spec.threads, self.matrix, inner, tokens, add)


def take_latent_experts(
    schedule: Schedule, take: Parameters, tokens: v.Expr, name: str
) -> LatentExperts | None:
    """Declare the projection ``name``, ``experts_in`` or ``experts_out``; None for models whose
    experts have the width of the residual stream."""
    spec, width = schedule.spec, schedule.spec.neuron_width
    if not spec.latent_experts:
        return None
    rows, length = {
        "experts_in": (spec.latent_experts, spec.hidden),
        "experts_out": (spec.hidden, width),
    }[name]
    return LatentExperts(
        schedule=schedule,
        matrix=take_matrix(take, name, rows, length, spec.attention),
        inner=schedule.take_chunk(take, "experts", width, tokens),
    )
