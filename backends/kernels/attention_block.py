"""The functions of a layer's attention block, from norm to residual."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.compiler.vectors import Parameters
from pi2.backends.kernels.altup import Prediction, take_prediction
from pi2.backends.kernels.attention import Attending, divide_blocks, emit_merge, emit_span_attention
from pi2.backends.kernels.chunk_attention import Chunk, emit_chunk_attention
from pi2.backends.kernels.kv import (
    Cache,
    count_lanes,
    emit_append,
    emit_clip,
    emit_rope,
    emit_scale_queries,
    make_cache,
)
from pi2.backends.kernels.matrix import Matrix, emit_multiply, emit_quantize, emit_shared
from pi2.backends.kernels.mixing_arithmetic import Room, take_room
from pi2.backends.kernels.norms import (
    NormWeights,
    emit_add_normalized,
    emit_copy,
    emit_head_norms,
    emit_mixed_norm,
    emit_normalize,
    emit_value_norms,
)
from pi2.backends.kernels.operands import Activations
from pi2.backends.kernels.schedule import Schedule, emit_each_token, take_matrix
from pi2.backends.kernels.spec import KV_BLOCK, KV_DTYPES, SPANS
from pi2.plan.arithmetic.units import KV_ELEMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class MixingBlock:
    """Parameters of the functions of attention, latent attention, and layers with a state."""

    schedule: Schedule
    tokens: v.Expr
    """Their number; in a function for one token, which it is."""
    position: v.Expr
    x: v.Buffer
    before: v.Buffer | None
    """Copy of x for later readers."""
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
        """Normalise x of all tokens and project it; ``store(token, row, product)``, no bias."""
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
        """Project the ``mixed`` values and add them to x; ``other_rows`` are another unit's."""
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
            if spec.model.multipliers.residual != 1.0:
                total = total * v.constant(spec.model.multipliers.residual, "float32")
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


def emit_attend(schedule: Schedule, take: Parameters) -> None:
    """Add the attention block to x; the tokens go into the KV cache."""
    block = _take_block(schedule, take, "tokens", has_room=True)
    block.emit_project()
    block.emit_keep_and_mix()
    block.emit_output()


def emit_attend_mix_tokens(schedule: Schedule, take: Parameters) -> None:
    """Append the tokens of one sequence to the KV cache, and mix for each of them."""
    _take_block(schedule, take, "tokens", has_room=True).emit_keep_and_mix()


def emit_attend_project(schedule: Schedule, take: Parameters) -> None:
    """Set QKV of the tokens of several sequences."""
    _take_block(schedule, take, "tokens").emit_project()


def emit_attend_mix(schedule: Schedule, take: Parameters) -> None:
    """Keep key and value of one of them, and mix the values of its sequence."""
    block = _take_block(schedule, take, "token")
    block.emit_keep(block.tokens, T.int32(0))
    block.emit_mix(block.tokens)


