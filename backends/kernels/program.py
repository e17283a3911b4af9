"""The functions of a compiled library: parameters and order of the kernels in each.

Every array parameter is a flat buffer.  Those of type uint8 may lie anywhere; the others are
64-byte aligned.  ``qa`` stands for the three arrays of quantised activations and their float32
values, in the order codes, scales, sums, values; schedules that multiply tokens in pairs add tiles
(`dots.Activations`) to those of a model's width.

======================  ==========================================================================
function                parameters: numbers, then arrays
======================  ==========================================================================
``embed``               T; weights, scales, ids int32 [T], x
``add_positions``       T, position; table fp16, x
``attend``              T, position, context; x, [before], norm, [bias], qkv weights, scales,
                        [bias], [norms of query and key heads], output weights, scales, [bias],
                        scales, cosines, sines, keys, values, [key scales, value scales: int8],
                        qkv, qa (hidden), qa (width), span sums, tops, totals
``begin_ffn``           T; x, norm, qa (hidden), y
``predict_low_rank_R``  neurons, threshold float32; in weights, scales, out weights, scales, bias,
                        qa (hidden), qa (R), scores, indices, found
``predict_gate``        neurons, [smooth: limit float32]; gate weights, scales, [biases], qa
                        (hidden), scores, indices, found
``add_neurons``         n; arena, slots, qa (hidden), scratch (`gathered.Scratch`), y, [routes]
``add_open_neurons``    n, [smooth: limit float32]; the same, scores, indices
``add_dense``           n, T; bundles, qa (hidden), values, masks, unpacked, y
``end_ffn``             T; x, y
``logits``              first, T; x, norm, weights, scales, qa (hidden), logits
``read_runs``           fd, start, step, n; vectors int64 [v, 2], firsts, counts, offsets int64,
                        results int64
======================  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import tvm
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from pi2.backends.kernels import vectors as v
from pi2.backends.kernels.attention import (
    count_tile_tokens,
    divide_blocks,
    emit_chunk_attention,
    emit_merge,
    emit_span_attention,
)
from pi2.backends.kernels.dots import Activations, Vector
from pi2.backends.kernels.embedding import emit_unpack
from pi2.backends.kernels.ffn import emit_dense
from pi2.backends.kernels.gathered import Scratch, emit_gathered
from pi2.backends.kernels.isa import Isa, choose_isa
from pi2.backends.kernels.kv import emit_append, emit_rope, make_cache
from pi2.backends.kernels.matrix import Matrix, emit_multiply, emit_shared
from pi2.backends.kernels.neurons import emit_leave_lane_order
from pi2.backends.kernels.norms import NormWeights, emit_head_norms, emit_normalize
from pi2.backends.kernels.plain import emit_plain_gathered
from pi2.backends.kernels.predictor import emit_activate, emit_compact, emit_low_rank
from pi2.backends.kernels.quantize import emit_quantize
from pi2.backends.kernels.reads import emit_read_runs
from pi2.backends.kernels.rows import emit_add_scaled, emit_copy, emit_scale
from pi2.backends.kernels.spec import KV_BLOCK, KV_DTYPES, KV_ITEM_BYTES, KernelSpec
from pi2.plan.layout import Precision, scale_bytes, weight_bytes


class Parameters:
    """Declares the parameters of the function under construction, in order."""

    def take_array(self, name: str, dtype: str) -> v.Buffer:
        """Declare a flat array of any size."""
        handle = T.arg(name, T.handle())
        size = T.int64()
        align = 1 if dtype == "uint8" else 64
        return T.match_buffer(handle, (size,), dtype, align=align)

    def take_number(self, name: str, dtype: str = "int32") -> v.Expr:
        """Declare a scalar."""
        return T.arg(name, T.int64() if dtype == "int64" else getattr(T, dtype)())

    def take_matrix(self, name: str, rows: int, length: int, precision: Precision) -> Matrix:
        """Declare weights and scales of a packed matrix."""
        return Matrix(
            weights=self.take_array(f"{name}_weights", "uint8"),
            scales=self.take_array(f"{name}_scales", "uint8"),
            rows=rows,
            length=length,
            precision=precision,
        )

    def take_activations(
        self,
        name: str,
        length: int,
        planes: int,
        count: v.Expr,
        chunk_planes: int | None = None,
        *,
        pairs: bool = False,
    ) -> Activations:
        """Declare the arrays of quantised activations; ``count`` is a positive parameter.

        With ``chunk_planes`` it is the number of tokens, and more than one have those planes and,
        with ``pairs``, the order of `i8mm`.
        """
        differs = chunk_planes is not None and (pairs or chunk_planes != planes)
        return Activations(
            several=count > 1 if differs else None,
            chunk_planes=chunk_planes or planes,
            once=T.min(count, 1),
            length=length,
            planes=planes,
            codes=self.take_array(f"{name}_codes", "int8"),
            scales=self.take_array(f"{name}_scales", "float32"),
            sums=self.take_array(f"{name}_sums", "int32"),
            values=self.take_array(f"{name}_values", "float32"),
            tiles=self.take_array(f"{name}_tiles", "int8") if pairs else None,
        )


def make_function(name: str, emit: Callable[[Parameters], None]) -> tvm.tirx.PrimFunc:
    """Build a function whose parameters and body ``emit`` adds."""
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name(name)
            T.func_attr({"global_symbol": name, "tirx.noalias": True})
            emit(Parameters())
    return builder.get()


def emit_each_token(tokens: v.Expr, emit: Callable[[v.Expr], None]) -> None:
    """Run ``emit`` for every token: in place for one, in parallel for more."""
    with T.If(tokens == 1):
        with T.Then():
            emit(T.int32(0))
        with T.Else(), T.parallel(tokens) as token:
            emit(token)


class Program:
    """The functions for one spec."""

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec
        self.isa: Isa = choose_isa(frozenset(spec.features), spec.architecture)

    def list_functions(self) -> dict[str, Callable[[Parameters], None]]:
        """Return what emits each function, by name."""
        functions: dict[str, Callable[[Parameters], None]] = {
            "embed": self.emit_embed,
            "attend": self.emit_attend,
            "begin_ffn": self.emit_begin_ffn,
            "add_neurons": self.emit_add_neurons,
            "add_dense": self.emit_add_dense,
            "end_ffn": self.emit_end_ffn,
            "logits": self.emit_logits,
            "read_runs": emit_read_runs,
        }
        if self.spec.has_plain_ffn:
            functions["add_plain_neurons"] = self.emit_add_plain_neurons
        if not self.spec.has_gathered_ffn:
            del functions["add_neurons"]
        if self.spec.some_full:
            functions["attend_all"] = Program(replace(self.spec, window=None)).emit_attend
        if self.spec.positions:
            functions["add_positions"] = self.emit_add_positions
        if self.spec.gate_rows is not None:
            functions["predict_gate"] = self.emit_predict_gate
            if not self.spec.has_plain_ffn:
                functions["add_open_neurons"] = self.emit_add_open_neurons
        for rank in self.spec.ranks:
            functions[f"predict_low_rank_{rank}"] = self._make_low_rank(rank)
        return functions

    def build_module(self) -> tvm.IRModule:
        """Return all functions."""
        return tvm.IRModule(
            {name: make_function(name, emit) for name, emit in self.list_functions().items()}
        )

    def _take_hidden(self, take: Parameters, count: v.Expr) -> Activations:
        """Declare the activations of one token; ``count`` is any positive parameter."""
        spec = self.spec
        return take.take_activations(
            "hidden", spec.hidden, spec.planes, count, pairs=self.isa.pairs
        )

    def _take_chunk(self, take: Parameters, name: str, length: int, tokens: v.Expr) -> Activations:
        """Declare the activations of one token or a chunk."""
        spec = self.spec
        return take.take_activations(
            name, length, spec.planes, tokens, spec.chunk_planes, pairs=self.isa.pairs
        )

    def _take_routes(self, take: Parameters) -> v.Buffer | None:
        return take.take_array("routes", "float32") if self.spec.experts else None

    def _take_norm(self, take: Parameters) -> NormWeights:
        weight = take.take_array("norm", "float32")
        bias = take.take_array("norm_bias", "float32") if self.spec.norm_bias else None
        return NormWeights(weight=weight, bias=bias)

    def emit_embed(self, take: Parameters) -> None:
        """Set x float32 [T, hidden] to rows ``ids`` of the embedding."""
        spec = self.spec
        tokens = take.take_number("tokens")
        weights = take.take_array("weights", "uint8")
        scales = take.take_array("scales", "uint8")
        ids = take.take_array("ids", "int32")
        x = take.take_array("x", "float32")
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

    def emit_add_positions(self, take: Parameters) -> None:
        """Add the learned vectors of the positions to x."""
        spec = self.spec
        tokens = take.take_number("tokens")
        position = take.take_number("position")
        table = take.take_array("table", "uint8")
        x = take.take_array("x", "float32")
        with T.serial(tokens) as token, T.serial(spec.hidden // 16) as step:
            byte = (v.wide(position + token) * spec.hidden + v.wide(step * 16)) * 2
            place = v.let(token * spec.hidden + step * 16)
            v.store(x, place, v.load(x, place, 16) + v.load_halves(table, byte, 16), 16)

    def emit_attend(self, take: Parameters) -> None:
        """Add the attention block to x; keys and values of the tokens are kept."""
        spec, isa = self.spec, self.isa
        tokens = take.take_number("tokens")
        position = take.take_number("position")
        context = take.take_number("context")
        x = take.take_array("x", "float32")
        before = take.take_array("before", "float32") if spec.keeps_input else None
        norm = self._take_norm(take)
        project = take.take_matrix("qkv", spec.qkv_rows, spec.hidden, spec.attention)
        bias = take.take_array("bias", "float32") if spec.qkv_bias else None
        head_norms = None
        if spec.head_norm:
            query_norm = take.take_array("query_norm", "float32")
            head_norms = (query_norm, take.take_array("key_norm", "float32"))
        output = take.take_matrix("output", spec.hidden, spec.width, spec.attention)
        output_bias = take.take_array("output_bias", "float32") if spec.output_bias else None
        cosines = take.take_array("cosines", "float32")
        sines = take.take_array("sines", "float32")
        keys = take.take_array("keys", KV_DTYPES[spec.kv])
        values = take.take_array("values", KV_DTYPES[spec.kv])
        scales = None
        if spec.kv == "int8":
            names = ("key_scales", "value_scales")
            scales = (take.take_array(names[0], "float16"), take.take_array(names[1], "float16"))
        qkv = take.take_array("qkv", "float32")
        hidden = self._take_chunk(take, "hidden", spec.hidden, tokens)
        mixed = self._take_chunk(take, "mixed", spec.width, tokens)
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
                span_bytes = 2 * KV_BLOCK * spec.head_dim * KV_ITEM_BYTES[spec.kv]

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
                    emit_chunk_attention(
                        spec, qkv, cache, output_values, tokens, position, tile, head
                    )
        emit_each_token(tokens, lambda t: emit_quantize(mixed, t))
        emit_multiply(isa, spec.threads, output, mixed, tokens, add_residual)

    def emit_begin_ffn(self, take: Parameters) -> None:
        """Normalise and quantise x; set y to zero."""
        spec = self.spec
        tokens = take.take_number("tokens")
        x = take.take_array("x", "float32")
        norm = self._take_norm(take)
        hidden = self._take_chunk(take, "hidden", spec.hidden, tokens)
        y = take.take_array("y", "float32")

        def prepare(token: v.Expr) -> None:
            emit_normalize(spec, x, token, norm, hidden, token)
            with T.serial(spec.hidden // 16) as step:
                place = token * spec.hidden + step * 16
                v.store(y, place, v.constant(0.0, "float32", 16), 16)

        emit_each_token(tokens, prepare)

    def _make_low_rank(self, rank: int) -> Callable[[Parameters], None]:
        spec = self.spec
        precision = spec.predictor
        assert precision is not None

        def emit(take: Parameters) -> None:
            neurons = take.take_number("neurons")
            threshold = take.take_number("threshold", "float32")
            inner = take.take_matrix("inner", rank, spec.hidden, precision)
            weights = take.take_array("outer_weights", "uint8")
            scales = take.take_array("outer_scales", "uint8")
            bias = take.take_array("bias", "float32")
            hidden = self._take_hidden(take, neurons)
            middle = take.take_activations("middle", rank, spec.planes, neurons)
            scores = take.take_array("scores", "float32")
            indices = take.take_array("indices", "int32")
            found = take.take_array("found", "int32")
            outer = Matrix(
                weights=weights, scales=scales, rows=neurons, length=rank, precision=precision
            )
            emit_low_rank(self.isa, spec.threads, inner, outer, bias, hidden, middle, scores)
            emit_compact(scores, neurons, threshold, False, indices, found)

        return emit

    def emit_predict_gate(self, take: Parameters) -> None:
        """Compute all gates of a layer, or of an expert, and list those that are open.

        Smooth activations are computed too: those that reach ``limit`` count as open.
        """
        spec = self.spec
        precision = spec.gate_rows
        assert precision is not None
        neurons = take.take_number("neurons")
        least = take.take_number("limit", "float32") if spec.is_smooth else None
        weights = take.take_array("weights", "uint8")
        scales = take.take_array("scales", "uint8")
        biases = take.take_array("biases", "float32") if spec.ffn_bias else None
        hidden = self._take_hidden(take, neurons)
        scores = take.take_array("scores", "float32")
        indices = take.take_array("indices", "int32")
        found = take.take_array("found", "int32")
        matrix = Matrix(
            weights=weights, scales=scales, rows=neurons, length=spec.hidden, precision=precision
        )

        def keep(_token: v.Expr, row: v.Expr, value: v.Expr) -> None:
            v.store(scores, row, value if biases is None else value + biases[row], 1)

        emit_multiply(self.isa, spec.threads, matrix, hidden, None, keep)
        if least is not None:
            emit_activate(spec, scores, neurons)
            emit_compact(scores, neurons, least, False, indices, found, magnitudes=True)
            return
        limit = spec.threshold if spec.activation == "fatrelu" else 0.0
        emit_compact(scores, neurons, v.constant(limit, "float32"), True, indices, found)

    def emit_add_neurons(self, take: Parameters) -> None:
        """Add gathered neurons to y of one token."""
        self._emit_gathered(take, known=False)

    def emit_add_open_neurons(self, take: Parameters) -> None:
        """Add gathered neurons whose gates `predict_gate` has computed and found open."""
        self._emit_gathered(take, known=True)

    def _emit_gathered(self, take: Parameters, *, known: bool) -> None:
        count = take.take_number("count")
        limit = take.take_number("limit", "float32") if known and self.spec.is_smooth else None
        arena = take.take_array("arena", "uint8")
        slots = take.take_array("slots", "int32")
        hidden = self._take_hidden(take, count)
        scratch = Scratch(
            gates=take.take_array("gates", "float32"),
            values=take.take_array("values", "float32"),
            firing=take.take_array("firing", "int32"),
            partial=take.take_array("partial", "float32"),
            counts=take.take_array("counts", "int32"),
        )
        total = take.take_array("y", "float32")
        routes = self._take_routes(take)
        gates = None
        if known:
            gates = (take.take_array("scores", "float32"), take.take_array("indices", "int32"))
        emit_gathered(
            self.isa,
            self.spec,
            hidden,
            arena,
            slots,
            count,
            scratch,
            total,
            known=gates,
            limit=limit,
            routes=routes,
        )

    def emit_add_plain_neurons(self, take: Parameters) -> None:
        """Add gathered neurons that have biases or no gate to y of one token."""
        count = take.take_number("count")
        arena = take.take_array("arena", "uint8")
        slots = take.take_array("slots", "int32")
        emit_plain_gathered(
            self.isa,
            self.spec,
            self._take_hidden(take, count),
            arena,
            slots,
            count,
            partial=take.take_array("partial", "float32"),
            counts=take.take_array("counts", "int32"),
            total=take.take_array("y", "float32"),
            routes=self._take_routes(take),
        )

    def emit_add_dense(self, take: Parameters) -> None:
        """Add contiguous neurons to y of all tokens."""
        count = take.take_number("count")
        tokens = take.take_number("tokens")
        bundles = take.take_array("bundles", "uint8")
        spec = self.spec
        hidden = take.take_activations(
            "hidden", spec.hidden, spec.chunk_planes, count, pairs=self.isa.pairs
        )
        emit_dense(
            self.isa,
            self.spec,
            hidden,
            bundles,
            values=take.take_array("values", "float32"),
            masks=take.take_array("masks", "int32"),
            unpacked=take.take_array("unpacked", "float32"),
            total=take.take_array("y", "float32"),
            routes=self._take_routes(take),
            count=count,
            tokens=tokens,
        )

    def emit_end_ffn(self, take: Parameters) -> None:
        """Add y to x."""
        spec = self.spec
        tokens = take.take_number("tokens")
        x = take.take_array("x", "float32")
        y = take.take_array("y", "float32")
        bias = take.take_array("down_bias", "float32") if spec.ffn_bias else None

        def finish(token: v.Expr) -> None:
            base = v.let(token * spec.hidden)
            emit_scale(y, base, spec.hidden, spec.residual_factor)
            emit_leave_lane_order(spec.hidden, spec.ffn, y, x, token)
            if bias is not None:
                emit_add_scaled(bias, x, base, spec.hidden, spec.residual_factor)

        emit_each_token(tokens, finish)

    def emit_logits(self, take: Parameters) -> None:
        """Set logits float32 [T, vocab] of the tokens from ``first`` on."""
        spec = self.spec
        first = take.take_number("first")
        tokens = take.take_number("tokens")
        x = take.take_array("x", "float32")
        norm = self._take_norm(take)
        head = take.take_matrix("head", spec.vocab, spec.hidden, spec.head)
        # All of them in two planes, however the chunk was computed.
        hidden = take.take_activations(
            "hidden", spec.hidden, spec.planes, tokens, spec.planes, pairs=self.isa.pairs
        )
        logits = take.take_array("logits", "float32")

        def keep(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
            if spec.logit_factor != 1.0:
                value = value * v.constant(spec.logit_factor, "float32")
            if spec.logit_cap is not None:
                value = v.take_cap(value, spec.logit_cap, 1)
            v.store(logits, v.wide(token) * spec.vocab + v.wide(row), value, 1)

        emit_each_token(tokens, lambda t: emit_normalize(spec, x, first + t, norm, hidden, t))
        emit_multiply(self.isa, spec.threads, head, hidden, tokens, keep)
