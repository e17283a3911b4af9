"""The functions that name neurons which may fire: low-rank predictors, and gates."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.compiler.vectors import Parameters
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.matrix import Matrix, emit_multiply, emit_quantize
from pi2.backends.kernels.neurons import NO_CUTOFF, activate_smoothly, close_gate
from pi2.backends.kernels.operands import Activations
from pi2.backends.kernels.panel import emit_list
from pi2.backends.kernels.schedule import (
    Schedule,
    emit_each_token,
    take_activations,
    take_matrix,
    take_rows,
)
from pi2.backends.kernels.spec import KernelSpec
from pi2.formats import find_packing


class Lists(NamedTuple):
    """What a prediction gives."""

    scores: v.Buffer
    """float32 [count]."""
    indices: v.Buffer
    """int32 [count], whose room is whole lines."""
    found: v.Buffer
    """int32 [1]."""


def emit_compact(
    isa: Isa,
    lists: Lists,
    count: v.Expr,
    limit: v.Expr,
    token: v.Expr,
    *,
    strict: bool = False,
    magnitudes: bool = False,
) -> None:
    """List the indices whose score reaches ``limit``, of ``token`` (`find_row`); ``strict`` means
    above the limit, not at it, ``magnitudes`` that signs do not count."""
    scores, indices, found = lists
    row = find_row(token, count)

    def test(first: v.Expr, lanes: int) -> v.Expr:
        score = v.load(scores, row + first, lanes)
        score = v.let(T.abs(score) if magnitudes else score)
        least = v.splat(limit, lanes)
        return score > least if strict else score >= least

    end = emit_list(isa, count, test, indices, row)
    v.store(found, token, end, 1)


def find_row(token: v.Expr, count: v.Expr) -> v.Expr:
    """Return where the scores and indices of a token's ``count`` neurons begin: in whole lines."""
    return v.let(token * (T.floordiv(count + 15, 16) * 16))


def emit_activate(
    spec: KernelSpec, scores: v.Buffer, count: v.Expr, token: v.Expr, cutoff: v.Expr | None = None
) -> None:
    """Replace gates ``scores`` float32 [count] by their smooth activations, after a ``cutoff``
    where layers have one.

    Whole lines: the array's room is a multiple of 16."""
    row = find_row(token, count)
    with T.serial(T.floordiv(count + 15, 16)) as step:
        gates = v.let(v.load(scores, row + step * 16, 16))
        gates = gates if cutoff is None else close_gate(gates, cutoff, 16)
        v.store(scores, row + step * 16, activate_smoothly(spec, gates, 16), 16)


