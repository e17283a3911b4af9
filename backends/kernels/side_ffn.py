"""A dense FFN beside a layer's experts: what both give is added, in some models after norms."""

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
from pi2.backends.kernels.spec import KernelSpec
from pi2.plan.weights.layout import fill_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class SideNorms:
    """Norms of such an FFN and of the experts beside it."""

    spec: KernelSpec
    input: NormWeights
    weight: v.Buffer
    """Of what the FFN gives."""
    experts: v.Buffer
    """Of what the experts give."""
    output: v.Buffer
    """What the FFN gives float32 [tokens, hidden]."""

    def emit_join(self, experts: v.Buffer, total: v.Buffer, token: v.Expr, once: v.Expr) -> None:
        """Set ``total`` of ``token`` to the norms of what the ``experts`` and the FFN give."""
        spec = self.spec
        emit_fill(total, v.let(token * spec.hidden), spec.hidden, 0.0)
        emit_add_normalized(spec, experts, total, self.experts, once, token)
        emit_add_normalized(spec, self.output, total, self.weight, once, token)


@dataclass(frozen=True, slots=True, kw_only=True)
class SideFfn:
    """Its weights, and room to work in."""

    schedule: Schedule
    rows: Matrix
    """Gates, where neurons have them, then ups [terms, hidden]."""
    down: Matrix
    hidden: Activations
    """What the router reads; what it reads itself, if its norms are its own."""
    inner: Activations
    terms: v.Buffer
    """Products with gates and ups float32 [tokens, terms]."""
    norms: SideNorms | None

    def emit(self, x: v.Buffer, tokens: v.Expr) -> None:
        """Add what it gives to x of all tokens, as attention has left it, or keep it for its
        norm."""
        spec, isa = self.schedule.spec, self.schedule.isa
        width, terms = spec.side_ffn, (1 + spec.gated) * spec.side_ffn

        def store_term(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
            v.store(self.terms, token * terms + row, value, 1)

        def store_output(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
            place = v.let(token * spec.hidden + row)
            if self.norms is not None:
                v.store(self.norms.output, place, value, 1)
                return
            factor = v.constant(spec.residual_factor, "float32")
            v.store(x, place, T.fma(value, factor, x[place]), 1)

        lanes = count_lanes(width) if spec.is_smooth and spec.gate_limit is None else 1

        def finish(token: v.Expr) -> None:
            # Zeros fill the last group up: nobody writes there.
            with T.serial(width // lanes * self.inner.once) as step:
                place = v.let(token * terms + step * lanes)
                gate = v.let(v.load(self.terms, place, lanes))
                up = v.let(v.load(self.terms, place + width, lanes)) if spec.gated else None
                if lanes == 1:
                    value = activate(spec, gate, up)
                else:
                    value = activate_smoothly(spec, gate, lanes)
                    value = value if up is None else value * up
                v.store(self.inner.values, token * self.inner.length + step * lanes, value, lanes)
            emit_quantize(self.inner, token)

        if self.norms is not None:
            norm = self.norms.input
            emit_each_token(
                tokens, lambda token: emit_normalize(spec, x, token, norm, self.hidden, token)
            )
        emit_multiply(isa, spec.threads, self.rows, self.hidden, tokens, store_term)
        emit_each_token(tokens, finish)
        emit_multiply(isa, spec.threads, self.down, self.inner, tokens, store_output)


def take_side_ffn(schedule: Schedule, take: Parameters, tokens: v.Expr) -> SideFfn | None:
    """Declare the parameters; None for models without such an FFN."""
    spec = schedule.spec
    width, hidden = spec.side_ffn, spec.hidden
    if not width:
        return None
    norms, terms = None, (1 + spec.gated) * width
    if spec.side_norms:
        norms = SideNorms(
            spec=spec,
            input=NormWeights(weight=take.take_array("side_norm", "float32", hidden), bias=None),
            weight=take.take_array("side_output_norm", "float32", hidden),
            experts=take.take_array("experts_output_norm", "float32", hidden),
            output=schedule.take_rows(take, "side_output"),
        )
    return SideFfn(
        schedule=schedule,
        rows=take_matrix(take, "side_in", terms, hidden, spec.attention),
        down=take_matrix(take, "side_down", hidden, fill_groups(width), spec.attention),
        hidden=schedule.take_chunk(take, "hidden", hidden, tokens),
        inner=schedule.take_chunk(take, "side_inner", fill_groups(width), tokens),
        terms=take.take_array("side_terms", "float32", "tokens", terms),
        norms=norms,
    )
