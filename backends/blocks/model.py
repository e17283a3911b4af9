"""A model whose weights stay as they lie in a file: `BlockModel`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from pi2.arrays import F32, I32, U8
from pi2.backends.blocks.building import Area, Builder, Matrix, Product, Routed
from pi2.backends.blocks.instructions import FindWeight, Program, Threads, Weight
from pi2.backends.blocks.room import KvCache, Libraries
from pi2.backends.blocks.routed import PairTables, list_routed, view_floats
from pi2.backends.executor import CONTEXT_BLOCK
from pi2.model.blocks import find_attention
from pi2.plan.arithmetic.sizes import LOGIT_ROWS
from pi2.plan.documents.model import Model
from pi2.progress import Progress, ignore_progress


class Layers:
    """Adds a model's embedding, layers and head to a program."""

    def __init__(self, model: Model, builder: Builder, rows: int, predicts: bool) -> None:
        """``rows``: most tokens whose logits are computed in a call; ``predicts``: the router of
        the next layer chooses early, to prefetch its experts."""
        self._model = model
        self._predicts = predicts
        self.predictions: dict[int, tuple[int, int]] = {}
        """First and last of these instructions, which stand before a layer's own choice."""
        self._builder = builder
        self._hidden = model.shape.hidden
        self.x = builder.take_area("x", self._hidden)
        """The residual stream."""
        self.u = builder.take_area("u", self._hidden)
        self.logits = builder.take_area("logits", model.shape.vocab, tokens=rows)

    def add_embedding(self) -> None:
        weight = self._need("embedding", None)
        self._builder.add_rows(weight, self.x, self._model.multipliers.embedding)
        own = self._model.operators.get("mtp")
        if own is not None:
            self._add_join(own["in"], own["token_norm"], own["stream_norm"])

    def _add_join(self, project: str, token_norm: str, stream_norm: str) -> None:
        """Add what an MTP head reads: embeddings, and what `BlockModel.join` has."""
        builder, hidden = self._builder, self._hidden
        joined = builder.take_area("joined", 2 * hidden)
        builder.add_norm(token_norm, self.x, joined, hidden)
        stream = builder.take_area("stream", hidden)
        builder.add_norm(stream_norm, stream, joined.skip(hidden), hidden)
        own = Product(key=project, weight=self._need(project, None), y=self.x)
        builder.add_products(joined, 2 * hidden, [own])

    def add_layer(self, layer: int) -> None:
        builder, model = self._builder, self._model
        builder.layer = layer
        read = self._normalize("attention_norm", self.u)
        is_parallel = model.residual == "parallel"
        if is_parallel:
            # Both read the layer's input, and attention changes it.
            other = read
            if model.norm.inputs and self._find("ffn_norm", layer) is not None:
                other = self._normalize("ffn_norm", builder.take_area("v", self._hidden))
        self._add_attention(layer, read)
        if not is_parallel:
            other = self._normalize("ffn_norm", self.u)
        self._add_ffn(layer, other)
        builder.layer = None

    def add_head(self) -> int:
        """Add the last norm and the head; return the number of the first instruction."""
        builder, model = self._builder, self._model
        first = len(builder.instructions)
        builder.add_norm("final_norm", self.x, self.u, self._hidden, has_weights=model.norm.weights)
        weight = self._need("embedding" if model.tied_head else "head", None)
        bias = builder.read_vector("head_bias", None) if model.head_bias else 0
        head = Product(key="head", weight=weight, y=self.logits, bias=bias)
        builder.add_products(self.u, self._hidden, [head])
        limit, factor = model.logit_softcap or 0.0, model.multipliers.logits
        if limit or factor != 1.0:
            builder.add_cap(self.logits, model.shape.vocab, limit, factor)
        return first

    def _find(self, key: str, layer: int | None) -> Weight | None:
        return self._builder.find(key, layer)

    def _need(self, key: str, layer: int | None) -> Weight:
        weight = self._find(key, layer)
        assert weight is not None, f"the source has no tensor {key} of layer {layer}"
        return weight

    def _make(self, key: str, layer: int, y: Area, has_bias: bool = False, **more: Any) -> Product:
        bias = self._builder.read_vector(f"{key}_bias", layer) if has_bias else 0
        return Product(key=key, weight=self._need(key, layer), y=y, bias=bias, **more)

    def _list_inputs(
        self, fused: str, layer: int, parts: list[tuple[str, Area]], has_bias: bool
    ) -> list[Product]:
        """Return the matrices of ``parts``, or one that has all of them."""
        is_fused = getattr(self._model.tensors, fused) is not None
        if is_fused and self._find(fused, layer) is not None:
            parts = [(fused, parts[0][1])]
        return [self._make(key, layer, y, has_bias) for key, y in parts]

    def _normalize(self, key: str, target: Area) -> Area:
        norm = self._model.norm
        if not norm.inputs:
            return self.x
        self._builder.add_norm(key, self.x, target, self._hidden, has_weights=norm.weights)
        return target

    def _add_output(
        self,
        key: str,
        norm: str,
        source: Area,
        length: int,
        layer: int,
        has_bias: bool,
        factor: float = 1.0,
    ) -> None:
        """Add what a matrix makes of ``source``, times ``factor``, to the residual stream."""
        builder = self._builder
        if not self._model.norm.outputs:
            factor *= self._model.multipliers.residual
            own = self._make(key, layer, self.x, has_bias, added=True, factor=factor)
            builder.add_products(source, length, [own])
            return
        given = builder.take_area("given", self._hidden)
        builder.add_products(source, length, [self._make(key, layer, given, has_bias)])
        builder.add_norm(norm, given, self.x, self._hidden, added=True)

    def _add_attention(self, layer: int, read: Area) -> None:
        builder, model = self._builder, self._model
        own, attention = find_attention(model, layer), model.attention
        query, keys = own.query, own.keys
        projected = builder.take_area("qkv", query + 2 * keys)
        areas = {
            "query": projected,
            "key": projected.skip(query),
            "value": projected.skip(query + keys),
        }
        parts = list(areas.items())[: None if own.has_keys else 1]
        products = self._list_inputs("fused_qkv", layer, parts, attention.qkv_bias)
        builder.add_products(read, self._hidden, products)
        neighbours = products[0].weight.neighbours or own.rope.pairs == "neighbours"
        norms = [("query", "query_norm", query, own.heads)]
        if own.has_keys:
            norms.append(("key", "key_norm", keys, own.kv_heads))
        if own.head_norm and attention.head_norm_of == "all":
            for kind, norm, width, _ in norms:
                builder.add_norm(norm, areas[kind], areas[kind], width, is_rms=True)
        if attention.clip is not None:
            length = query + 2 * keys if own.has_keys else query
            builder.add_cap(projected, length, -attention.clip, 1.0)
        for place, (kind, norm, _, heads) in enumerate(norms):
            builder.add_turn(
                areas[kind], heads, own, norm, neighbours=neighbours, waits=place == len(norms) - 1
            )
        mixed = builder.take_area("mixed", query)
        builder.add_attention(areas["query"], areas["key"], areas["value"], mixed, own, layer)
        if attention.sub_norm:
            builder.add_norm("attention_sub_norm", mixed, mixed, query, is_rms=True)
        has_bias = attention.output_bias
        self._add_output("output", "attention_output_norm", mixed, query, layer, has_bias)

    def _add_ffn(self, layer: int, read: Area) -> None:
        model = self._model
        moe = model.moe
        if moe is None:
            self._add_dense(layer, read, ("gate", "up", "down"), "fused_gate_up", model.shape.ffn)
        elif not model.blocks[layer].ffn.has_router:
            kinds = ("dense_gate", "dense_up", "dense_down")
            self._add_dense(layer, read, kinds, "fused_dense", model.blocks[layer].ffn.width)
        else:
            self._add_mixture(layer, read)

    def _add_dense(
        self,
        layer: int,
        read: Area,
        kinds: tuple[str, str, str],
        fused_kind: str,
        width: int,
        scores: Area | None = None,
        factor: float = 1.0,
    ) -> None:
        """Add an FFN, times ``factor`` and the sigmoid of ``scores``."""
        builder, ffn = self._builder, self._model.ffn
        inner = builder.take_area("inner", 2 * width)
        own = enumerate(kinds[:2] if ffn.gated else kinds[1:2])
        parts = [(kind, inner.skip(width * place)) for place, kind in own]
        products = self._list_inputs(fused_kind, layer, parts, ffn.bias)
        builder.add_products(read, self._hidden, products)
        active = builder.take_area("active", width)
        builder.add_gate(inner, inner.skip(width) if ffn.gated else None, active, width)
        if ffn.sub_norm:
            builder.add_norm("ffn_sub_norm", active, active, width, is_rms=True)
        if scores is not None:
            builder.add_weighing(active, width, scores)
        self._add_output(kinds[2], "ffn_output_norm", active, width, layer, ffn.bias, factor)

    def _add_mixture(self, layer: int, read: Area) -> None:
        builder, model, moe = self._builder, self._model, self._model.moe
        ffn = model.ffn
        assert moe is not None
        width, active = model.shape.ffn, moe.active_experts
        scores = builder.take_area("scores", moe.experts)
        own = self._make("router", layer, scores, moe.router_bias)
        builder.add_products(read, self._hidden, [own])
        routed = builder.list_routed()
        if self._predicts and layer + 1 < len(model.blocks):
            self._add_prediction(layer + 1, routed)
        builder.add_routing(scores, layer, routed)
        if moe.shared_experts:
            self._add_shared(layer, read)
        inner = builder.take_area("pairs", 2 * width, active)
        kinds = ("gate", "up") if ffn.gated else ("up",)
        is_input = moe.weighs == "input"
        products = [
            self._make(
                kind, layer, inner.skip(width * place), ffn.bias, routed=routed, is_weighed=is_input
            )
            for place, kind in enumerate(kinds)
        ]
        builder.add_products(read, self._hidden, products)
        mixed = builder.take_area("active", width, active)
        ups = inner.skip(width) if ffn.gated else None
        builder.add_gate(inner, ups, mixed, width, each=active)
        down = self._make(
            "down",
            layer,
            self.x,
            ffn.bias,
            added=True,
            factor=model.multipliers.residual,
            routed=routed,
            of_tokens=False,
            is_weighed=not is_input,
        )
        builder.add_products(mixed, width, [down], each=active)

    def _add_prediction(self, layer: int, routed: Routed) -> None:
        """Let the router of ``layer``, the next one, choose by the residual stream as it is."""
        builder, moe = self._builder, self._model.moe
        if moe is None or not self._model.blocks[layer].ffn.has_router:
            return
        now, builder.layer, first = builder.layer, layer, len(builder.instructions)
        read = self._normalize("ffn_norm", builder.take_area("ahead", self._hidden))
        scores = builder.take_area("predicted scores", moe.experts)
        own = self._make("router", layer, scores, moe.router_bias)
        builder.add_products(read, self._hidden, [own])
        builder.add_choice(scores, layer, routed.predicted, routed.predicted_weights)
        builder.layer = now
        self.predictions[layer - 1] = first, len(builder.instructions)

    def _add_shared(self, layer: int, read: Area) -> None:
        builder, moe, scores = self._builder, self._model.moe, None
        assert moe is not None
        if moe.shared_gate:
            scores = builder.take_area("shared_score", 1)
            own = self._make("shared_router", layer, scores)
            builder.add_products(read, self._hidden, [own])
        width = moe.shared_ffn or moe.shared_experts * self._model.shape.ffn
        kinds = ("shared_gate", "shared_up", "shared_down")
        self._add_dense(layer, read, kinds, "fused_shared", width, scores, moe.shared_factor)


