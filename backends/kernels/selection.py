"""The functions that name neurons which may fire: low-rank predictors, and gates."""

from __future__ import annotations

from collections.abc import Callable

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.compiler.parameters import Parameters
from pi2.backends.kernels.cutoffs import take_cutoffs
from pi2.backends.kernels.matrix import Matrix, emit_multiply
from pi2.backends.kernels.neurons import NO_CUTOFF
from pi2.backends.kernels.operands import Activations
from pi2.backends.kernels.parameters import (
    emit_each_token,
    take_activations,
    take_matrix,
    take_rows,
)
from pi2.backends.kernels.predictor import emit_activate, emit_compact, emit_low_rank, find_row
from pi2.backends.kernels.schedule import Schedule

SMALLEST = 1e-37
"""Activations smaller than this are none."""


def emit_predict_low_rank(schedule: Schedule, rank: int, take: Parameters) -> None:
    """Compute the scores of a layer's neurons, or of an expert's, and list those that reach a
    threshold."""
    neurons = take.take_number("neurons")
    threshold = take.take_number("threshold", "float32")
    several = _take_several(schedule, take)
    hidden = schedule.take_hidden(take, neurons)
    take_low_rank(schedule, rank, take, neurons, threshold, hidden)(several)


def take_low_rank(
    schedule: Schedule,
    rank: int,
    take: Parameters,
    neurons: v.Expr,
    threshold: v.Expr,
    hidden: Activations,
) -> Callable[[tuple[v.Expr, v.Expr] | None], None]:
    """Declare what else a prediction takes; return what makes it of ``hidden``: of several tokens,
    given the first and their number, or of the only one."""
    spec, isa = schedule.spec, schedule.isa
    precision = spec.predictor
    assert precision is not None
    inner = take_matrix(take, "inner", rank, spec.hidden, precision)
    weights, scales = take_rows(take, "outer", "expert", rank, precision)
    bias = take.take_array("bias", "float32", "expert")
    middle = take_activations(
        take, "middle", rank, spec.planes, neurons, rows="sequences", upper=schedule.upper
    )
    scores, indices, found = _take_lists(take)
    outer = Matrix(weights=weights, scales=scales, rows=neurons, length=rank, precision=precision)

    def emit_list(token: v.Expr | None) -> None:
        emit_compact(isa, scores, neurons, threshold, False, indices, found, token=token)

    def predict(several: tuple[v.Expr, v.Expr] | None) -> None:
        emit_low_rank(isa, spec.threads, inner, outer, bias, hidden, middle, scores, several)
        _emit_lists(several, emit_list)

    return predict


def emit_predict_gate(schedule: Schedule, take: Parameters) -> None:
    """Compute all gates of a layer, or of an expert, and list those that are open.

    Smooth activations are computed too: those that reach ``limit`` count as open.
    """
    spec = schedule.spec
    precision = spec.gate_rows
    assert precision is not None
    neurons = take.take_number("neurons")
    least = take.take_number("limit", "float32") if spec.is_smooth else None
    several = _take_several(schedule, take)
    weights, scales = take_rows(take, "gate", "expert", spec.hidden, precision)
    biases = take.take_array("biases", "float32", "expert") if spec.ffn_bias else None
    hidden = schedule.take_hidden(take, neurons)
    scores, indices, found = _take_lists(take)
    cutoffs = take_cutoffs(schedule, take)
    matrix = Matrix(
        weights=weights, scales=scales, rows=neurons, length=spec.hidden, precision=precision
    )

    first, tokens = (None, None) if several is None else several

    def keep(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
        place = row if tokens is None else find_row(token, neurons) + row
        v.store(scores, place, value if biases is None else value + biases[row], 1)

    isa = schedule.isa
    emit_multiply(isa, spec.threads, matrix, hidden, tokens, keep, first)

    def emit_list(token: v.Expr | None) -> None:
        if least is not None:
            cutoff, limit = None, least
            if cutoffs is not None:
                # What a cutoff has closed is exactly zero.
                place = T.int32(0) if token is None or first is None else first + token
                cutoff = v.let(cutoffs[place])
                tiny = v.constant(SMALLEST, "float32")
                is_cut = cutoff > v.constant(NO_CUTOFF, "float32")
                limit = v.let(T.Select(is_cut, T.max(least, tiny), least))
            emit_activate(spec, scores, neurons, token, cutoff)
            emit_compact(
                isa, scores, neurons, limit, False, indices, found, magnitudes=True, token=token
            )
            return
        limit = v.constant(spec.threshold if spec.activation == "fatrelu" else 0.0, "float32")
        emit_compact(isa, scores, neurons, limit, True, indices, found, token=token)

    _emit_lists(several, emit_list)


def _take_several(schedule: Schedule, take: Parameters) -> tuple[v.Expr, v.Expr] | None:
    """Declare the first token and the number of tokens, where there may be more than one."""
    if not schedule.spec.sequences:
        return None
    first = take.take_number("first")
    return first, take.take_number("tokens")


def _take_lists(take: Parameters) -> tuple[v.Buffer, v.Buffer, v.Buffer]:
    """Declare scores and indices of neurons, and how many were found, of every token."""
    scores = take.take_array("scores", "float32", "sequences", "neurons")
    indices = take.take_array("indices", "int32", "sequences", "neurons")
    return scores, indices, take.take_array("found", "int32", "sequences")


def _emit_lists(
    several: tuple[v.Expr, v.Expr] | None, emit: Callable[[v.Expr | None], None]
) -> None:
    """List the neurons of the only token, or of each."""
    if several is None:
        emit(None)
    else:
        emit_each_token(several[1], emit)
