"""The functions of a layer's latent attention, from norm to residual (`kernels.latent`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.compiler.vectors import Parameters
from pi2.backends.kernels.attention import (
    Kept,
    MixedHeads,
    count_heads_together,
    divide_blocks,
    emit_divide,
    emit_heads,
    emit_keep_row,
    emit_merge_spans,
)
from pi2.backends.kernels.attention_block import MixingBlock
from pi2.backends.kernels.matrix import (
    PARALLEL_BYTES,
    Matrix,
    emit_multiply,
    emit_quantize,
    emit_row,
    emit_shared,
    emit_split,
)
from pi2.backends.kernels.operands import Activations
from pi2.backends.kernels.schedule import Schedule, emit_each_token, take_activations, take_matrix
from pi2.backends.kernels.spec import KV_BLOCK, KV_DTYPES, SPANS
from pi2.plan.arithmetic.units import KV_ELEMENT_BYTES
from pi2.plan.documents.model_mixing import Latent
from pi2.plan.weights.layout import fill_groups, vector_bytes


def emit_latent_attend(schedule: Schedule, take: Parameters) -> None:
    """Add the attention block to x; the KV latents are cached."""
    block = _take_block(schedule, take, "tokens")
    block.emit_project()
    block.emit_keep_and_mix()
    block.emit_output()


def emit_latent_project(schedule: Schedule, take: Parameters) -> None:
    """Set queries and KV latents of the tokens of several sequences."""
    _take_block(schedule, take, "tokens").emit_project()


def emit_latent_mix(schedule: Schedule, take: Parameters) -> None:
    block = _take_block(schedule, take, "token")
    block.emit_keep(block.tokens, T.int32(0))
    block.emit_mix(block.tokens)


def emit_latent_output(schedule: Schedule, take: Parameters) -> None:
    """Add the mixer's outputs of all of them to x."""
    _take_block(schedule, take, "tokens").emit_output()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block(MixingBlock):
    latent: Latent
    query_norm: v.Buffer | None
    query_out: Matrix | None
    norm_weight: v.Buffer
    to_latent: Matrix
    to_value: Matrix
    tables: tuple[v.Buffer, v.Buffer]
    kept: Kept
    qkv: v.Buffer
    queries: v.Buffer
    made: Activations | None
    """What queries are made of."""
    growth: v.Buffer | None
    """Factors of queries [context]."""
    plain: Activations
    """The plain part of queries, [tokens, heads]."""
    absorbed: v.Buffer
    """Queries of the KV latents [tokens, heads, kept]."""
    found: Activations
    """What heads have mixed of it [tokens, heads]."""
    mixed: Activations
    spans: tuple[v.Buffer, v.Buffer, v.Buffer]

    def _find_scale(self, at: v.Expr) -> v.Expr:
        """Return the factor of scores of the token that stands ``at``."""
        scale = self.schedule.spec.attention.options.scale or 1.0 / math.sqrt(self.latent.key)
        factor = v.constant(scale, "float32")
        return v.let(factor if self.growth is None else factor * self.growth[at])

    def emit_project(self) -> None:
        """Normalise x; queries of the KV latents, and new latents, of all tokens."""
        spec, isa, latent = self.schedule.spec, self.schedule.isa, self.latent
        qkv, bias, rows = self.qkv, self.bias, spec.attention.projected

        def store_qkv(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
            v.store(qkv, token * rows + row, value if bias is None else value + bias[row], 1)

        def normalize(token: v.Expr) -> None:
            place = v.let(token * rows + (rows - latent.kept))
            _emit_vector_norm(self, qkv, place, self.norm_weight, latent.rank, qkv, place)
            if self.schedule.spec.attention.gates:
                self._emit_gates(v.let(place - self.schedule.spec.attention.gates))
            rank = latent.query_rank
            if self.made is not None and self.query_norm is not None and rank is not None:
                start = v.let(token * rows)
                target = v.let(token * self.made.length)
                args = (self.query_norm, rank, self.made.values, target)
                _emit_vector_norm(self, qkv, start, *args)
                emit_quantize(self.made, token)

        self.emit_input(store_qkv)
        emit_each_token(self.tokens, normalize)
        if self.made is not None and self.query_out is not None:
            width = spec.attention.heads * latent.key

            def store_query(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
                v.store(self.queries, token * width + row, value, 1)

            matrix = self.query_out
            emit_multiply(isa, spec.threads, matrix, self.made, self.tokens, store_query)
        emit_each_token(self.tokens, self._emit_plain)

        def store_absorbed(vector: v.Expr, row: v.Expr, value: v.Expr) -> None:
            v.store(self.absorbed, vector * latent.kept + row, value, 1)

        self._emit_by_head(self.to_latent, latent.rank, self.plain, store_absorbed)

    def _emit_gates(self, first: v.Expr) -> None:
        """Turn the gates of all heads, from ``first`` on, into factors."""
        with T.serial(self.schedule.spec.attention.gates) as head:
            place = v.let(first + head)
            v.store(self.qkv, place, v.take_sigmoid(v.let(self.qkv[place]), 1), 1)

    def _find_query(self, token: v.Expr, head: v.Expr) -> tuple[v.Buffer, v.Expr]:
        key, heads = self.latent.key, self.schedule.spec.attention.heads
        if self.made is None:
            return self.qkv, v.let(token * self.schedule.spec.attention.projected + head * key)
        return self.queries, v.let((token * heads + head) * key)

    def _emit_plain(self, token: v.Expr) -> None:
        """Take the plain parts of the queries of ``token``."""
        size = self.latent.plain
        lanes = math.gcd(size, 16)
        with T.serial(self.schedule.spec.attention.heads) as head:
            source, place = self._find_query(token, head)
            vector = v.let(token * self.schedule.spec.attention.heads + head)
            with T.serial(size // lanes * self.hidden.once) as step:
                part = v.load(source, place + step * lanes, lanes)
                v.store(self.plain.values, vector * self.plain.length + step * lanes, part, lanes)
            emit_quantize(self.plain, vector)

    def _emit_by_head(
        self,
        matrix: Matrix,
        rows: int,
        activations: Activations,
        finish: Callable[[v.Expr, v.Expr, v.Expr], None],
    ) -> None:
        """Multiply ``rows`` rows of a matrix for each head with its vectors of all tokens;
        ``finish(vector, row of the head, product)`` with vector = token heads + head."""
        spec, isa, tokens = self.schedule.spec, self.schedule.isa, self.tokens

        def emit_thread(thread: v.Expr) -> None:
            begin, end = emit_split(thread, spec.threads, spec.attention.heads * rows)
            with T.serial(end - begin) as step:
                row = v.let(begin + step)
                head = v.let(T.floordiv(row, rows))
                inside = v.let(row - head * rows)
                with T.serial(tokens) as token:
                    vector = v.let(token * spec.attention.heads + head)

                    def keep(_token: v.Expr, _row: v.Expr, value: v.Expr) -> None:
                        finish(vector, inside, value)

                    emit_row(isa, matrix.take_row(row), activations, vector, row, keep)

        read_bytes = spec.attention.heads * rows * vector_bytes(matrix.length, matrix.precision)
        with T.If(tokens == 1):
            with T.Then():
                emit_shared(spec.threads, read_bytes, emit_thread)
            with T.Else():
                emit_shared(spec.threads, PARALLEL_BYTES, emit_thread)

    def emit_keep(self, token: v.Expr, offset: v.Expr) -> None:
        """Turn the rotated parts of queries and key of ``token``, which stands ``offset`` behind
        the position; keep its row."""
        spec, latent = self.schedule.spec, self.latent
        at = v.let(self.position + offset)
        row = v.let(token * spec.attention.projected + (spec.attention.projected - latent.kept))
        place = v.let(row + latent.rank)
        self._emit_turn(self.qkv, place, self.qkv, place, at)
        emit_keep_row(self.kept, self.qkv, row, at)
        with T.serial(spec.attention.heads) as head:
            source, query = self._find_query(token, head)
            target = v.let((token * spec.attention.heads + head) * latent.kept + latent.rank)
            first = v.let(query + latent.plain)
            self._emit_turn(source, first, self.absorbed, target, at)

    def _emit_turn(
        self, source: v.Buffer, place: v.Expr, target: v.Buffer, result: v.Expr, at: v.Expr
    ) -> None:
        """Rotate a vector, of which element i turns with element i + rotated / 2."""
        half = self.latent.rotated // 2
        lanes = math.gcd(half, 16)
        cosines, sines = self.tables
        with T.serial(half // lanes * self.hidden.once) as step:
            offset = v.let(step * lanes)
            cosine = v.let(v.load(cosines, at * half + offset, lanes))
            sine = v.let(v.load(sines, at * half + offset, lanes))
            first = v.let(v.load(source, place + offset, lanes))
            second = v.let(v.load(source, place + half + offset, lanes))
            v.store(target, result + offset, first * cosine - second * sine, lanes)
            v.store(target, result + half + offset, second * cosine + first * sine, lanes)

    def emit_keep_and_mix(self) -> None:
        tokens = self.tokens
        emit_each_token(tokens, lambda token: self.emit_keep(token, token))
        with T.If(tokens == 1):
            with T.Then():
                self.emit_mix(T.int32(0))
            with T.Else():
                self._emit_mix_chunk()

    def _list_heads(self, token: v.Expr, first: v.Expr) -> list[v.Expr]:
        heads = self.schedule.spec.attention.heads
        return [
            v.let(token * heads + first + index) for index in range(count_heads_together(heads))
        ]

    def emit_mix(self, token: v.Expr) -> None:
        """Attention of only ``token``, at the position."""
        spec, latent, kept, position = self.schedule.spec, self.latent, self.kept, self.position
        spans = divide_blocks(spec, position, *self.spans)
        together = count_heads_together(spec.attention.heads)
        row_bytes = KV_BLOCK * latent.kept * KV_ELEMENT_BYTES[spec.kv]
        scale = self._find_scale(position)

        def attend_span(task: v.Expr) -> None:
            span = v.let(T.floormod(task, spans.count))
            first = v.let(T.floordiv(task, spans.count) * together)
            skipped = v.let(span * spans.size)
            count = v.let(T.min(spans.blocks - skipped, spans.size))
            sources = [v.let(vector * latent.kept) for vector in self._list_heads(token, first)]
            places = [v.let((first + index) * SPANS + span) for index in range(together)]

            def finish(index: int, top: v.Expr, total: v.Expr) -> None:
                v.store(spans.tops, places[index], top, 1)
                v.store(spans.totals, places[index], total, 1)

            results = [v.let(place * latent.rank) for place in places]
            begin = v.let(spans.begin + skipped)
            heads = MixedHeads(self.absorbed, sources, spans.sums, results)
            emit_heads(kept, heads, position, begin, count, scale, finish)

        tasks = spec.attention.heads // together * spans.count
        emit_shared(tasks, v.wide(spans.blocks) * (row_bytes * spec.attention.heads), attend_span)
        values, length = self.found.values, self.found.length
        emit_merge_spans(
            kept,
            spans,
            spec.attention.heads,
            values,
            lambda head: (token * spec.attention.heads + head) * length,
        )

    def _emit_mix_chunk(self) -> None:
        spec, latent, kept, tokens = self.schedule.spec, self.latent, self.kept, self.tokens
        together = count_heads_together(spec.attention.heads)
        with T.parallel(tokens * (spec.attention.heads // together)) as task:
            # Heads outermost: every thread gets early and late tokens alike.
            token = v.let(T.floormod(task, tokens))
            vectors = self._list_heads(token, v.let(T.floordiv(task, tokens) * together))
            last = v.let(self.position + token)
            blocks = v.let(T.floordiv(last, KV_BLOCK) + 1)
            results = [v.let(vector * self.found.length) for vector in vectors]
            sources = [v.let(vector * latent.kept) for vector in vectors]
            values = self.found.values

            def finish(index: int, _top: v.Expr, total: v.Expr) -> None:
                emit_divide(kept, values, results[index], total)

            begin, scale = T.int32(0), self._find_scale(last)
            heads = MixedHeads(self.absorbed, sources, values, results)
            emit_heads(kept, heads, last, begin, blocks, scale, finish)

    def emit_output(self) -> None:
        """Turn mixed latents into values, project them, and add them to x."""
        spec, latent = self.schedule.spec, self.latent

        def quantize(token: v.Expr) -> None:
            with T.serial(spec.attention.heads) as head:
                emit_quantize(self.found, v.let(token * spec.attention.heads + head))

        def store_value(vector: v.Expr, row: v.Expr, value: v.Expr) -> None:
            token = v.let(T.floordiv(vector, spec.attention.heads))
            head = v.let(vector - token * spec.attention.heads)
            if self.schedule.spec.attention.gates:
                first = spec.attention.projected - latent.kept - self.schedule.spec.attention.gates
                value = value * self.qkv[token * spec.attention.projected + first + head]
            place = token * spec.attention.stored_query + head * spec.attention.head_dim + row
            v.store(self.mixed.values, place, value, 1)

        emit_each_token(self.tokens, quantize)
        self._emit_by_head(self.to_value, spec.attention.head_dim, self.found, store_value)
        self.emit_add(self.mixed)


def _emit_vector_norm(
    block: _Block,
    source: v.Buffer,
    place: v.Expr,
    weight: v.Buffer,
    size: int,
    target: v.Buffer,
    result: v.Expr,
) -> None:
    """RMSNorm of ``size`` elements at ``place``."""
    lanes, once = math.gcd(size, 16), block.hidden.once
    squares = v.Cell(v.constant(0.0, "float32", lanes))
    with T.serial(size // lanes * once) as step:
        part = v.let(v.load(source, place + step * lanes, lanes))
        squares.set(T.fma(part, part, squares.get()))
    total = v.add_lanes(squares.get(), "float32", lanes) * v.constant(1.0 / size, "float32")
    mean = total + v.constant(block.latent.epsilon, "float32")
    factor = v.let(v.constant(1.0, "float32") / T.sqrt(mean))
    with T.serial(size // lanes * once) as step:
        part = v.load(source, place + step * lanes, lanes) * v.splat(factor, lanes)
        part = part * v.load(weight, step * lanes, lanes)
        v.store(target, result + step * lanes, part, lanes)


def _take_block(schedule: Schedule, take: Parameters, number: str) -> _Block:
    """Declare the parameters; ``number`` names the first: how many tokens, or which."""
    spec, latent = schedule.spec, schedule.spec.attention.latent
    assert latent is not None
    heads, precision = spec.attention.heads, spec.precision.attention
    tokens = take.take_number(number)
    position = take.take_number("position")
    context = take.take_number("context")
    # Which token it is may be 0, and the context never is.
    count = tokens if number == "tokens" else context
    x = schedule.take_rows(take, "x")
    before = schedule.take_rows(take, "before") if spec.keeps_input else None
    norm = schedule.take_input_norm(take)
    project = take_matrix(take, "qkv", spec.attention.projected, spec.hidden, precision)
    bias = (
        take.take_array("qkv_bias", "float32", spec.attention.projected)
        if spec.attention.options.has_bias
        else None
    )
    query_norm = query_out = made = None
    if latent.query_rank:
        size = fill_groups(latent.query_rank)
        query_norm = take.take_array("latent_query_norm", "float32", size)
        query_out = take_matrix(take, "latent_query_out", heads * latent.key, size, precision)
        made = schedule.take_chunk(take, "made", size, count)
    queries = take.take_array("queries", "float32", "tokens", heads * latent.key)

    def take_vectors(name: str, width: int) -> Activations:
        return take_activations(
            take, name, fill_groups(width), spec.planes, count, rows="token_heads"
        )

    def take_weights(name: str, rows: int, width: int) -> Matrix:
        return take_matrix(take, name, heads * rows, fill_groups(width), precision)

    output = take_matrix(take, "output", spec.hidden, spec.attention.stored_query, precision)
    vector = ("float32", spec.hidden)
    half = ("float32", "context", latent.rotated // 2)
    scales = None
    rows = take.take_array("keys", KV_DTYPES[spec.kv], "context", latent.kept)
    if spec.kv == "int8":
        scales = take.take_array("key_scales", "float16", "context")
    hidden = schedule.take_chunk(take, "hidden", spec.hidden, count)
    each = ("float32", heads, SPANS)
    return _Block(
        schedule=schedule,
        latent=latent,
        tokens=tokens,
        position=position,
        x=x,
        before=before,
        norm=norm,
        project=project,
        bias=bias,
        query_norm=query_norm,
        query_out=query_out,
        norm_weight=take.take_array("latent_norm", "float32", latent.rank),
        to_latent=take_weights("latent_key", latent.rank, latent.plain),
        to_value=take_weights("latent_value", spec.attention.head_dim, latent.rank),
        output=output,
        output_bias=take.take_array("output_bias", *vector)
        if spec.attention.options.output_bias
        else None,
        output_norm=take.take_array("output_norm", *vector) if spec.norm.outputs else None,
        tables=(take.take_array("cosines", *half), take.take_array("sines", *half)),
        kept=Kept(shape=latent, kv=spec.kv, rows=rows, scales=scales, once=hidden.once),
        qkv=take.take_array("qkv", "float32", "tokens", spec.attention.projected),
        queries=queries,
        made=made,
        growth=take.take_array("growth", "float32", "context") if spec.attention.growth else None,
        plain=take_vectors("plain", latent.plain),
        absorbed=take.take_array("absorbed", "float32", "token_heads", latent.kept),
        found=take_vectors("found", latent.rank),
        hidden=hidden,
        mixed=schedule.take_chunk(take, "mixed", spec.attention.stored_query, count),
        spans=(
            take.take_array("span_sums", *each, latent.rank),
            take.take_array("span_tops", *each),
            take.take_array("span_totals", *each),
        ),
    )
