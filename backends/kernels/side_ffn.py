"""A dense FFN beside a layer's experts: what both give is normalised apart, and added."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.compiler.parameters import Parameters
from pi2.backends.kernels.kv import count_lanes
from pi2.backends.kernels.matrix import Matrix, emit_multiply
from pi2.backends.kernels.neurons import activate, activate_smoothly
from pi2.backends.kernels.norms import NormWeights, emit_add_normalized, emit_normalize
from pi2.backends.kernels.operands import Activations
from pi2.backends.kernels.parameters import emit_each_token, take_matrix
from pi2.backends.kernels.quantize import emit_quantize
from pi2.backends.kernels.rows import emit_fill
from pi2.backends.kernels.schedule import Schedule
from pi2.plan.weights.layout import fill_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class SideFfn:
    """Its weights, and room to work in."""

    schedule: Schedule
    norm: NormWeights
    both: Matrix
    """Gates, then ups [2 width, hidden]."""
    down: Matrix
    output_norm: v.Buffer
    experts_norm: v.Buffer
    """Norm of what the experts give."""
    hidden: Activations
    inner: Activations
    terms: v.Buffer
    """Products with gates and ups float32 [tokens, 2 width]."""
    output: v.Buffer
    """What it gives float32 [tokens, hidden]."""

    def emit(self, x: v.Buffer, tokens: v.Expr) -> None:
        """Set ``output`` of all tokens, of x as attention has left it."""
        spec, isa = self.schedule.spec, self.schedule.isa
        width, output = spec.side_ffn, self.output

        def store_term(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
            v.store(self.terms, token * (2 * width) + row, value, 1)

        def store_output(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
            v.store(output, token * spec.hidden + row, value, 1)

        lanes = count_lanes(width) if spec.is_smooth and spec.gate_limit is None else 1

        def finish(token: v.Expr) -> None:
            # Zeros fill the last group up: nobody writes there.
            with T.serial(width // lanes * self.inner.once) as step:
                place = v.let(token * (2 * width) + step * lanes)
                gate = v.let(v.load(self.terms, place, lanes))
                up = v.let(v.load(self.terms, place + width, lanes))
                if lanes == 1:
                    value = activate(spec, gate, up)
                else:
                    value = activate_smoothly(spec, gate, lanes) * up
                v.store(self.inner.values, token * self.inner.length + step * lanes, value, lanes)
            emit_quantize(self.inner, token)

        emit_each_token(
            tokens, lambda token: emit_normalize(spec, x, token, self.norm, self.hidden, token)
        )
        emit_multiply(isa, spec.threads, self.both, self.hidden, tokens, store_term)
        emit_each_token(tokens, finish)
        emit_multiply(isa, spec.threads, self.down, self.inner, tokens, store_output)

    def emit_join(self, experts: v.Buffer, total: v.Buffer, token: v.Expr, once: v.Expr) -> None:
        """Set ``total`` of ``token`` to the norms of what the ``experts`` and this FFN give."""
        spec = self.schedule.spec
        emit_fill(total, v.let(token * spec.hidden), spec.hidden, 0.0)
        emit_add_normalized(spec, experts, total, self.experts_norm, once, token)
        emit_add_normalized(spec, self.output, total, self.output_norm, once, token)


def take_side_ffn(schedule: Schedule, take: Parameters, tokens: v.Expr) -> SideFfn | None:
    """Declare the parameters; None for models without such an FFN."""
    spec = schedule.spec
    width, hidden = spec.side_ffn, spec.hidden
    if not width:
        return None
    return SideFfn(
        schedule=schedule,
        norm=NormWeights(weight=take.take_array("side_norm", "float32", hidden), bias=None),
        both=take_matrix(take, "side_in", 2 * width, hidden, spec.attention),
        down=take_matrix(take, "side_down", hidden, fill_groups(width), spec.attention),
        output_norm=take.take_array("side_output_norm", "float32", hidden),
        experts_norm=take.take_array("experts_output_norm", "float32", hidden),
        hidden=schedule.take_chunk(take, "hidden", hidden, tokens),
        inner=schedule.take_chunk(take, "side_inner", fill_groups(width), tokens),
        terms=take.take_array("side_terms", "float32", "tokens", 2 * width),
        output=schedule.take_rows(take, "side_output"),
    )
