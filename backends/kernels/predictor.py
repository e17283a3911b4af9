"""Predictors: which neurons of a layer may fire, as ascending int32 indices."""

from __future__ import annotations

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.lists import emit_list
from pi2.backends.kernels.matrix import Matrix, emit_multiply
from pi2.backends.kernels.neurons import activate_smoothly, close_gate
from pi2.backends.kernels.operands import Activations
from pi2.backends.kernels.parameters import emit_each_token
from pi2.backends.kernels.quantize import emit_quantize
from pi2.backends.kernels.spec import KernelSpec


def emit_compact(
    isa: Isa,
    scores: v.Buffer,
    count: v.Expr,
    limit: v.Expr,
    strict: bool,
    indices: v.Buffer,
    found: v.Buffer,
    *,
    magnitudes: bool = False,
    token: v.Expr | None = None,
) -> None:
    """Write the indices whose score reaches ``limit`` to ``indices``, their number to ``found``.

    ``scores`` float32 [count], ``indices`` int32 [count], whose room is whole lines, ``found``
    int32 [1], of ``token``, where there are several (`find_row`); ``strict`` means above the limit,
    not at it, ``magnitudes`` that signs do not count.
    """
    row = find_row(token, count)

    def test(first: v.Expr, lanes: int) -> v.Expr:
        score = v.load(scores, row + first, lanes)
        score = v.let(T.abs(score) if magnitudes else score)
        least = v.splat(limit, lanes)
        return score > least if strict else score >= least

    end = emit_list(isa, count, test, indices, row)
    v.store(found, 0 if token is None else token, end, 1)


def find_row(token: v.Expr | None, count: v.Expr) -> v.Expr | int:
    """Return where the scores and indices of a token's ``count`` neurons begin: in whole lines."""
    return 0 if token is None else v.let(token * (T.floordiv(count + 15, 16) * 16))


def emit_activate(
    spec: KernelSpec,
    scores: v.Buffer,
    count: v.Expr,
    token: v.Expr | None = None,
    cutoff: v.Expr | None = None,
) -> None:
    """Replace gates ``scores`` float32 [count] by their smooth activations, after a ``cutoff``
    where layers have one.

    Whole lines: the array's room is a multiple of 16.
    """
    row = find_row(token, count)
    with T.serial(T.floordiv(count + 15, 16)) as step:
        gates = v.let(v.load(scores, row + step * 16, 16))
        gates = gates if cutoff is None else close_gate(gates, cutoff, 16)
        v.store(scores, row + step * 16, activate_smoothly(spec, gates, 16), 16)


def emit_low_rank(
    isa: Isa,
    threads: int,
    inner: Matrix,
    outer: Matrix,
    bias: v.Buffer,
    activations: Activations,
    middle: Activations,
    scores: v.Buffer,
    several: tuple[v.Expr, v.Expr] | None = None,
) -> None:
    """Set ``scores`` float32 [neurons] to outer relu(inner u) + bias.

    ``inner`` [rank, hidden], ``outer`` [neurons, rank], ``bias`` float32 [neurons]; ``middle``
    holds relu(inner u), quantised like every activation.  ``several``: first token and number of
    tokens, where there may be more than one (`find_row`).
    """
    first, tokens = (None, None) if several is None else several

    def keep_positive(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
        place = row if tokens is None else token * middle.length + row
        v.store(middle.values, place, T.max(value, v.constant(0.0, "float32")), 1)

    def add_bias(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
        place = row if tokens is None else find_row(token, outer.rows) + row
        v.store(scores, place, value + bias[row], 1)

    emit_multiply(isa, threads, inner, activations, tokens, keep_positive, first)
    if tokens is None:
        emit_quantize(middle, T.int32(0))
    else:
        emit_each_token(tokens, lambda token: emit_quantize(middle, token))
    emit_multiply(isa, threads, outer, middle, tokens, add_bias)
