"""The function of a layer's attention block, from norm to residual."""

from __future__ import annotations

from tvm.tirx.script import builder as T

from pi2.backends.kernels import vectors as v
from pi2.backends.kernels.attention import (
    count_tile_tokens,
    divide_blocks,
    emit_chunk_attention,
    emit_merge,
    emit_span_attention,
)
from pi2.backends.kernels.kv import emit_append, emit_rope, make_cache
from pi2.backends.kernels.matrix import emit_multiply, emit_shared
from pi2.backends.kernels.norms import emit_add_normalized, emit_head_norms, emit_normalize
from pi2.backends.kernels.parameters import Parameters, emit_each_token
from pi2.backends.kernels.quantize import emit_quantize
from pi2.backends.kernels.rows import emit_copy
from pi2.backends.kernels.schedule import Schedule
from pi2.backends.kernels.spec import KV_BLOCK, KV_DTYPES
from pi2.plan.sizes import KV_ELEMENT_BYTES


def emit_attend(schedule: Schedule, take: Parameters) -> None:
    """Add the attention block to x; keys and values of the tokens are kept."""
    spec, isa = schedule.spec, schedule.isa
    tokens = take.take_number("tokens")
    position = take.take_number("position")
    context = take.take_number("context")
    x = take.take_array("x", "float32")
    before = take.take_array("before", "float32") if spec.keeps_input else None
    norm = schedule.take_norm(take)
    project = take.take_matrix("qkv", spec.qkv_rows, spec.hidden, spec.attention)
    bias = take.take_array("bias", "float32") if spec.qkv_bias else None
    head_norms = None
    if spec.head_norm:
        query_norm = take.take_array("query_norm", "float32")
        head_norms = (query_norm, take.take_array("key_norm", "float32"))
    output = take.take_matrix("output", spec.hidden, spec.width, spec.attention)
    output_bias = take.take_array("output_bias", "float32") if spec.output_bias else None
    output_norm = take.take_array("output_norm", "float32") if spec.norm_outputs else None
    cosines = take.take_array("cosines", "float32")
    sines = take.take_array("sines", "float32")
    keys = take.take_array("keys", KV_DTYPES[spec.kv])
    values = take.take_array("values", KV_DTYPES[spec.kv])
    scales = None
    if spec.kv == "int8":
        names = ("key_scales", "value_scales")
        scales = (take.take_array(names[0], "float16"), take.take_array(names[1], "float16"))
    qkv = take.take_array("qkv", "float32")
    hidden = schedule.take_chunk(take, "hidden", spec.hidden, tokens)
    mixed = schedule.take_chunk(take, "mixed", spec.width, tokens)
    sums, tops, totals = (
        take.take_array(f"span_{name}", "float32") for name in ("sums", "tops", "totals")
    )
    cache = make_cache(spec, keys, values, scales, context, hidden.once)

    def store_qkv(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
        total = value if bias is None else value + bias[row]
        v.store(qkv, token * spec.qkv_rows + row, total, 1)

    def add_residual(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
        place = v.let(token * spec.hidden + row)
        total = value if output_bias is None else value + output_bias[row]
        if output_norm is not None:
            # What attention has read is not needed any more.
            v.store(hidden.values, place, total, 1)
            return
        if spec.residual_factor != 1.0:
            total = total * v.constant(spec.residual_factor, "float32")
        v.store(x, place, x[place] + total, 1)

    def prepare(token: v.Expr) -> None:
        if before is not None:
            emit_copy(x, before, v.let(token * spec.hidden), spec.hidden)
        emit_normalize(spec, x, token, norm, hidden, token)

    emit_each_token(tokens, prepare)
    emit_multiply(isa, spec.threads, project, hidden, tokens, store_qkv)

    def keep(token: v.Expr) -> None:
        if head_norms is not None:
            emit_head_norms(spec, qkv, *head_norms, cache.once, token)
        emit_rope(spec, qkv, cosines, sines, cache.once, token, position)
        emit_append(spec, qkv, cache, token, position)

    emit_each_token(tokens, keep)
    output_values = mixed.values
    with T.If(tokens == 1):
        with T.Then():
            spans = divide_blocks(spec, position, sums, tops, totals)
            span_bytes = 2 * KV_BLOCK * spec.head_dim * KV_ELEMENT_BYTES[spec.kv]

            def attend_span(task: v.Expr) -> None:
                span = v.let(T.floormod(task, spans.count))
                head = v.let(T.floordiv(task, spans.count))
                emit_span_attention(spec, qkv, cache, spans, position, span, head)

            emit_shared(
                spec.kv_heads * spans.count,
                v.wide(spans.blocks) * (span_bytes * spec.kv_heads),
                attend_span,
            )
            emit_merge(spec, spans, cache, output_values)
        with T.Else():
            together = count_tile_tokens(spec)
            tiles = v.let(T.floordiv(tokens + together - 1, together))
            with T.parallel(tiles * spec.kv_heads) as task:
                # Heads outermost: every thread gets early and late tokens alike.
                tile = v.let(T.floormod(task, tiles))
                head = v.let(T.floordiv(task, tiles))
                emit_chunk_attention(spec, qkv, cache, output_values, tokens, position, tile, head)
    emit_each_token(tokens, lambda t: emit_quantize(mixed, t))
    emit_multiply(isa, spec.threads, output, mixed, tokens, add_residual)
    if output_norm is not None:
        norms = (output_norm, hidden.once)
        emit_each_token(tokens, lambda t: emit_add_normalized(spec, hidden.values, x, *norms, t))
