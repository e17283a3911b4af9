"""The functions at a model's ends: token ids to vectors, vectors to logits."""

from __future__ import annotations

from dataclasses import replace

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.compiler.parameters import Parameters
from pi2.backends.kernels.altup import take_joining
from pi2.backends.kernels.embedding import emit_unpack
from pi2.backends.kernels.matrix import emit_multiply
from pi2.backends.kernels.norms import emit_embedding_norm, emit_normalize
from pi2.backends.kernels.operands import Vector
from pi2.backends.kernels.parameters import (
    emit_each_token,
    take_activations,
    take_matrix,
    take_rows,
)
from pi2.backends.kernels.rows import emit_scale
from pi2.backends.kernels.schedule import Schedule
from pi2.plan.weights.layout import scale_bytes, weight_bytes


def emit_embed(schedule: Schedule, take: Parameters) -> None:
    """Set x float32 [T, hidden] to rows ``ids`` of the embedding."""
    spec = schedule.spec
    tokens = take.take_number("tokens")
    # As many rows as are in memory.
    weights, scales = take_rows(take, "embedding", "rows", spec.hidden, spec.embedding)
    ids = take.take_array("ids", "int32", "tokens")
    x = schedule.take_rows(take, "x")
    with T.serial(tokens) as token:
        row = v.let(v.wide(ids[token]))
        vector = Vector(
            weights=weights,
            weights_base=v.let(row * weight_bytes(spec.hidden, spec.embedding)),
            scales=scales,
            scales_base=v.let(row * scale_bytes(spec.hidden, spec.embedding)),
            precision=spec.embedding,
        )
        base = v.let(token * spec.hidden)
        emit_unpack(vector, spec.hidden, x, base)
        emit_scale(x, base, spec.hidden, spec.embedding_factor)
        if spec.embedding_norm:
            emit_embedding_norm(spec, x, T.min(tokens, 1), token)


def emit_add_positions(schedule: Schedule, take: Parameters) -> None:
    """Add the learned vectors of the positions to x."""
    spec = schedule.spec
    tokens = take.take_number("tokens")
    position = take.take_number("position")
    table = take.take_array("table", "uint8", "context", spec.hidden * 2)
    x = schedule.take_rows(take, "x")
    with T.serial(tokens) as token, T.serial(spec.hidden // 16) as step:
        byte = (v.wide(position + token) * spec.hidden + v.wide(step * 16)) * 2
        place = v.let(token * spec.hidden + step * 16)
        v.store(x, place, v.load(x, place, 16) + v.load_halves(table, byte, 16), 16)


def emit_logits(schedule: Schedule, take: Parameters) -> None:
    """Set logits float32 [T, vocab] of the tokens from ``first`` on."""
    spec = schedule.spec
    first = take.take_number("first")
    tokens = take.take_number("tokens")
    x = schedule.take_rows(take, "x")
    norm = schedule.take_norm(take)
    head = take_matrix(take, "head", spec.vocab - spec.other_head, spec.hidden, spec.head)
    bias = take.take_array("head_bias", "float32", spec.vocab) if spec.head_bias else None
    # All of them in two planes, however the chunk was computed.
    hidden = take_activations(
        take, "hidden", spec.hidden, spec.planes, tokens, spec.planes, isa=schedule.isa
    )
    logits = take.take_array("logits", "float32", "logits", spec.vocab)

    def keep(token: v.Expr, own: v.Expr, value: v.Expr) -> None:
        row = v.let(own + spec.other_head) if spec.other_head else own
        if bias is not None:
            value = value + bias[row]
        if spec.logit_factor != 1.0:
            value = value * v.constant(spec.logit_factor, "float32")
        if spec.logit_cap is not None:
            value = v.take_cap(value, spec.logit_cap, 1)
        v.store(logits, v.wide(token) * spec.vocab + v.wide(row), value, 1)

    isa = replace(schedule.isa, few_tokens=True)
    joining = take_joining(schedule, take)
    if joining is None:
        emit_each_token(tokens, lambda t: emit_normalize(spec, x, first + t, norm, hidden, t))
    else:
        joining.emit(isa, x, hidden, first, tokens)
        rows = joining.find_row
        emit_each_token(
            tokens, lambda t: emit_normalize(spec, joining.joined, rows(t), norm, hidden, t)
        )
    emit_multiply(isa, spec.threads, head, hidden, tokens, keep)
