"""Cutoffs of a layer's gates for each token (`pi2.plan.weights.cutoffs`)."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.compiler.parameters import Parameters
from pi2.backends.kernels.matrix import Matrix, emit_multiply
from pi2.backends.kernels.operands import Activations
from pi2.backends.kernels.parameters import emit_each_token, take_matrix
from pi2.backends.kernels.schedule import Schedule
from pi2.plan.weights.layout import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutoffs:
    """The matrix, and room to multiply with it."""

    schedule: Schedule
    sign: v.Expr
    """1 or -1: whether cutoffs are above the mean or below it."""
    matrix: Matrix
    parts: v.Buffer
    """float32 [tokens, rows]."""
    cutoffs: v.Buffer
    """float32 [tokens]."""

    def emit(self, hidden: Activations, tokens: v.Expr) -> None:
        """Set ``cutoffs`` of all tokens, whose input is ``hidden``."""
        spec, rows = self.schedule.spec, self.schedule.spec.cutoff_rows
        # In fp16 as many rows follow, with what it leaves of the first.
        count = rows // 2 if self.matrix.precision == "fp16" else rows

        def store(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
            v.store(self.parts, token * rows + row, value, 1)

        def finish(token: v.Expr) -> None:
            base = v.let(token * rows)

            def load(index: v.Expr) -> v.Expr:
                part = self.parts[base + index]
                return v.let(part + self.parts[base + index + count] if count < rows else part)

            squares = v.Cell(v.constant(0.0, "float32"))
            with T.serial(count - 1) as index:
                part = load(index + 1)
                squares.set(T.fma(part, part, squares.get()))
            cutoff = load(T.int32(0)) + self.sign * T.sqrt(squares.get())
            v.store(self.cutoffs, token, cutoff, 1)

        emit_multiply(self.schedule.isa, spec.threads, self.matrix, hidden, tokens, store)
        emit_each_token(tokens, finish)


def take_finding(schedule: Schedule, take: Parameters) -> Cutoffs:
    """Declare the parameters of what finds cutoffs."""
    spec = schedule.spec
    precision: Precision = "fp16" if spec.attention == "fp16" else "int8"
    return Cutoffs(
        schedule=schedule,
        sign=take.take_number("sign", "float32"),
        matrix=take_matrix(take, "gate_cutoff", spec.cutoff_rows, spec.hidden, precision),
        parts=take.take_array("cutoff_parts", "float32", "tokens", spec.cutoff_rows),
        cutoffs=take.take_array("cutoffs", "float32", "tokens"),
    )


def take_cutoffs(schedule: Schedule, take: Parameters) -> v.Buffer | None:
    """Declare the cutoffs of the tokens; None for models without any."""
    if not schedule.spec.cutoff_rows:
        return None
    return take.take_array("cutoffs", "float32", "tokens")