def take_finding(schedule: Schedule, take: Parameters) -> Callable[[Activations, v.Expr], None]:
    """Declare what cutoffs of gates take; return what finds them for tokens that read some
    input."""
    spec, rows = schedule.spec, schedule.spec.cutoff_rows
    precision = spec.precision.cutoff
    assert precision is not None
    # Whether cutoffs are above the mean or below it.
    sign = take.take_number("sign", "float32")
    matrix = take_matrix(take, "gate_cutoff", rows, spec.hidden, precision)
    parts = take.take_array("cutoff_parts", "float32", "tokens", rows)
    cutoffs = take.take_array("cutoffs", "float32", "tokens")
    # In fp16 as many rows follow, with what it leaves of the first.
    count = rows // 2 if find_packing(precision).is_plain else rows

    def store(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
        v.store(parts, token * rows + row, value, 1)

    def finish(token: v.Expr) -> None:
        base = v.let(token * rows)

        def load(index: v.Expr) -> v.Expr:
            part = parts[base + index]
            return v.let(part + parts[base + index + count] if count < rows else part)

        squares = v.Cell(v.constant(0.0, "float32"))
        with T.serial(count - 1) as index:
            part = load(index + 1)
            squares.set(T.fma(part, part, squares.get()))
        v.store(cutoffs, token, load(T.int32(0)) + sign * T.sqrt(squares.get()), 1)

    def find(hidden: Activations, tokens: v.Expr) -> None:
        emit_multiply(schedule.isa, spec.threads, matrix, hidden, (T.int32(0), tokens), store)
        emit_each_token(tokens, finish)

    return find


def take_cutoffs(schedule: Schedule, take: Parameters) -> v.Buffer | None:
    """Declare the cutoffs of the tokens; None for models without any."""
    if not schedule.spec.cutoff_rows:
        return None
    return take.take_array("cutoffs", "float32", "tokens")


SMALLEST = 1e-37
"""Activations smaller than this are none."""


def emit_predict_low_rank(schedule: Schedule, rank: int, take: Parameters) -> None:
    """Compute the scores of a layer's or expert's neurons, outer relu(inner u) + bias, and list the
    ones that reach a threshold."""
    spec, isa = schedule.spec, schedule.isa
    precision = spec.precision.predictor
    assert precision is not None
    neurons = take.take_number("neurons")
    threshold = take.take_number("threshold", "float32")
    tokens = schedule.take_tokens(take)
    hidden = schedule.take_hidden(take, neurons)
    inner = take_matrix(take, "inner", rank, spec.hidden, precision)
    weights, scales = take_rows(take, "outer", "expert", rank, precision)
    outer = Matrix(weights=weights, scales=scales, rows=neurons, length=rank, precision=precision)
    bias = take.take_array("bias", "uint8", "expert", 4)
    middle = take_activations(
        take, "middle", rank, spec.planes, neurons, rows="sequences", upper=schedule.upper
    )
    lists = _take_lists(take)

    def keep_positive(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
        v.store(middle.values, token * rank + row, T.max(value, v.constant(0.0, "float32")), 1)

    def add_bias(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
        v.store(lists.scores, find_row(token, neurons) + row, _add(value, bias, row), 1)

    emit_multiply(isa, spec.threads, inner, hidden, tokens, keep_positive)
    emit_each_token(tokens[1], lambda token: emit_quantize(middle, token))
    emit_multiply(isa, spec.threads, outer, middle, (T.int32(0), tokens[1]), add_bias)
    emit_each_token(tokens[1], lambda token: emit_compact(isa, lists, neurons, threshold, token))


def emit_predict_gate(schedule: Schedule, take: Parameters) -> None:
    """Compute all gates of a layer, or of an expert, and list the open ones.

    Smooth activations are computed as well: gates that reach ``limit`` count as open."""
    spec, isa = schedule.spec, schedule.isa
    precision = spec.precision.gates
    neurons = take.take_number("neurons")
    least = take.take_number("limit", "float32") if spec.is_smooth else None
    tokens = schedule.take_tokens(take)
    weights, scales = take_rows(take, "gate", "expert", spec.hidden, precision)
    biases = take.take_array("biases", "uint8", "expert", 4) if spec.ffn.bias else None
    hidden = schedule.take_hidden(take, neurons)
    lists = _take_lists(take)
    scores = lists.scores
    cutoffs = take_cutoffs(schedule, take)
    matrix = Matrix(
        weights=weights, scales=scales, rows=neurons, length=spec.hidden, precision=precision
    )

    def keep(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
        place = find_row(token, neurons) + row
        v.store(scores, place, value if biases is None else _add(value, biases, row), 1)

    emit_multiply(isa, spec.threads, matrix, hidden, tokens, keep)

    def list_open(token: v.Expr) -> None:
        if least is None:
            limit = v.constant(spec.ffn.threshold, "float32")
            emit_compact(isa, lists, neurons, limit, token, strict=True)
            return
        cutoff, limit = None, least
        if cutoffs is not None:
            # What a cutoff has closed is exactly zero.
            cutoff = v.let(cutoffs[tokens[0] + token])
            tiny = v.constant(SMALLEST, "float32")
            is_cut = cutoff > v.constant(NO_CUTOFF, "float32")
            limit = v.let(T.Select(is_cut, T.max(least, tiny), least))
        emit_activate(spec, scores, neurons, token, cutoff)
        emit_compact(isa, lists, neurons, limit, token, magnitudes=True)

    emit_each_token(tokens[1], list_open)


def _add(value: v.Expr, biases: v.Buffer, row: v.Expr) -> v.Expr:
    """Add the bias of ``row``, from bytes: experts' biases follow each other, unaligned."""
    return value + v.load_as(biases, row * 4, "float32", 1)


def _take_lists(take: Parameters) -> Lists:
    scores = take.take_array("scores", "float32", "sequences", "neurons")
    indices = take.take_array("indices", "int32", "sequences", "neurons")
    return Lists(scores, indices, take.take_array("found", "int32", "sequences"))