def emit_attend_output(schedule: Schedule, take: Parameters) -> None:
    """Add the mixer's outputs of all of them to x."""
    _take_block(schedule, take, "tokens").emit_output()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block(MixingBlock):
    head_norms: tuple[v.Buffer, v.Buffer | None] | None
    sinks: v.Buffer | None
    growth: v.Buffer | None
    tables: tuple[v.Buffer, v.Buffer]
    cache: Cache
    qkv: v.Buffer
    mixed: Activations
    mixed_norm: v.Buffer | None
    spans: tuple[v.Buffer, v.Buffer, v.Buffer]
    room: Room | None
    """The room in which several tokens of a sequence are mixed, in functions that do so."""

    def emit_project(self) -> None:
        """Normalise x; QKV of all tokens."""
        spec, qkv, bias = self.schedule.spec, self.qkv, self.bias

        def store_qkv(token: v.Expr, own: v.Expr, value: v.Expr) -> None:
            row = v.let(own + spec.rows.qkv) if spec.rows.qkv else own
            total = value if bias is None else value + bias[row]
            v.store(qkv, token * spec.attention.projected + row, total, 1)

        self.emit_input(store_qkv)

    def emit_keep(self, token: v.Expr, offset: v.Expr) -> None:
        """Turn queries and keys of ``token``, which stands ``offset`` behind the position; keep key
        and value, unless they are another layer's."""
        spec, qkv, cache = self.schedule.spec, self.qkv, self.cache
        is_first = spec.attention.options.head_norm_place == "before"
        if self.head_norms is not None and is_first:
            emit_head_norms(spec, qkv, *self.head_norms, cache.once, token)
        if spec.attention.options.value_norm and spec.attention.has_keys:
            emit_value_norms(spec, qkv, cache.once, token)
        if spec.attention.options.clip is not None:
            emit_clip(spec, qkv, spec.attention.options.clip, cache.once, token)
        at = v.let(self.position + offset)
        emit_rope(spec, qkv, self.tables, cache.once, token, at, self.growth)
        if self.head_norms is not None and not is_first:
            emit_head_norms(spec, qkv, *self.head_norms, cache.once, token)
            emit_scale_queries(spec, qkv, cache.once, token, at, self.growth)
        if spec.attention.has_keys:
            emit_append(spec, qkv, cache, token, at)

    def emit_keep_and_mix(self) -> None:
        """Append all tokens, which are of one sequence, to the KV cache, and mix for each."""
        tokens = self.tokens
        emit_each_token(tokens, lambda token: self.emit_keep(token, token))
        with T.If(tokens == 1):
            with T.Then():
                self.emit_mix(T.int32(0))
            with T.Else():
                self.emit_mix_chunk()

    def emit_mix(self, token: v.Expr) -> None:
        """Attention of only ``token``, at the position."""
        spec, qkv, cache, position = self.schedule.spec, self.qkv, self.cache, self.position
        spans = divide_blocks(spec, position, *self.spans)
        attending = Attending(spec, qkv, cache)
        span_bytes = 2 * KV_BLOCK * spec.attention.head_dim * KV_ELEMENT_BYTES[spec.kv]

        def attend_span(task: v.Expr) -> None:
            span = v.let(T.floormod(task, spans.count))
            head = v.let(T.floordiv(task, spans.count))
            emit_span_attention(attending, spans, position, span, head, token)

        emit_shared(
            spec.attention.kv_heads * spans.count,
            v.wide(spans.blocks) * (span_bytes * spec.attention.kv_heads),
            attend_span,
        )
        emit_merge(spec, spans, cache, self.mixed.values, token, self.sinks)
        self.emit_end(token)

    def emit_mix_chunk(self) -> None:
        assert self.room is not None
        chunk = Chunk(
            schedule=self.schedule,
            qkv=self.qkv,
            cache=self.cache,
            output=self.mixed.values,
            codes=self.mixed.codes,
            tokens=self.tokens,
            position=self.position,
            sinks=self.sinks,
            room=self.room,
        )
        emit_chunk_attention(chunk)
        if self.schedule.spec.attention.options.output_gate or self.mixed_norm is not None:
            emit_each_token(self.tokens, self.emit_end)

    def emit_end(self, token: v.Expr) -> None:
        """Change what ``token`` has mixed as the projection takes it: gates and a norm."""
        if self.schedule.spec.attention.options.output_gate:
            self.emit_gates(token)
        if self.mixed_norm is not None:
            spec, once = self.schedule.spec, self.hidden.once
            emit_mixed_norm(spec, self.mixed.values, self.mixed_norm, once, token)

    def emit_gates(self, token: v.Expr) -> None:
        """Multiply what ``token`` has mixed by its gates' sigmoids or softplus."""
        spec, values = self.schedule.spec, self.mixed.values
        size = spec.attention.heads * spec.attention.head_dim
        lanes = count_lanes(size)
        gates = v.let(token * spec.attention.projected + (spec.attention.projected - size))
        with T.serial(size // lanes * self.hidden.once) as step:
            place = v.let(token * spec.attention.stored_query + step * lanes)
            gate = v.let(v.load(self.qkv, gates + step * lanes, lanes))
            take = (
                v.take_softplus
                if spec.attention.options.output_gate_function == "softplus"
                else v.take_sigmoid
            )
            part = v.load(values, place, lanes) * take(gate, lanes)
            v.store(values, place, part, lanes)

    def emit_output(self) -> None:
        """Project the mixer's output and add it to x."""
        self.emit_add(self.mixed, self.schedule.spec.rows.output)


def _take_block(
    schedule: Schedule, take: Parameters, number: str, *, has_room: bool = False
) -> _Block:
    """Declare the parameters; ``number`` names the first: how many tokens, or which."""
    spec = schedule.spec
    tokens = take.take_number(number)
    position = take.take_number("position")
    context = take.take_number("context")
    x = schedule.take_rows(take, "x")
    before = schedule.take_rows(take, "before") if spec.keeps_input else None
    norm = schedule.take_input_norm(take)
    project = take_matrix(
        take, "qkv", spec.attention.projected - spec.rows.qkv, spec.hidden, spec.precision.attention
    )
    bias = (
        take.take_array("qkv_bias", "float32", spec.attention.projected)
        if spec.attention.options.has_bias
        else None
    )
    head_norms = None
    if spec.attention.head_norm:
        is_whole = spec.attention.options.head_norm_of == "all"
        sizes = (spec.attention.heads, spec.attention.kv_heads) if is_whole else (1, 1)
        query_norm = take.take_array("query_norm", "float32", sizes[0] * spec.attention.head_dim)
        key_norm = None
        if spec.attention.has_keys:
            key_norm = take.take_array("key_norm", "float32", sizes[1] * spec.attention.head_dim)
        head_norms = (query_norm, key_norm)
    sinks = (
        take.take_array("sinks", "float32", spec.attention.heads) if spec.attention.sinks else None
    )
    growth = take.take_array("growth", "float32", "context") if spec.attention.growth else None
    output = take_matrix(
        take,
        "output",
        spec.hidden - spec.rows.output,
        spec.attention.stored_query,
        spec.precision.attention,
    )
    output_bias = (
        take.take_array("output_bias", "float32", spec.hidden)
        if spec.attention.options.output_bias
        else None
    )
    output_norm = (
        take.take_array("output_norm", "float32", spec.hidden) if spec.norm.outputs else None
    )
    half = ("float32", "context", spec.attention.head_dim // 2)
    tables = (take.take_array("cosines", *half), take.take_array("sines", *half))
    kept = (KV_DTYPES[spec.kv], "context", spec.attention.kv_heads, spec.attention.head_dim)
    keys, values = take.take_array("keys", *kept), take.take_array("values", *kept)
    scales = None
    if spec.kv == "int8":
        each = ("float16", "context", spec.attention.kv_heads)
        scales = (take.take_array("key_scales", *each), take.take_array("value_scales", *each))
    qkv = take.take_array("qkv", "float32", "tokens", spec.attention.projected)
    # Which token it is may be 0, and the context never is.
    count = tokens if number == "tokens" else context
    hidden = schedule.take_chunk(take, "hidden", spec.hidden, count)
    mixed = schedule.take_chunk(take, "mixed", spec.attention.stored_query, count)
    mixed_norm = (
        take.take_array("attention_sub_norm", "float32", spec.attention.stored_query)
        if spec.attention.options.sub_norm
        else None
    )
    spans = (spec.attention.heads, SPANS)
    sums = take.take_array("span_sums", "float32", *spans, spec.attention.head_dim)
    tops, totals = (
        take.take_array(f"span_{name}", "float32", *spans) for name in ("tops", "totals")
    )
    return _Block(
        schedule=schedule,
        tokens=tokens,
        position=position,
        x=x,
        before=before,
        norm=norm,
        project=project,
        bias=bias,
        head_norms=head_norms,
        sinks=sinks,
        growth=growth,
        output=output,
        output_bias=output_bias,
        output_norm=output_norm,
        tables=tables,
        cache=make_cache(spec, keys, values, scales, context, hidden.once),
        qkv=qkv,
        hidden=hidden,
        mixed=mixed,
        mixed_norm=mixed_norm,
        spans=(sums, tops, totals),
        streams=take_prediction(schedule, take, count),
        room=take_room(take, spec) if has_room else None,
    )
