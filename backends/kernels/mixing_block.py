"""What all blocks that mix tokens have in common: the way from x and the way back to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.altup import Prediction
from pi2.backends.kernels.matrix import Matrix, emit_multiply
from pi2.backends.kernels.norms import NormWeights, emit_add_normalized, emit_normalize
from pi2.backends.kernels.operands import Activations
from pi2.backends.kernels.parameters import emit_each_token
from pi2.backends.kernels.quantize import emit_quantize
from pi2.backends.kernels.rows import emit_copy
from pi2.backends.kernels.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class MixingBlock:
    """Parameters of the functions of attention, latent attention, and layers with a state."""

    schedule: Schedule
    tokens: v.Expr
    """Their number; in a function for one token, which it is."""
    position: v.Expr
    x: v.Buffer
    before: v.Buffer | None
    """Where x is kept for what reads it again."""
    norm: NormWeights | None
    project: Matrix
    bias: v.Buffer | None
    """Of the projection."""
    output: Matrix
    output_bias: v.Buffer | None
    output_norm: v.Buffer | None
    hidden: Activations
    streams: Prediction | None = None
    """What several residual streams begin a layer with."""

    def emit_input(self, store: Callable[[v.Expr, v.Expr, v.Expr], None]) -> None:
        """Normalise x of all tokens and project it; ``store(token, row, product)``, the bias not
        added."""
        spec = self.schedule.spec

        def prepare(token: v.Expr) -> None:
            if self.streams is not None:
                self.streams.emit_predict(self.x, token)
            if self.before is not None:
                emit_copy(self.x, self.before, v.let(token * spec.hidden), spec.hidden)
            emit_normalize(spec, self.x, token, self.norm, self.hidden, token)

        emit_each_token(self.tokens, prepare)
        isa = self.schedule.isa
        emit_multiply(isa, spec.threads, self.project, self.hidden, self.tokens, store)
        if self.streams is not None:
            self.streams.emit_laurel(self.x, self.hidden, self.tokens)

    def emit_add(self, mixed: Activations, other_rows: int = 0) -> None:
        """Project what was ``mixed`` and add it to x; the first ``other_rows`` are another
        unit's."""
        spec, x, hidden = self.schedule.spec, self.x, self.hidden
        bias, norm = self.output_bias, self.output_norm

        def add_residual(token: v.Expr, own: v.Expr, value: v.Expr) -> None:
            row = v.let(own + other_rows) if other_rows else own
            place = v.let(token * spec.hidden + row)
            total = value if bias is None else value + bias[row]
            if norm is not None:
                # What attention has read is not needed any more.
                v.store(hidden.values, place, total, 1)
                return
            if spec.residual_factor != 1.0:
                total = total * v.constant(spec.residual_factor, "float32")
            v.store(x, place, x[place] + total, 1)

        emit_each_token(self.tokens, lambda token: emit_quantize(mixed, token))
        isa = self.schedule.isa
        emit_multiply(isa, spec.threads, self.output, mixed, self.tokens, add_residual)
        if norm is not None:
            norms = (norm, hidden.once)
            emit_each_token(
                self.tokens,
                lambda token: emit_add_normalized(spec, hidden.values, x, *norms, token),
            )
        if self.streams is not None:
            self.streams.emit_end(x, self.tokens)
