"""The functions that name neurons which may fire: low-rank predictors, and gates."""

from __future__ import annotations

from pi2.backends.kernels import vectors as v
from pi2.backends.kernels.matrix import Matrix, emit_multiply
from pi2.backends.kernels.parameters import Parameters
from pi2.backends.kernels.predictor import emit_activate, emit_compact, emit_low_rank
from pi2.backends.kernels.schedule import Schedule


def emit_predict_low_rank(schedule: Schedule, rank: int, take: Parameters) -> None:
    """Compute the scores of a layer's neurons, or of an expert's, and list those that reach a
    threshold."""
    spec = schedule.spec
    precision = spec.predictor
    assert precision is not None
    neurons = take.take_number("neurons")
    threshold = take.take_number("threshold", "float32")
    inner = take.take_matrix("inner", rank, spec.hidden, precision)
    weights = take.take_array("outer_weights", "uint8")
    scales = take.take_array("outer_scales", "uint8")
    bias = take.take_array("bias", "float32")
    hidden = schedule.take_hidden(take, neurons)
    middle = take.take_activations("middle", rank, spec.planes, neurons)
    scores = take.take_array("scores", "float32")
    indices = take.take_array("indices", "int32")
    found = take.take_array("found", "int32")
    outer = Matrix(weights=weights, scales=scales, rows=neurons, length=rank, precision=precision)
    emit_low_rank(schedule.isa, spec.threads, inner, outer, bias, hidden, middle, scores)
    emit_compact(scores, neurons, threshold, False, indices, found)


def emit_predict_gate(schedule: Schedule, take: Parameters) -> None:
    """Compute all gates of a layer, or of an expert, and list those that are open.

    Smooth activations are computed too: those that reach ``limit`` count as open.
    """
    spec = schedule.spec
    precision = spec.gate_rows
    assert precision is not None
    neurons = take.take_number("neurons")
    least = take.take_number("limit", "float32") if spec.is_smooth else None
    weights = take.take_array("weights", "uint8")
    scales = take.take_array("scales", "uint8")
    biases = take.take_array("biases", "float32") if spec.ffn_bias else None
    hidden = schedule.take_hidden(take, neurons)
    scores = take.take_array("scores", "float32")
    indices = take.take_array("indices", "int32")
    found = take.take_array("found", "int32")
    matrix = Matrix(
        weights=weights, scales=scales, rows=neurons, length=spec.hidden, precision=precision
    )

    def keep(_token: v.Expr, row: v.Expr, value: v.Expr) -> None:
        v.store(scores, row, value if biases is None else value + biases[row], 1)

    emit_multiply(schedule.isa, spec.threads, matrix, hidden, None, keep)
    if least is not None:
        emit_activate(spec, scores, neurons)
        emit_compact(scores, neurons, least, False, indices, found, magnitudes=True)
        return
    limit = spec.threshold if spec.activation == "fatrelu" else 0.0
    emit_compact(scores, neurons, v.constant(limit, "float32"), True, indices, found)