PANEL_ROWS = 16
"""Streamed pieces have whole multiples of so many rows, a panel's on any processor."""
NoteKernel = Callable[[str, int | None, float, float], None]
"""Takes a kernel's name, its layer if it has one, and when it began and ended."""


class BlockModel:
    """Computes chunks of a sequence (`prefill`, then `logits`) and steps of several (`step`).  One
    calling thread.

    ``find(key, layer)`` gives tensors: vectors with their bytes, and matrices without, if they are
    streamed: `set_tensor` then says where they are before `run` computes instructions that read
    them.  Inputs of matrices that are quantised have ``planes`` of 8 bits in steps and in chunks:
    each is what those before it leave, quantised again.  With ``predicts`` the next layer's
    router chooses early (`RoutedLayer.prediction`)."""

    def __init__(
        self,
        model: Model,
        find: FindWeight,
        *,
        threads: int,
        context: int,
        sequences: int,
        chunk: int,
        architecture: str,
        features: Iterable[str],
        cores: Sequence[int] = (),
        planes: tuple[int, int] = (1, 1),
        predicts: bool = False,
        progress: Progress = ignore_progress,
    ) -> None:
        self._model = model
        formats = list_formats(model, find)
        libraries = Libraries(
            model, formats, architecture=architecture, features=features, progress=progress
        )
        context = -(-context // CONTEXT_BLOCK) * CONTEXT_BLOCK
        self._lanes = libraries.isa.lanes
        self._cache = KvCache(model, context, sequences)
        tokens = max(chunk, sequences, LOGIT_ROWS)
        self._builder = builder = Builder(
            model,
            find,
            libraries,
            self._cache,
            tokens=tokens,
            context=context,
            threads=threads,
            planes=max(planes),
        )
        self._layers = layers = Layers(model, builder, max(LOGIT_ROWS, sequences), predicts)
        layers.add_embedding()
        for layer in range(model.shape.layers):
            layers.add_layer(layer)
        self.head = layers.add_head()
        """The first instruction of the head."""
        builder.finish()
        self._program = Program(builder.instructions, self.head, planes)
        self.matrices: list[Matrix] = builder.matrices
        self._threads = Threads(libraries.steps, threads, cores)
        groups = [n for n, own in enumerate(builder.instructions) if own.kernel == "group"]
        self.routed = list_routed(self.matrices, groups, layers.predictions)
        """Layers with experts."""
        self.pairs: PairTables | None = None
        """Order in which their experts are computed, if the caller runs them in parts."""
        if builder.routed is not None:
            self.pairs = PairTables(self._program, builder.routed, tokens, self.run)
        self._chunk = chunk
        self.most_threads = threads
        """1: only the caller computes, which wakes no thread: quicker if it will wait anyway."""
        self._count = 0
        self._note: NoteKernel | None = None
        logits = layers.logits
        found = view_floats(logits.address, max(LOGIT_ROWS, sequences), logits.stride)
        self._logits = found[:, : model.shape.vocab]
        self._hidden = view_floats(layers.u.address, tokens, layers.u.stride)

    def step(self, tokens: I32, sequences: Sequence[int], positions: Sequence[int]) -> F32:
        """Return logits [T, vocab] of ``tokens`` [T], each the next one of its sequence or of
        those before it; valid until the next call."""
        self.begin_step(tokens, sequences, positions)
        self.run(0, self.end)
        return self.read_logits()

    def prefill(self, tokens: I32, sequence: int, position: int) -> None:
        """Compute a chunk of a sequence, the first token of which stands at ``position``."""
        self.begin_chunk(tokens, sequence, position)
        self.run(0, self.head)

    @property
    def end(self) -> int:
        return len(self._program.instructions)

    def run_rows(self, number: int, first: int, end: int, address: int) -> None:
        """Compute rows ``first`` to ``end`` of a product; row 0 would be at ``address``."""
        self._program.set_value(number, "weights", address)
        self._program.set_rows(number, first, end, self._lanes)
        self.run(number, number + 1)

    def put_rows(self, number: int, rows: U8) -> None:
        """Give the tokens' rows [T, bytes] of the embedding, matrix ``number``."""
        self._given = rows  # compiled code reads it until the step ends
        self.set_tensor(number, rows.ctypes.data)
        self._builder.numbers[: len(rows)] = np.arange(len(rows))

    def count_row_bytes(self, number: int) -> int:
        """Bytes of a row of what instruction ``number`` multiplies with."""
        found = (own for own in self.matrices if number in own.instructions)
        return next(found).weight.row_bytes

    def choose_logits(self, first: int) -> None:
        """Let the head compute the chunk's tokens from ``first`` on, `LOGIT_ROWS` at most."""
        self.set_logits(first, min(self._count - first, LOGIT_ROWS))

    def logits(self, first: int) -> F32:
        """Return logits [n, vocab] of the last chunk's tokens from ``first`` on, n at most
        `LOGIT_ROWS`; valid until the next call."""
        self.choose_logits(first)
        self.run(self.head, self.end)
        return self.read_logits()

    def begin_step(self, tokens: I32, sequences: Sequence[int], positions: Sequence[int]) -> None:
        """Write the inputs of a step; logits are those after every token."""
        self._begin(tokens, sequences, positions, is_chunk=False)
        self.set_logits(0, len(tokens))

    def _begin(
        self, tokens: I32, sequences: Sequence[int], positions: Sequence[int], *, is_chunk: bool
    ) -> None:
        count = self._count = len(tokens)
        builder = self._builder
        builder.numbers[:count] = tokens
        builder.sequences[:count] = sequences
        builder.positions[:count] = positions
        self._program.set_tokens(count, is_chunk=is_chunk)
        if self.pairs is not None:
            self.pairs.begin(count)

    def begin_chunk(self, tokens: I32, sequence: int, position: int) -> None:
        """Write the inputs of a chunk; its logits follow the last token."""
        count = len(tokens)
        assert count <= self._chunk, f"a chunk has at most {self._chunk} tokens, not {count}"
        places = list(range(position, position + count))
        self._begin(tokens, [sequence] * count, places, is_chunk=True)
        self.set_logits(count - 1, 1)

    def set_logits(self, first: int, count: int) -> None:
        """Let the head compute ``count`` tokens from ``first`` on."""
        x = self._layers.x
        self._program.set_value(self.head, "x", x.address + 4 * first * x.stride)
        self._program.set_head_tokens(count)
        self._rows = count

    def read_logits(self) -> F32:
        """Return what the head gave last [n, vocab]."""
        return self._logits[: self._rows]

    def read_head_input(self, first: int) -> F32:
        """Return what the head reads of the chunk's tokens from ``first`` on [n, hidden], n at
        most `LOGIT_ROWS`; valid until the next call."""
        self.choose_logits(first)
        self.run(self.head, self.head + 1)
        return self._hidden[: self._rows, : self._model.shape.hidden]

    def join(self, given: F32) -> None:
        """See `pi2.backends.executor.InputJoiner`."""
        hidden = self._model.shape.hidden
        area = self._builder.take_area("stream", hidden)
        view_floats(area.address, len(given), area.stride)[:, :hidden] = given

    def run(self, begin: int, end: int) -> None:
        """Compute instructions ``begin`` to ``end``."""
        if self._note is None:
            self._threads.run(self._program.address, begin, end, self.most_threads)
            return
        for number in range(begin, end):
            own = self._program.instructions[number]
            start_s = time.perf_counter()
            self._threads.run(self._program.address, number, number + 1, self.most_threads)
            self._note(own.label, own.layer, start_s, time.perf_counter())

    def set_tensor(self, number: int, address: int) -> None:
        """Say where the bytes of matrix ``number`` are from now on."""
        for instruction in self.matrices[number].instructions:
            self._program.set_value(instruction, "weights", address)

    def place_experts(self, number: int, address: int, places: I32, unit: int) -> None:
        """Say where experts of matrix ``number`` are from now on: ``places`` [experts], which the
        caller changes, counts them in ``unit`` bytes from ``address`` on."""
        own = {"weights": address, "place_of": places.ctypes.data, "expert_bytes": unit}
        for instruction in self.matrices[number].instructions:
            for name, value in own.items():
                self._program.set_value(instruction, name, value)

    def expect(self, end: int) -> None:
        """Tell that the calls that follow bring a sequence to ``end`` tokens at most."""
        for tables in self._builder.ropes.values():
            tables.expect(end)

    def observe(self, note: NoteKernel | None) -> None:
        """Call ``note`` after every instruction, each then a call of its own; None ends it."""
        self._note = note

    def read_context(self, sequence: int, first: int, end: int) -> U8:
        return self._cache.read(sequence, first, end)

    def put_context(self, sequence: int, first: int, end: int, kept: U8) -> None:
        self._cache.put(sequence, first, end, kept)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of its allocations, without the KV cache."""
        return self._builder.kept_bytes

    def close(self) -> None:
        """End the threads.  Never fails, and may be called twice."""
        self._threads.close()


def list_formats(model: Model, find: FindWeight) -> list[str]:
    keys = ["query", "key", "value", "output", "gate", "up", "down", "fused_qkv", "fused_gate_up"]
    if model.moe is not None:
        keys += [f"{own}_{part}" for own in ("shared", "dense") for part in ("gate", "up", "down")]
        keys += ["fused_shared", "fused_dense", "router", "shared_router"]
    places = [(key, layer) for layer in range(model.shape.layers) for key in keys]
    places += [("embedding", 0), ("head", 0), *((own["in"], 0) for own in model.operators.values())]
    found = {weight.format for key, layer in places if (weight := find(key, layer)) is not None}
    return sorted(found)
