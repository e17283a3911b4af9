"""The functions at a model's ends: token ids to vectors, vectors to logits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.compiler.vectors import Parameters
from pi2.backends.kernels.altup import Correction, take_correction, take_joining, take_making
from pi2.backends.kernels.kv import count_lanes
from pi2.backends.kernels.matrix import Matrix, emit_multiply, emit_quantize
from pi2.backends.kernels.neurons import activate_smoothly
from pi2.backends.kernels.norms import (
    emit_add_normalized,
    emit_embedding_norm,
    emit_normalize,
    emit_scale,
    invert_root,
)
from pi2.backends.kernels.operands import Activations, Vector, list_runs
from pi2.backends.kernels.schedule import (
    Schedule,
    emit_each_token,
    take_activations,
    take_matrix,
    take_rows,
)
from pi2.backends.kernels.unpacking import find_unpacking
from pi2.plan.weights.layout import GROUP, scale_bytes, weight_bytes


def emit_unpack(vector: Vector, length: int, target: v.Buffer, base: v.Expr) -> None:
    """Write the float32 values of ``vector`` to ``target[base : base + length]``."""
    if find_unpacking(vector.precision).packing.is_plain:
        with T.serial(length // 16) as step:
            values = v.load_halves(vector.weights, vector.weights_base + v.wide(step * 32), 16)
            v.store(target, base + step * 16, values, 16)
        return
    for lanes, first, count in list_runs(length):
        with T.serial(count) as block, T.serial(lanes) as lane:
            _emit_group(vector, target, base, v.let(first + block * lanes), lane, lanes)


def _emit_group(
    vector: Vector, target: v.Buffer, base: v.Expr, first: v.Expr, lane: v.Expr, lanes: int
) -> None:
    """Unpack group ``first + lane`` of the block of ``lanes`` that begins with ``first``."""
    unpacking = find_unpacking(vector.precision)
    scale = v.let(unpacking.load_scales(vector, first + lane, 1))
    start = base + (first + lane) * GROUP
    for chunk in range(unpacking.chunks):
        inner = first * unpacking.group_bytes + chunk * 4 * lanes + lane * 4
        raw = v.let(v.load(vector.weights, vector.weights_base + v.wide(inner), 4))
        offset = v.constant(float(unpacking.packing.offset), "float32", 4)
        for place, fields in unpacking.split_bytes(raw, chunk):
            values = v.cast(fields, "float32", 4) - offset
            v.store(target, start + place, values * v.splat(scale, 4), 4)


def emit_embed_layers(schedule: Schedule, take: Parameters) -> None:
    """Set ``layer_inputs`` float32 [layers, room, width] of the tokens, by rows of the layers'
    table and a projection of x, and the residual streams in addition to x; ``room``: tokens that
    each layer has room for."""
    spec, own = schedule.spec, schedule.spec.model.layer_embedding
    assert own is not None
    tokens, room = take.take_number("tokens"), take.take_number("room")
    x = schedule.take_rows(take, "x")
    table, scales = take_rows(
        take, "layer_embedding", "tokens", spec.layer_row, spec.precision.embedding
    )
    rows, width = spec.model.shape.layers * own.width, own.stored_width
    project = take_matrix(take, "layer_projection", rows, spec.hidden, spec.precision.attention)
    norm = take.take_array("layer_projection_norm", "float32", width)
    hidden = schedule.take_chunk(take, "hidden", spec.hidden, tokens)
    unpacked = take.take_array("layer_rows", "float32", "tokens", spec.layer_row)
    inputs = take.take_array("layer_inputs", "float32", spec.model.shape.layers, "tokens", width)
    lanes = count_lanes(own.width)

    def store(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
        layer, element = T.floordiv(row, own.width), T.floormod(row, own.width)
        place = v.let((layer * room + token) * width + element)
        v.store(inputs, place, value * v.constant(own.projection_factor, "float32"), 1)

    def finish(token: v.Expr) -> None:
        wide = v.wide(token)
        vector = Vector(
            weights=table,
            weights_base=v.let(wide * weight_bytes(spec.layer_row, spec.precision.embedding)),
            scales=scales,
            scales_base=v.let(wide * scale_bytes(spec.layer_row, spec.precision.embedding)),
            precision=spec.precision.embedding,
        )
        emit_unpack(vector, spec.layer_row, unpacked, v.let(token * spec.layer_row))
        with T.serial(spec.model.shape.layers) as layer:
            base = v.let((layer * room + token) * width)
            source = v.let(token * spec.layer_row + layer * own.width)
            squares = v.Cell(v.constant(0.0, "float32", lanes))
            with T.serial(own.width // lanes * hidden.once) as step:
                part = v.let(v.load(inputs, base + step * lanes, lanes))
                squares.set(T.fma(part, part, squares.get()))
            factor = invert_root(spec, squares.get(), own.width, lanes)
            half = v.constant(math.sqrt(0.5), "float32", lanes)
            with T.serial(own.width // lanes * hidden.once) as step:
                place = v.let(base + step * lanes)
                part = v.load(inputs, place, lanes) * v.splat(factor, lanes)
                part = part * v.load(norm, step * lanes, lanes)
                row = v.load(unpacked, source + step * lanes, lanes)
                part = part + row * v.constant(own.factor, "float32", lanes)
                v.store(inputs, place, part * half, lanes)

    making = take_making(schedule, take)
    emit_each_token(tokens, lambda token: emit_normalize(spec, x, token, None, hidden, token))
    emit_multiply(schedule.isa, spec.threads, project, hidden, tokens, store)
    emit_each_token(tokens, finish)
    if making is not None:
        making.emit(x, hidden, tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInput:
    """What adds a layer's own embedding to x, and room to work in."""

    schedule: Schedule
    width: int
    added: v.Buffer
    """What `emit_embed_layers` has made for the layer float32 [tokens, width]."""
    gate: Matrix
    output: Matrix
    norm: v.Buffer
    hidden: Activations
    inner: Activations
    streams: Correction | None
    """The values corrected first, if there are several residual streams."""

    def emit(self, x: v.Buffer, tokens: v.Expr) -> None:
        """Add it to x of all tokens; of several residual streams, to the others."""
        spec, isa, inner = self.schedule.spec, self.schedule.isa, self.inner
        hidden, lanes = self.hidden, count_lanes(self.width)

        def store_gate(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
            v.store(inner.values, token * inner.length + row, value, 1)

        def store_output(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
            # What the gates have read is not needed any more.
            v.store(hidden.values, token * spec.hidden + row, value, 1)

        def mix(token: v.Expr) -> None:
            # Zeros fill the last group up: nobody writes there.
            with T.serial(self.width // lanes * inner.once) as step:
                place = v.let(token * inner.length + step * lanes)
                gate = v.let(v.load(inner.values, place, lanes))
                value = activate_smoothly(spec, gate, lanes) * v.load(self.added, place, lanes)
                v.store(inner.values, place, value, lanes)
            emit_quantize(inner, token)

        def read(token: v.Expr) -> None:
            if self.streams is None:
                emit_normalize(spec, x, token, None, hidden, token)
                return
            self.streams.emit_correct(x, token)
            self.streams.emit_read(x, hidden, token)

        def add(token: v.Expr) -> None:
            if self.streams is None:
                emit_add_normalized(spec, hidden.values, x, self.norm, hidden.once, token)
                return
            self.streams.emit_add(hidden, self.norm, token)

        emit_each_token(tokens, read)
        emit_multiply(isa, spec.threads, self.gate, hidden, tokens, store_gate)
        emit_each_token(tokens, mix)
        emit_multiply(isa, spec.threads, self.output, inner, tokens, store_output)
        emit_each_token(tokens, add)


def take_layer_input(schedule: Schedule, take: Parameters, tokens: v.Expr) -> LayerInput | None:
    """Declare the parameters; None for models without such embeddings."""
    spec, own = schedule.spec, schedule.spec.model.layer_embedding
    hidden = spec.hidden
    if own is None:
        return None
    width = own.stored_width
    return LayerInput(
        schedule=schedule,
        width=own.width,
        added=take.take_array("layer_input", "float32", "tokens", width),
        gate=take_matrix(take, "layer_input_gate", own.width, hidden, spec.precision.attention),
        output=take_matrix(take, "layer_input_output", hidden, width, spec.precision.attention),
        norm=take.take_array("layer_input_norm", "float32", hidden),
        hidden=schedule.take_chunk(take, "hidden", hidden, tokens),
        inner=schedule.take_chunk(take, "layer_inner", width, tokens),
        streams=take_correction(schedule, take),
    )


def emit_embed(schedule: Schedule, take: Parameters) -> None:
    """Set x float32 [T, hidden] to rows ``ids`` of the embedding."""
    spec = schedule.spec
    tokens = take.take_number("tokens")
    # As many rows as are in memory.
    weights, scales = take_rows(take, "embedding", "rows", spec.hidden, spec.precision.embedding)
    ids = take.take_array("ids", "int32", "tokens")
    x = schedule.take_rows(take, "x")
    with T.serial(tokens) as token:
        row = v.let(v.wide(ids[token]))
        vector = Vector(
            weights=weights,
            weights_base=v.let(row * weight_bytes(spec.hidden, spec.precision.embedding)),
            scales=scales,
            scales_base=v.let(row * scale_bytes(spec.hidden, spec.precision.embedding)),
            precision=spec.precision.embedding,
        )
        base = v.let(token * spec.hidden)
        emit_unpack(vector, spec.hidden, x, base)
        emit_scale(x, base, spec.hidden, spec.model.multipliers.embedding)
        if spec.norm.embedding:
            emit_embedding_norm(spec, x, T.min(tokens, 1), token)


def emit_add_positions(schedule: Schedule, take: Parameters) -> None:
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
    model = spec.model
    first = take.take_number("first")
    tokens = take.take_number("tokens")
    x = schedule.take_rows(take, "x")
    norm = schedule.take_norm(take)
    head = take_matrix(
        take, "head", model.shape.vocab - spec.rows.head, spec.hidden, spec.precision.head
    )
    bias = take.take_array("head_bias", "float32", model.shape.vocab) if model.head_bias else None
    # All of them in a token's planes, however the chunk was computed.
    hidden = take_activations(
        take, "hidden", spec.hidden, spec.planes, tokens, spec.planes, isa=schedule.isa
    )
    logits = take.take_array("logits", "float32", "logits", model.shape.vocab)

    def keep(token: v.Expr, own: v.Expr, value: v.Expr) -> None:
        row = v.let(own + spec.rows.head) if spec.rows.head else own
        if bias is not None:
            value = value + bias[row]
        if model.multipliers.logits != 1.0:
            value = value * v.constant(model.multipliers.logits, "float32")
        if model.logit_softcap is not None:
            value = v.take_cap(value, model.logit_softcap, 1)
        v.store(logits, v.wide(token) * model.shape.vocab + v.wide(row), value, 1)

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
